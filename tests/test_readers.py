"""Readers: each format gives the expected scene, bad input is named and skipped, doubt silences what it touches."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from traffic_vlm.data.questions import enumerate_questions
from traffic_vlm.data.readers import (
    LAYOUTS,
    Problems,
    Record,
    SourceMap,
    check_sources,
    load_mapping,
    read_source,
    shipped_mappings,
)
from traffic_vlm.data.scene import CLASSES, Scene, SceneObject
from traffic_vlm.images_traffic_vlm import to_rgb
from traffic_vlm.utils import DataError


CLASSES_OF_TEST = {
    "Car": "car",
    "motor_bike": "motorcycle",
    "minivan": {"class": "vehicle", "maybe": ["car"]},
    "DontCare": {"class": None, "maybe": ["car", "pedestrian"]},
    "red light": {"class": "traffic light", "state": "red"},
    "bench": None,
}
EXHAUSTIVE = ["car", "motorcycle", "pedestrian", "vehicle"]


def mapping_of(folder: Path, kind: str, /, **keys: Any) -> SourceMap:
    """The mapping of the tests, written to a file and read back."""
    layout = {key: key for key in LAYOUTS[kind]} | {"annotations": "labels.json"}
    layout = {key: value for key, value in layout.items() if key in LAYOUTS[kind]}
    raw = {
        "name": "test",
        "format": kind,
        "splits": {"train": layout},
        "classes": CLASSES_OF_TEST | {"man": "pedestrian"},
    }
    path = folder / "mapping.json"
    path.write_text(json.dumps(raw | {"exhaustive": EXHAUSTIVE} | keys))
    return load_mapping(path)


def image(path: Path, width: int = 280, height: int = 140) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height)).save(path)
    return path


def coco(folder: Path, *boxes: tuple[str, list[Any]], **more: Any) -> SourceMap:
    """A COCO source of one image `a.jpg` with these (class name, box)."""
    image(folder / "images/a.jpg")
    names = [name for name, _ in boxes]
    raw = {
        "categories": [{"id": number, "name": name} for number, name in enumerate(names)],
        "images": [{"id": 7, "file_name": "a.jpg", "width": 280, "height": 140}],
        "annotations": [
            {"id": 10 + number, "image_id": 7, "category_id": number, "bbox": box}
            for number, (_, box) in enumerate(boxes)
        ],
    }
    (folder / "labels.json").write_text(json.dumps(raw | more))
    return mapping_of(folder, "coco")


def lines(path: Path, *rows: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")


def read(folder: Path, mapping: SourceMap) -> tuple[list[Record], Problems]:
    problems = Problems()
    return list(read_source(folder, mapping, problems=problems)), problems


def scene(*objects: SceneObject, without: tuple[str, ...] = (), **more: Any) -> Scene:
    exhaustive = frozenset(EXHAUSTIVE) - set(without)
    return Scene(280, 140, objects, exhaustive=exhaustive, source="test", image_id="images/a.jpg", **more)


def assert_reported(folder: Path, mapping: SourceMap, kind: str, *parts: str) -> list[Record]:
    """The only problem is of this kind and names its place; strict reading raises the same message."""
    records, problems = read(folder, mapping)
    counts = dict(problems.counts)
    if not records:
        assert counts.pop("empty source") == 1
    assert counts == {kind: 1}
    assert all(part in problems.messages[0] for part in parts), problems.messages
    with pytest.raises(DataError) as error:
        list(read_source(folder, mapping, problems=Problems(strict=True)))
    assert str(error.value) == problems.messages[0]
    return records


# ----------------------------------------------------------------------------------------------------------- formats


def test_coco(tmp_path):
    mapping = coco(tmp_path, ("car", [10, 20, 30, 40]), ("Motor-Bike", [-10, 0, 20, 10]), ("bench", [0, 0, 0, 0]))
    records, problems = read(tmp_path, mapping)
    car = SceneObject("car", (10.0, 20.0, 40.0, 60.0))
    bike = SceneObject("motorcycle", (0.0, 0.0, 10.0, 10.0), visible=0.5)
    assert records == [Record(tmp_path / "images/a.jpg", scene(car, bike))]
    assert not problems.counts


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_pixels_are_not_decoded(tmp_path, monkeypatch, name):
    mapping = coco(tmp_path, images=[{"id": 7, "file_name": name}])
    whole = image(tmp_path / "images" / name).read_bytes()
    (tmp_path / "images" / name).write_bytes(whole[: len(whole) // 2])
    decoded: list[ImageFile.ImageFile] = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded.append)
    assert len(read(tmp_path, mapping)[0]) == 1 and not decoded


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_photograph_has_the_size_of_the_upright_picture(tmp_path, name, orientation):
    exif, stored = Image.Exif(), (140, 280) if orientation > 4 else (280, 140)
    exif[0x0112] = orientation
    images = [{"id": 7, "file_name": name, "width": 280, "height": 140}]
    mapping = coco(tmp_path, ("car", [200, 20, 30, 40]), images=images)
    Image.new("RGB", stored).save(tmp_path / "images" / name, exif=exif)
    records, problems = read(tmp_path, mapping)
    car = SceneObject("car", (200.0, 20.0, 230.0, 60.0))
    assert records[0].scene == replace(scene(car), image_id=f"images/{name}") and not problems.counts
    with Image.open(tmp_path / "images" / name) as photograph:
        assert to_rgb(photograph).size == (280, 140)
    if orientation > 4:
        images[0] |= {"width": 140, "height": 280}
        mapping = coco(tmp_path, ("car", [20, 200, 30, 40]), images=images)
        Image.new("RGB", stored).save(tmp_path / "images" / name, exif=exif)
        assert_reported(tmp_path, mapping, "image size", "280 × 140", "140 × 280")


def test_a_broken_exif_block_turns_nothing(tmp_path):
    mapping = coco(tmp_path, ("car", [200, 20, 30, 40]))
    Image.new("RGB", (280, 140)).save(tmp_path / "images/a.jpg", exif=b"Exif\x00\x00not a tiff header")
    [record], problems = read(tmp_path, mapping)
    assert (record.scene.width, record.scene.height) == (280, 140) and not problems.counts


def test_coco_scales_to_the_real_size_and_a_crowd_is_no_instance(tmp_path):
    labels = [
        {"image_id": 7, "category_id": 0, "bbox": [20, 40, 60, 80], "area": 100, "iscrowd": 1, "segmentation": [[1]]},
        {"image_id": 7, "category_id": 0, "bbox": [20, 40, 60, 80], "area": 4800, "segmentation": []},
    ]
    images = [{"id": 7, "file_name": "a.jpg", "width": 560, "height": 280}]
    records, _ = read(tmp_path, coco(tmp_path, ("car", [0, 0, 1, 1]), annotations=labels, images=images))
    crowd = SceneObject("car", (10.0, 20.0, 40.0, 60.0), area=25.0, is_instance=False)
    assert records[0].scene == scene(crowd, SceneObject("car", (10.0, 20.0, 40.0, 60.0)))


def test_yolo(tmp_path):
    image(tmp_path / "images/a.jpg")
    outline = "1 0.5 0.5 0.75 0.5 0.75 1.0"
    lines(tmp_path / "labels/a.txt", "0 0.5 0.5 0.25 0.5", "", outline)
    records, problems = read(tmp_path, mapping_of(tmp_path, "yolo", names=["Car", "man"]))
    car = SceneObject("car", (105.0, 35.0, 175.0, 105.0))
    assert records[0].scene == scene(car, SceneObject("pedestrian", (140.0, 70.0, 210.0, 140.0)))
    assert not problems.counts


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("classes.txt", "Car\nred light\n"),
        ("data.yaml", "train: x\nnames: ['Car', \"red light\"]\nnc: 2\n"),
        ("data.yaml", "names: [Car,\n  red light]  # two\n"),
        ("data.yaml", "names: {0: Car, 1: red light}\n"),
        ("data.yaml", "names:\n  - Car\n  - red light # lit\nnc: 2\n"),
        ("data.yaml", "names:\n  0: Car\n  1: 'red light'\npath: 1\n"),
        ("data.yaml", "names:\n  1: red light\n  2: Car\n"),
        ("data.yaml", "names: {1: red light, 0: Car}\n"),
    ],
)
def test_yolo_finds_its_class_names(tmp_path, file, text):
    image(tmp_path / "images/a.jpg")
    (tmp_path / file).write_text(text)
    lines(tmp_path / "labels/a.txt", "1 0.5 0.5 1 1")
    records, _ = read(tmp_path, mapping_of(tmp_path, "yolo"))
    light = SceneObject("traffic light", (0.0, 0.0, 280.0, 140.0), attributes={"state": "red"})
    assert records[0].scene == scene(light)


def test_kitti(tmp_path):
    image(tmp_path / "images/a.png")
    lines(
        tmp_path / "labels/a.txt",
        "Car 0.50 1 -1.57 10.0 20.0 30.0 40.0 1.5 1.6 3.7 1 2 10 0",
        "man 0.00 3 0.2 100 20 130 90 1.5 1.6 3.7 1 2 10 0",
        "DontCare -1 -1 -10 50 60 69 69 -1 -1 -1 -1000 -1000 -1000 -10",  # under a patch of 20 × 10
    )
    records, problems = read(tmp_path, mapping_of(tmp_path, "kitti"))
    car = SceneObject("car", (10.0, 20.0, 30.0, 40.0), visible=0.35)
    man = SceneObject("pedestrian", (100.0, 20.0, 130.0, 90.0), visible=0.0)
    assert records[0].scene == replace(scene(car, man), image_id="images/a.png")
    assert not problems.counts


def test_a_region_that_was_not_labelled_takes_the_no_of_what_it_may_hold(tmp_path):
    records, problems = read(tmp_path, coco(tmp_path, ("DontCare", [0, 0, 20, 10])))
    assert records[0].scene == scene(without=("car", "vehicle", "pedestrian"))
    assert not problems.counts


def bdd(folder: Path, *frames: dict[str, Any], whole: bool = False) -> SourceMap:
    image(folder / "images/a.jpg")
    (folder / "labels.json").write_text(json.dumps({"frames": frames} if whole else frames))
    values = {
        "weather": {"from": "weather", "values": {"overcast": "cloudy", "undefined": None}},
        "state": {"from": "trafficLightColor", "values": {"G": "green", "NA": None}},
    }
    classes = CLASSES_OF_TEST | {"man": "pedestrian", "traffic light": "traffic light"}
    attributed = {"traffic light": ["state"]}
    facts = {"view": "driver"}
    return mapping_of(folder, "bdd100k", classes=classes, values=values, attributed=attributed, facts=facts)


def label(category: str, x1: float, y1: float, x2: float, y2: float, **attributes: Any) -> dict[str, Any]:
    return {"category": category, "box2d": {"x1": x1, "y1": y1, "x2": x2, "y2": y2}, "attributes": attributes}


@pytest.mark.parametrize("whole", [False, True])
def test_bdd100k(tmp_path, whole):
    labels = [
        label("Car", 10, 20, 30, 40, occluded=True, truncated=True, trafficLightColor="NA"),
        label("traffic light", 1, 2, 3, 4, occluded=False, trafficLightColor="G"),
        {"category": "bench", "poly2d": []},
    ]
    frame = {"name": "a.jpg", "attributes": {"weather": "overcast", "scene": "x"}, "labels": labels}
    records, problems = read(tmp_path, bdd(tmp_path, frame, whole=whole))
    car = SceneObject("car", (10.0, 20.0, 30.0, 40.0), visible=0.7**2)
    light = SceneObject("traffic light", (1.0, 2.0, 3.0, 4.0), attributes={"state": "green"})
    facts = {"view": "driver", "weather": "cloudy"}
    assert records[0].scene == scene(car, light, facts=facts, attributed={"traffic light": frozenset({"state"})})
    assert not problems.counts


def test_one_object_without_an_attribute_makes_it_unknown_in_its_scene(tmp_path):
    labels = [label("traffic light", 1, 2, 3, 4, trafficLightColor=color) for color in ("G", "NA")]
    frame = {"name": "a.jpg", "attributes": {"weather": "undefined"}, "labels": labels}
    [record], problems = read(tmp_path, bdd(tmp_path, frame))
    assert record.scene.attributed == {} and record.scene.facts == {"view": "driver"}
    assert [item.attributes for item in record.scene.objects] == [{"state": "green"}, {}]
    assert not problems.counts


def masks(folder: Path, mask: np.ndarray, **keys: Any) -> SourceMap:
    image(folder / "images/a.jpg")
    (folder / "masks").mkdir(exist_ok=True)
    Image.fromarray(mask).save(folder / "masks/a.png")
    classes = [
        {"id": 1, "name": "Car"},
        {"id": 2, "name": "man"},
        {"id": 3, "name": "bench"},
        {"id": 4, "name": "motor bike"},
    ]
    (folder / "classes.json").write_text(json.dumps({"categories": classes}))
    layout = {"images": "images", "masks": "masks", "classes": "classes.json"}
    return mapping_of(folder, "masks", splits={"train": layout}, **keys)


def test_masks(tmp_path):
    mask = np.full((140, 280), 3, dtype=np.uint8)
    mask[20:35, 40:80] = 1  # rows 2 and half of 3, columns 2 and 3 of cells of 20 × 10
    mask[139, 279] = 2
    mask[0, :5] = 4
    presence = {"absent": 2, "present": 10, "at": [280, 140]}
    records, problems = read(tmp_path, masks(tmp_path, mask, presence=presence))
    cells = np.zeros((14, 14))
    cells[2, 2:4], cells[3, 2:4] = 1.0, 0.5
    bike = np.zeros((14, 14))
    bike[0, 0] = 5 / 200
    expected = scene(
        SceneObject("car", (40.0, 20.0, 80.0, 35.0), 600.0, cells=tuple(map(tuple, cells)), is_instance=False),
        SceneObject("motorcycle", (0.0, 0.0, 5.0, 1.0), 5.0, 0.0, cells=tuple(map(tuple, bike)), is_instance=False),
    )
    assert records[0].scene == expected
    assert not problems.counts


def test_thresholds_of_masks_grow_with_the_image(tmp_path):
    mask = np.full((140, 280), 3, dtype=np.uint8)
    mask[0, :20] = 1
    mapping = masks(tmp_path, mask, presence={"absent": 4, "present": 6, "at": [140, 70]})
    assert read(tmp_path, mapping)[0][0].scene.objects[0].visible == 0.0


# --------------------------------------------------------------------------------------------------------- bad input


def test_missing_image(tmp_path):
    mapping = coco(tmp_path, ("car", [0, 0, 9, 9]))
    (tmp_path / "images/a.jpg").unlink()
    assert_reported(tmp_path, mapping, "missing image", "labels.json: images[0] (7)", "a.jpg is missing")


def test_corrupt_image(tmp_path):
    mapping = coco(tmp_path, ("car", [0, 0, 9, 9]))
    (tmp_path / "images/a.jpg").write_bytes(b"no image at all")
    assert_reported(tmp_path, mapping, "corrupt image", "labels.json: images[0] (7)", "a.jpg cannot be opened")


@pytest.mark.parametrize(
    ("box", "what"),
    [
        ([300, 20, 30, 40], "outside its image of 280 × 140"),
        ([-50, 20, 30, 40], "outside its image"),
        ([10, 20, 0, 40], "no size"),
        ([10, 20, 30, -4], "no size"),
        ([10, 20, float("nan"), 4], "no size"),
        ([10, 20, "wide", 4], "no size"),
        ([10, 20], "no size"),
        (None, "no size"),
    ],
)
def test_a_bad_box_is_skipped_and_takes_the_no_of_its_class(tmp_path, box, what):
    mapping = coco(tmp_path, ("car", box), ("man", [0, 0, 9, 9]))
    [record] = assert_reported(tmp_path, mapping, "bad box", "labels.json: annotations[0] (10)", "'car'", what)
    assert record.scene == scene(SceneObject("pedestrian", (0.0, 0.0, 9.0, 9.0)), without=("car", "vehicle"))


def test_a_light_that_is_lost_takes_the_no_and_the_all_of_lights(tmp_path):
    coco(tmp_path, ("red light", [20, 20, 100, 100]), ("green light", [150, 20, 0, 40]))
    more = {"exhaustive": ["traffic light"], "attributed": {"traffic light": ["state"]}}
    classes = CLASSES_OF_TEST | {"green light": {"class": "traffic light", "state": "green"}}
    mapping = mapping_of(tmp_path, "coco", classes=classes, **more)
    [record] = assert_reported(tmp_path, mapping, "bad box", "annotations[1] (11)")
    assert not record.scene.exhaustive and not record.scene.attributed
    found = {truth.fact: truth.answer for truth in enumerate_questions(record.scene) if truth.kind == "light_state"}
    assert found == {"light_state/traffic light/any/red": "yes"}


def test_an_unknown_class_is_skipped_and_takes_every_no(tmp_path):
    mapping = coco(tmp_path, ("hovercraft", [0, 0, 9, 9]), ("car", [0, 0, 9, 9]))
    [record] = assert_reported(tmp_path, mapping, "unknown class", "annotations[0] (10)", "'hovercraft'", "'test'")
    assert record.scene == scene(SceneObject("car", (0.0, 0.0, 9.0, 9.0)), without=tuple(CLASSES))


def test_a_name_that_may_be_several_classes_takes_the_no_of_these(tmp_path):
    [record], problems = read(tmp_path, coco(tmp_path, ("minivan", [0, 0, 9, 9])))
    assert record.scene == scene(SceneObject("vehicle", (0.0, 0.0, 9.0, 9.0)), without=("car",))
    assert not problems.counts


def test_coco_annotation_without_image(tmp_path):
    annotations = [{"id": 3, "image_id": 99, "category_id": 0, "bbox": [0, 0, 9, 9]}]
    mapping = coco(tmp_path, ("car", [0, 0, 1, 1]), annotations=annotations)
    [record] = assert_reported(tmp_path, mapping, "annotation without image", "annotations[0] (3)", "image 99")
    assert record.scene == scene()


def test_image_of_another_shape(tmp_path):
    mapping = coco(tmp_path, ("car", [0, 0, 9, 9]))
    image(tmp_path / "images/a.jpg", 140, 280)
    assert_reported(tmp_path, mapping, "image size", "images[0] (7)", "140 × 280", "280 × 140")


def test_two_images_of_one_name(tmp_path):
    images = [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "a.jpg"}]
    records, problems = read(tmp_path, coco(tmp_path, images=images))
    assert not records and problems.counts == {"bad record": 2, "empty source": 1}


@pytest.mark.parametrize("name", ["../secret.jpg", "/etc/hosts"])
def test_image_outside_its_folder(tmp_path, name):
    mapping = coco(tmp_path, images=[{"id": 1, "file_name": name}])
    assert_reported(tmp_path, mapping, "bad record", "images[0] (1)", name, "leaves its folder")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"images": []}', '{"images": {}, "annotations": 1, "categories": 2}']
)
def test_broken_json(tmp_path, text):
    mapping = coco(tmp_path)
    (tmp_path / "labels.json").write_text(text)
    assert_reported(tmp_path, mapping, "bad file", "labels.json")


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_a_missing_folder_is_an_empty_source(tmp_path, kind):
    records, problems = read(tmp_path / "nowhere", mapping_of(tmp_path, kind, names=["Car"]))
    assert not records and problems.counts["empty source"] == 1 and problems.counts["bad file"] >= 1
    with pytest.raises(DataError, match="nowhere"):
        list(read_source(tmp_path / "nowhere", mapping_of(tmp_path, kind), problems=Problems(strict=True)))


def test_an_empty_source(tmp_path):
    mapping = coco(tmp_path, images=[], annotations=[])
    records, problems = read(tmp_path, mapping)
    assert not records and problems.counts == {"empty source": 1}
    assert problems.messages == [f"{tmp_path}: split 'train' of source 'test' has no image that can be used"]
    with pytest.raises(DataError, match="no image that can be used"):
        list(read_source(tmp_path, mapping, problems=Problems(strict=True)))


@pytest.mark.parametrize("kind", ["yolo", "kitti"])
@pytest.mark.parametrize("row", ["Car", "0 x 1 2 3", "0 1 2 3 4 5", "Car 0 0 0 1 2 nan 4"])
def test_a_bad_line_names_file_and_line(tmp_path, kind, row):
    image(tmp_path / "images/a.jpg")
    good = {"yolo": "0 0.5 0.5 1 1", "kitti": "Car 0 0 0 0 0 280 140"}[kind]
    lines(tmp_path / "labels/a.txt", good, row)
    mapping = mapping_of(tmp_path, kind, names=["Car"])
    if (kind, row) == ("yolo", "0 x 1 2 3"):
        [record] = assert_reported(tmp_path, mapping, "bad box", f"{tmp_path}/labels/a.txt:2: ")
        assert record.scene.exhaustive == {"motorcycle", "pedestrian"}
    else:
        [record] = assert_reported(tmp_path, mapping, "bad record", f"{tmp_path}/labels/a.txt:2: ")
        assert record.scene.exhaustive == frozenset()
    assert record.scene.objects == (SceneObject("car", (0.0, 0.0, 280.0, 140.0)),)


def test_yolo_class_id_without_a_name(tmp_path):
    image(tmp_path / "images/a.jpg")
    lines(tmp_path / "labels/a.txt", "-1 0.5 0.5 1 1")
    mapping = mapping_of(tmp_path, "yolo", names=["Car"])
    assert_reported(tmp_path, mapping, "unknown class", "a.txt:1: ", "'id -1'")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("classes.txt", "Car\n\nred light\n\n"),
        ("data.yaml", "names:\n  - Car\n  -\n  - red light\n"),
        ("data.yaml", "names:\n  0: Car\n  1:\n  2: red light\n"),
        ("data.yaml", "names:\n  2: red light\n  0: Car\n"),
        ("data.yaml", "names: {0: Car, 2: red light}\n"),
    ],
)
def test_yolo_class_id_whose_name_is_left_out(tmp_path, file, text):
    """It is no other class, and it moves no other name."""
    image(tmp_path / "images/a.jpg")
    (tmp_path / file).write_text(text)
    lines(tmp_path / "labels/a.txt", "1 0.5 0.5 1 1", "2 0.5 0.5 1 1")
    [record] = assert_reported(tmp_path, mapping_of(tmp_path, "yolo"), "unknown class", "a.txt:1: ", "'id 1'")
    assert [item.label for item in record.scene.objects] == ["traffic light"]


@pytest.mark.parametrize("kind", ["yolo", "kitti"])
def test_files_without_a_partner(tmp_path, kind):
    mapping = mapping_of(tmp_path, kind, names=["Car"])
    image(tmp_path / "images/a.jpg")
    lines(tmp_path / "labels/a.txt", "")
    lines(tmp_path / "labels/b.txt", "")
    [record] = assert_reported(tmp_path, mapping, "annotation without image", "labels/b.txt", "has no image")
    assert record.scene == scene()
    (tmp_path / "labels/b.txt").unlink()
    image(tmp_path / "images/c.jpg")
    assert_reported(tmp_path, mapping, "image without annotation", "images/c.jpg", "has no annotation")


def test_a_label_file_that_cannot_be_read_is_not_an_empty_scene(tmp_path):
    image(tmp_path / "images/a.jpg")
    lines(tmp_path / "labels/a.txt", "")
    (tmp_path / "labels/a.txt").write_bytes(b"\xff\xfe\xff")
    assert_reported(tmp_path, mapping_of(tmp_path, "kitti"), "bad file", "labels/a.txt")


@pytest.mark.parametrize(
    ("mask", "kind"),
    [(np.zeros((70, 140), np.uint8), "image size"), (np.zeros((140, 280, 3), np.uint8), "image size")],
)
def test_masks_of_another_size(tmp_path, mask, kind):
    assert_reported(tmp_path, masks(tmp_path, mask), kind, "masks/a.png")


def test_bad_masks(tmp_path):
    mapping = masks(tmp_path, np.full((140, 280), 9, np.uint8))
    [record] = assert_reported(tmp_path, mapping, "unknown class", "masks/a.png", "'id 9'")
    assert record.scene == scene(without=tuple(CLASSES))
    (tmp_path / "masks/a.png").write_bytes((tmp_path / "masks/a.png").read_bytes()[:60])
    assert_reported(tmp_path, mapping, "corrupt image", "masks/a.png", "mask cannot be decoded")


def test_bdd100k_bad_values_and_frames(tmp_path):
    frame = {"name": "a.jpg", "attributes": {"weather": ["odd"]}, "labels": [label("Car", 0, 0, 9, 9)]}
    [record] = assert_reported(tmp_path, bdd(tmp_path, frame), "unknown value", "frames[0] (a.jpg)", "weather")
    assert record.scene.facts == {"view": "driver"}
    assert_reported(
        tmp_path, bdd(tmp_path, frame | {"attributes": None, "labels": 3}), "bad record", "frames[0] (a.jpg)"
    )
    assert_reported(tmp_path, bdd(tmp_path, frame | {"attributes": {}, "labels": [4]}), "unknown class", "label 0")


def test_images_that_nobody_labelled_are_left_out_and_no_error(tmp_path):
    coco(tmp_path)
    mapping = mapping_of(tmp_path, "coco", unlabelled="empty")
    records, problems = read(tmp_path, mapping)
    assert not records and problems.counts == {"unlabelled image": 1, "empty source": 1}
    with pytest.raises(DataError, match="no image that can be used"):
        list(read_source(tmp_path, mapping, problems=Problems(strict=True)))


odd_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["a.jpg", "", "Car", "/", "\0", "x" * 300]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["id", "name"]), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["coco", "bdd100k"]))
def test_odd_values_never_crash_a_json_reader(tmp_path, data, kind):
    frame = {"name": "a.jpg", "attributes": {"weather": "overcast"}, "labels": [label("Car", 0, 0, 9, 9)]}
    mapping = coco(tmp_path, ("car", [0, 0, 9, 9])) if kind == "coco" else bdd(tmp_path, frame, whole=True)
    raw = json.loads((tmp_path / "labels.json").read_text())
    for _ in range(3):
        place: Any = raw
        while isinstance(place, dict | list) and place:
            key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
            if not isinstance(place[key], dict | list) or data.draw(st.integers(0, 4)) == 0:
                place[key] = data.draw(odd_json)
                break
            place = place[key]
    (tmp_path / "labels.json").write_text(json.dumps(raw))
    records, _ = read(tmp_path, mapping)
    assert len(records) <= 1


def test_problems_keep_some_messages_and_count_all():
    problems = Problems(keep=2)
    for number in range(3):
        problems.add("bad box", f"f:{number}", "wrong")
    assert problems.counts == {"bad box": 3} and problems.messages == ["f:0: wrong", "f:1: wrong"]


# ---------------------------------------------------------------------------------------------------------- mappings


def test_splits_choose_images_and_patterns_give_facts(tmp_path):
    for name in ("b1", "a1", "a2"):
        image(tmp_path / f"images/{name}.jpg")
        lines(tmp_path / f"labels/{name}.txt", "")
    folders = {"images": "images", "labels": "labels"}
    splits = {"train": folders | {"except": ["a*"]}, "dev": folders | {"only": ["a*"]}}
    facts_of = {"a*": {"time of day": "day"}, "a2": {"weather": "rainy"}}
    mapping = mapping_of(tmp_path, "kitti", splits=splits, facts_of=facts_of)
    assert [record.scene.image_id for record in read_source(tmp_path, mapping)] == ["images/b1.jpg"]
    found = {record.scene.image_id: record.scene.facts for record in read_source(tmp_path, mapping, "dev")}
    assert list(found.items()) == [
        ("images/a1.jpg", {"time of day": "day"}),
        ("images/a2.jpg", {"time of day": "day", "weather": "rainy"}),
    ]
    with pytest.raises(DataError, match="no split 'test'; it has train, dev"):
        read_source(tmp_path, mapping, "test")


def test_a_wide_class_may_be_any_of_its_exhaustive_members_unless_told(tmp_path):
    classes = {"car": "car", "dog": "dog", "thing": "vehicle", "cat": {"class": "animal", "maybe": []}}
    mapping = mapping_of(tmp_path, "coco", classes=classes, exhaustive=["car", "dog"])
    assert mapping.target("thing").maybe == {"car"} and mapping.target("cat").maybe == frozenset()


@pytest.mark.parametrize("name", shipped_mappings())
def test_shipped_mappings_are_valid(name):
    mapping = load_mapping(name)
    raw = json.loads((Path(__file__).parents[1] / f"data/mappings/{name}.json").read_text())
    assert mapping.name == name and raw["license"]
    labels = {target.label for target in mapping.classes.values()} - {None}
    assert labels and labels <= CLASSES.keys() and mapping.exhaustive <= CLASSES.keys()
    assert all(mapping.target(each) for each in mapping.names)
    Scene(1, 1, facts=mapping.facts, exhaustive=mapping.exhaustive)


def test_shipped_mappings_differ_in_name():
    mappings = [load_mapping(name) for name in shipped_mappings()]
    assert len(mappings) >= 12
    check_sources(mappings + mappings)
    with pytest.raises(DataError, match="two sources are named 'coco'"):
        check_sources([*mappings, replace(load_mapping("kitti"), name="coco")])


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"classes": {"Car": "car", "car": "van"}}, ["'Car' and 'car'"]),
        ({"classes": {"stop_sign": "stop sign", "stop sign": None}}, ["'stop_sign' and 'stop sign'"]),
        ({"classes": {"Car": "automobile"}}, ["'Car'", "'automobile'"]),
        ({"classes": {"Car": {"class": None, "maybe": ["spaceship"]}}}, ["'Car'", "'spaceship'"]),
        ({"classes": {"Car": {"class": "car", "color": "pink"}}}, ["'Car'", "color='pink'"]),
        ({"exhaustive": ["bus"]}, ["'bus' cannot be exhaustive"]),
        ({"exhaustive": ["automobile"]}, ["'automobile' cannot be exhaustive"]),
        ({"attributed": {"car": ["mood"]}}, ["'car'", "mood"]),
        ({"facts": {"view": "above"}}, ["view='above'"]),
        ({"facts_of": {"a*": {"weather": "hot"}}}, ["weather='hot'"]),
        ({"values": {"weather": {"from": "w", "values": {"x": "hot"}}}}, ["weather='hot'"]),
        ({"format": "voc"}, ["'voc'", "kitti"]),
        ({"splits": {"train": {"images": "x"}}}, ["'train'", "annotations"]),
        ({"exhaustiv": []}, ["unknown keys ['exhaustiv']"]),
        ({"unlabelled": True}, ["unlabelled"]),
        ({"presence": {"absent": 3}}, ["presence", "absent, present, at"]),
        ({"classes": {"Car": ["car"]}}, ["mapping.json"]),
        ({"classes": 3}, ["not a mapping file"]),
    ],
)
def test_a_wrong_mapping_is_an_error_that_names_what_is_wrong(tmp_path, keys, parts):
    with pytest.raises(DataError) as error:
        mapping_of(tmp_path, "coco", **keys)
    assert all(part in str(error.value) for part in [str(tmp_path / "mapping.json"), *parts]), error.value


def test_a_name_that_stands_twice_in_the_file(tmp_path):
    path = tmp_path / "twice.json"
    path.write_text(
        '{"name": "x", "format": "coco", "splits": {}, "classes": {"bike": "bicycle", "bike": "motorcycle"}}'
    )
    with pytest.raises(DataError, match="'bike' stands there twice, as 'bicycle' and as 'motorcycle'"):
        load_mapping(path)
    path.write_text("{")
    with pytest.raises(DataError, match=r"twice\.json"):
        load_mapping(path)
    with pytest.raises(DataError, match=r"no_such\.json.*shipped mappings are bdd100k"):
        load_mapping("no_such")

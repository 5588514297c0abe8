"""Readers: each format gives the expected scene; bad input is reported, skipped, and limits what is exhaustive."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tiny import ROOT
from traffic_vlm.common.files import DataError
from traffic_vlm.data.formats import Problems, Record, read_source
from traffic_vlm.data.formats.drafting import Found, draft_mapping, match_classes
from traffic_vlm.data.formats.mapping import LAYOUTS, SHIPPED, ClassMapping, SourceMapping, load_mapping, normalize
from traffic_vlm.data.formats.reading import Folder
from traffic_vlm.data.scene import CLASSES, SceneObject
from traffic_vlm.images_traffic_vlm import to_rgb


NAMES = ["Car", "man", "Motor-Bike", "minivan", "DontCare", "red light", "green light", "bench", "hovercraft"]
MEANINGS = {
    "Car": "car",
    "man": "pedestrian",
    "motor_bike": "motorcycle",
    "minivan": {"class": "vehicle", "maybe": ["car"]},
    "DontCare": {"class": None, "maybe": ["car", "pedestrian"]},
    "red light": {"class": "traffic light", "state": "red"},
    "green light": {"class": "traffic light", "state": "green"},
    "light": "traffic light",
    "bench": None,
}
VALUES = {
    "weather": {"from": "weather", "values": {"overcast": "cloudy", "undefined": None}},
    "state": {"from": "trafficLightColor", "values": {"G": "green", "NA": None}},
}
EXHAUSTIVE = frozenset({"car", "motorcycle", "pedestrian", "vehicle"})
MASK_CLASSES = [{"id": i, "name": name} for i, name in enumerate(["void", "Car", "man", "bench", "motor bike"])]
SIZE, BOX = (280, 140), [0, 0, 280, 140]
BOM = b"\xef\xbb\xbf"
NFC, NFD = "\u00e9", "e\u0301"  # two ways to write é in the name of a file


def coco(*labels: tuple[str, Any], **more: Any) -> dict[str, Any]:
    """COCO JSON of the image a.jpg with these (class name, box or fields)."""
    annotations = [
        {"id": 10 + i, "image_id": 7, "category_id": NAMES.index(name)}
        | (value if isinstance(value, dict) else {"bbox": value})
        for i, (name, value) in enumerate(labels)
    ]
    images = [{"id": 7, "file_name": "a.jpg", "width": 280, "height": 140}]
    categories = [{"id": i, "name": name} for i, name in enumerate(NAMES)]
    return {"images": images, "annotations": annotations, "categories": categories} | more


def named(name: Any) -> dict[str, Any]:
    """COCO JSON of a car in an image that is written in this way."""
    return coco(("Car", BOX), images=[{"id": 7, "file_name": name}])


def voc(*labels: Any, size: tuple[int, int] = SIZE) -> str:
    """Pascal VOC XML of labels (class name, xmin, ymin, xmax, ymax, further XML)."""
    box = "<bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox>"
    objects = [f"<object><name>{one[0]}</name>{box.format(*one[1:5])}{''.join(one[5:])}</object>" for one in labels]
    width, height = size
    return f"<annotation><size><width>{width}</width><height>{height}</height></size>{''.join(objects)}</annotation>"


def frame(*labels: Any, **more: Any) -> dict[str, Any]:
    """A frame of BDD100K."""
    return {"name": "a.jpg", "attributes": {"weather": "overcast"}, "labels": labels} | more


def bdd(category: str, *box: float, **attributes: Any) -> dict[str, Any]:
    return {"category": category, "box2d": dict(zip(("x1", "y1", "x2", "y2"), box)), "attributes": attributes}


XML, LINE, MASK = voc(("Car", 1, 1, 280, 140)), "0 0.5 0.5 1 1", np.ones((140, 280), np.uint8)
FILES: dict[str, tuple[str, Any]] = {  # the label file of one car that fills the image
    "coco": ("labels.json", coco(("Car", BOX))),
    "yolo": ("labels/a.txt", LINE),
    "voc": ("annotations/a.xml", XML),
    "kitti": ("labels/a.txt", "Car 0 0 0 0 0 280 140\n"),
    "bdd100k": ("labels.json", [frame(bdd("Car", *BOX))]),
    "masks": ("masks/a.png", MASK),
}


def write(folder: Path, files: dict[str, Any]) -> None:
    """Write images (arrays, or sizes), texts, bytes or JSON; None deletes the file."""
    for path, content in ((folder / name, content) for name, content in files.items()):
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink(missing_ok=True)
        elif isinstance(content, tuple):
            Image.new("RGB", content).save(path)
        elif isinstance(content, np.ndarray | Image.Image):
            (content if isinstance(content, Image.Image) else Image.fromarray(content)).save(path)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_bytes((content if isinstance(content, str) else json.dumps(content)).encode())


def source(folder: Path, format: str, files: dict[str, Any] | None = None, /, **keys: Any) -> SourceMapping:
    """Write a source with the image a.jpg, its label file, other files, and a mapping; return the mapping."""
    layout = {key: key for key in LAYOUTS[format]}
    layout |= {"annotations": "labels.json"} if format in ("coco", "bdd100k") else {}
    layout |= {"classes": "classes.json"} if format == "masks" else {}
    raw = {"name": "test", "format": format, "splits": {"train": layout}, "classes": MEANINGS}
    raw |= {"exhaustive": sorted(EXHAUSTIVE)} | ({"values": VALUES} if format == "bdd100k" else {}) | keys
    written = {"images/a.jpg": SIZE, "mapping.json": {key: value for key, value in raw.items() if value is not None}}
    written |= {"classes.txt": "\n".join(NAMES)} if format == "yolo" else {}
    written |= {"classes.json": {"categories": MASK_CLASSES}} if format == "masks" else {}
    write(folder, written | dict([FILES[format]]) | (files or {}))
    return load_mapping(folder / "mapping.json")


def read(folder: Path, mapping: SourceMapping, split: str = "train") -> tuple[list[Record], Problems]:
    problems = Problems()
    return read_source(Folder(folder), mapping, split, problems), problems


def meaning(mapping: SourceMapping, name: str) -> ClassMapping:
    return mapping.classes[normalize(name)]


def boxed(category: str, *box: float, **more: Any) -> SceneObject:
    return SceneObject(category, tuple(map(float, box)), **more)  # type: ignore[arg-type]


# Input that is read


def case(format: str, files: dict[str, Any], *objects: SceneObject, problem: str = "", uncertain: Any = ()) -> Any:
    """A case of READ: changed files; the objects, a counted problem, and what is no longer exhaustive."""
    return format, files, list(objects), {problem: 1} if problem else {}, uncertain


CAR, LEFT = boxed("car", *BOX), boxed("car", 0, 0, 140, 70)
CROWD, HIDDEN = replace(CAR, is_instance=False), replace(CAR, visible=0.7)
LVIS = [{"id": i, "name": name} for i, name in enumerate(NAMES[:3])]
FILLED = boxed("car", *BOX, area=280.0 * 140, coverage=((1.0,) * 14,) * 14, is_instance=False)
HALF = replace(FILLED, area=140.0 * 140, box=(0.0, 0.0, 140.0, 140.0), coverage=((1.0,) * 7 + (0.0,) * 7,) * 14)
KEYPOINTS = {"data.yaml": "names: [Car]\nkpt_shape: [3, 2]"}
READ = [
    case("coco", {"labels.json": coco(("Car", [10, 20, 30, 40]), ("Motor-Bike", [-2, 0, 20, 10]), ("bench", BOX))},
         boxed("car", 10, 20, 40, 60), boxed("motorcycle", 0, 0, 18, 10, visible=0.9)),
    case("coco", {"labels.json": coco(
            ("Car", {"bbox": [20, 40, 60, 80], "area": 100, "iscrowd": 1, "segmentation": [[1]]}),
            ("Car", {"bbox": [20, 40, 60, 80], "area": 4800, "segmentation": []}),
            images=[{"id": 7, "file_name": "a.jpg", "width": 560, "height": 280}])},  # the image was halved
         boxed("car", 10, 20, 40, 60, area=25.0, is_instance=False), boxed("car", 10, 20, 40, 60)),
    case("coco", {"labels.json": coco(("minivan", BOX))}, replace(CAR, category="vehicle"), uncertain={"car"}),
    case("coco", {"labels.json": coco(("DontCare", BOX))}, uncertain={"car", "vehicle", "pedestrian"}),
    case("coco", {"labels.json": coco(("Car", BOX), ("Car", BOX))}, CAR, problem="label listed twice"),
    *[case("coco", {"labels.json": named(name)}, CAR)
      for name in ("./a.jpg", "images\\a.jpg", "C:\\data\\a.jpg", "/home/me/images/a.jpg", "a", "a.JPG")],
    case("coco", {"labels.json": coco(("Car", BOX), images=[{"id": 7, "coco_url": "http://host/val/a.jpg"}])}, CAR),
    *[case("coco", {"labels.json": coco(("Car", BOX), categories=LVIS, images=[{"id": 7, "file_name": "a"} | a])}, CAR,
           uncertain=lost)
      for a, lost in [  # absent, and labeled in part
        ({"neg_category_ids": [1, 2]}, ()),
        ({"neg_category_ids": [1], "not_exhaustive_category_ids": []}, {"motorcycle", "vehicle"}),
        ({"not_exhaustive_category_ids": [0]}, {"car", "vehicle", "motorcycle", "pedestrian"}),
    ]],
    *[case("coco", {"labels.json": named(a), f"images/{b}": SIZE}, CAR, problem="image without annotation")
      for a, b in [("b.png", "b.PNG"), (NFC, f"{NFD}.jpg"), ("a.JPG", "a.png")]],
    *[case("coco", {"labels.json": coco(("Car", {"bbox": BOX, "iscrowd": a}))}, CAR) for a in ("0", "false", None)],
    *[case("coco", {"labels.json": coco(("Car", {"bbox": BOX, key: a}))}, CROWD)
      for key, a in [("iscrowd", 1), ("iscrowd", "true"), ("iscrowd", 1.0), ("ignore", 1), ("ignore", True)]],
    case("coco", {"labels.json": coco(("Car", {"bbox": BOX, "attributes": {"rotation": 0.0, "occluded": True}}))},
         HIDDEN),  # of CVAT
    case("coco", {"labels.json": coco(("Car", {"bbox": BOX, "image_id": "7"}))}, CAR),
    *[case("coco", {"labels.json": json.dumps(named("a")).encode(a)}, CAR) for a in ("utf-8-sig", "utf-16")],
    *[case("yolo", {"labels/a.txt": text}, LEFT) for text in [
        "0.0\t.25 .25 .5 .5  \r\n\r\n",
        BOM + b"0 0.25 0.25 0.5 0.5",
        "0 0.25 0.25 0.5 0.5".encode("utf-16-le"),
        "0 0 0 .5 0 .5 .5 0 .5",  # an oriented box
    ]],
    case("yolo", {"labels/a.txt": "0 -.05 0 .5 -.05 .5 .5 0 .5"}, replace(LEFT, visible=pytest.approx(25 / 30.25))),
    case("yolo", {"labels/a.txt": "0 .25 .5 .75 1 .25 1"}, boxed("car", 70, 70, 210, 140)),  # an outline
    *[case("yolo", KEYPOINTS | {"labels/a.txt": f"0 .25 .25 .5 .5 {a}"}, LEFT) for a in ("", ".9 .9 .9 .9 .9 .9")],
    case("yolo", {"labels/a.txt": ""}),
    *[case("yolo", files | {"labels/a.txt": "1 0.5 0.5 1 1"}, CAR) for files in [
        {"classes.txt": None, "labels/classes.txt": "man\nCar"},
        {"data.yaml": BOM + b"names: [man,\n  Car]  # two\npath: 1"},
        {"data.yaml": "names: {3: man, 1: Car}"},
    ]],
    *[case(format, {f"images/{a}.JPG": SIZE, path.format(b): FILES[format][1]}, CAR, CAR)
      for format, path in [("yolo", "labels/{}.txt"), ("voc", "annotations/{}.xml")]
      for a, b in [(NFC, NFD), ("b.1", "b.1")]],
    case("voc", {"annotations/a.xml": voc(
            ("Car", 21, 41, 60, 120, "<truncated>1</truncated><difficult>0</difficult>"),
            ("man", 0, 0, 80, 80, "<difficult> 1 </difficult><part/>"), size=(560, 280))},  # halved
         boxed("car", 10, 20, 30, 60, visible=0.7), boxed("pedestrian", 0, 0, 40, 40, visible=0.0)),
    case("voc", {"annotations/a.xml": voc((" Car", " 1 ", "1", 280, 140, "<truncated>\n1</truncated>"))}, HIDDEN),
    case("voc", {"annotations/a.xml": BOM + XML.encode()}, CAR),
    case("kitti", {"labels/a.txt": "Car 0.50 1 -1.57 10.0 20.0 30.0 40.0 1.5 1.6 3.7 1 2 10 0\n"
                                   "man 0.00 3 0.2 100 20 130 90 1.5 1.6 3.7 1 2 10 0\n"
                                   "DontCare -1 -1 -10 50 60 69 69\n"},  # less than a patch of 20 × 10
         boxed("car", 10, 20, 30, 40, visible=0.35), boxed("pedestrian", 100, 20, 130, 90, visible=0.0)),
    case("kitti", {"labels/a.txt": BOM + b"motor_bike 0 0 0 0 0 280 140 1 1 1 1 1 1 1 0.9\r\n"},
         replace(CAR, category="motorcycle")),
    *[case("bdd100k", {"labels.json": [frame(bdd("Car", *BOX, **{key: flag}))]}, item)
      for key, flag, item in [("occluded", "true", HIDDEN), ("occluded", 1, HIDDEN), ("occluded", "false", CAR),
                              ("truncated", None, CAR), ("crowd", True, CROWD), ("crowd", False, CAR)]],
    case("bdd100k", {"labels.json": {"frames": [frame(bdd("Car", *BOX))]}}, CAR),
    case("masks", {"masks/a.png": np.where(np.arange(280) < 140, MASK, 255).astype(np.uint8)}, HALF),  # 255: no label
    *[case("masks", {"masks/a.png": Image.new(mode, SIZE, 1)}, FILLED) for mode in ("P", "1", "L", "I;16")],
    case("masks", {"masks/a.png": Image.new("RGB", SIZE, (1, 1, 1))}, FILLED),
]  # fmt: skip


@pytest.mark.parametrize(("format", "files", "objects", "counts", "uncertain"), READ)
def test_input_that_people_have(tmp_path, format, files, objects, counts, uncertain):
    records, problems = read(tmp_path, source(tmp_path, format, files))
    assert problems.counts == counts, problems.messages
    found = [item for record in records for item in record.scene.objects]
    assert [replace(item, box=tuple(round(side, 6) for side in item.box)) for item in found] == objects
    for record in records:
        assert record.scene.exhaustive == EXHAUSTIVE - set(uncertain)
        assert record.image == tmp_path / record.scene.image_id


def test_attributes_and_scene_attributes_of_bdd100k(tmp_path):
    keys: dict[str, Any] = {"attributed": {"traffic light": ["state"]}, "scene_attributes": {"view": "driver"}}
    green, unknown = (bdd("light", 1, 2, 3, 4 + i, trafficLightColor=color) for i, color in enumerate(("G", "NA")))
    car = bdd("Car", 10, 20, 30, 40, occluded=True, truncated=True, trafficLightColor="NA")
    files = {"labels.json": [frame(car, green, {"category": "bench", "poly2d": []})]}
    [record], problems = read(tmp_path, source(tmp_path, "bdd100k", files, **keys))
    light = boxed("traffic light", 1, 2, 3, 4, attributes={"state": "green"})
    assert record.scene.objects == (boxed("car", 10, 20, 30, 40, visible=0.7**2), light) and not problems.counts
    assert record.scene.scene_attributes == {"view": "driver", "weather": "cloudy"}
    assert record.scene.attributed == {"traffic light": {"state"}}
    write(tmp_path, {"labels.json": [frame(green, unknown, attributes={"weather": "undefined"})]})
    [record], _ = read(tmp_path, load_mapping(tmp_path / "mapping.json"))
    assert not record.scene.attributed and record.scene.scene_attributes == {"view": "driver"}


def test_sizes_of_masks(tmp_path):
    mask = np.full((140, 280), 3, np.uint8)
    mask[20:35, 40:80] = 1  # rows 2 and half of 3, columns 2 and 3 of patches of 20 × 10
    mask[139, 279] = 2  # too small to be present
    mask[0, :5] = 4  # too small to be sure
    presence = {"absent": 0.5, "present": 2.5, "at": [140, 70]}  # 2 and 10 pixels in this mask
    mapping = source(tmp_path, "masks", {"masks/a.png": mask}, presence=presence)
    [record], problems = read(tmp_path, mapping)
    coverage = np.zeros((2, 14, 14))
    coverage[0, 2, 2:4], coverage[0, 3, 2:4], coverage[1, 0, 0] = 1.0, 0.5, 5 / 200
    filled = [{"coverage": tuple(map(tuple, one)), "is_instance": False} for one in coverage.tolist()]
    car = boxed("car", 40, 20, 80, 35, area=600.0, **filled[0])
    assert record.scene.objects == (car, boxed("motorcycle", 0, 0, 5, 1, area=5.0, visible=0.0, **filled[1]))
    assert record.scene.exhaustive == EXHAUSTIVE and not problems.counts


@pytest.mark.parametrize(("name", "turn"), [("a.jpg", 6), ("a.png", 8), ("a.webp", 5), ("b.jpg", 7), ("a.tif", 6)])
def test_the_size_is_that_of_the_upright_image(tmp_path, name, turn):
    images = [{"id": 7, "file_name": name, "width": 280, "height": 140}]
    mapping = source(tmp_path, "coco", {"labels.json": coco(("Car", [200, 20, 30, 40]), images=images)})
    exif, path = Image.Exif(), tmp_path / "images" / name
    exif[0x0112] = turn
    Image.new("RGB", (140, 280)).save(path, exif=exif)
    [record], _ = read(tmp_path, mapping)
    assert (record.scene.width, record.scene.height) == SIZE
    assert record.scene.objects == (boxed("car", 200, 20, 230, 60),)
    with Image.open(path) as photograph:
        assert to_rgb(photograph).size == SIZE


def test_splits_select_images_and_patterns_give_scene_attributes(tmp_path):
    folders = {"images": "images", "labels": "labels"}
    more: dict[str, Any] = {"train": {"except": ["a*"]}, "dev": {"only": ["a*"]}, "val": {"list": "val.txt"}}
    files = {"images/b1.jpg": SIZE, "images/a2.jpg": SIZE, "labels/b1.txt": "", "labels/a2.txt": ""}
    keys = {"scene_attributes_of": {"a*": {"time of day": "day"}, "a2": {"weather": "rainy"}}}
    splits = {split: folders | value for split, value in more.items()}
    mapping = source(tmp_path, "kitti", files | {"val.txt": "b1 1\n\n"}, splits=splits, **keys)
    scenes = {split: [record.scene for record in read(tmp_path, mapping, split)[0]] for split in splits}
    found = {split: [(one.image_id[7:], one.scene_attributes) for one in part] for split, part in scenes.items()}
    b1, day = ("b1.jpg", {}), {"time of day": "day"}
    assert found == {"train": [b1], "dev": [("a.jpg", day), ("a2.jpg", day | {"weather": "rainy"})], "val": [b1]}
    with pytest.raises(DataError, match="no split 'test'; it has train, dev, val"):
        read(tmp_path, mapping, "test")
    assert len(read(tmp_path, replace(mapping, unlabeled="empty"), "dev")[0]) == 1
    write(tmp_path, {"val.txt": None})
    assert "val.txt: cannot be read" in read(tmp_path, mapping, "val")[1].messages[0]


# Bad input


EVERYTHING, CARS = CLASSES.keys(), {"car", "vehicle"}


def bad(
    format: str, files: dict[str, Any], kind: str, message: str, uncertain: Any = None, count: int = 1
) -> tuple[Any, ...]:
    """A case of BAD_INPUT: changed files; the problem, its count, and a part of its first message.

    `uncertain` is what is no longer exhaustive; None if the image is skipped.
    """
    return format, files, kind, count, message, uncertain


BAD_INPUT = [
    bad("coco", {"images/a.jpg": None}, "missing image", "labels.json: images[0] (7): image 'a.jpg' is missing"),
    *[bad("coco", {"labels.json": named(name)}, "missing image", f"image {name!r} is missing")
      for name in ("b\\c.jpg", "../secret.jpg", "/etc/hosts")],
    bad("coco", {"labels.json": named("a.bmp"), "images/a.png": SIZE}, "two files of one name",
        "image 'a.bmp' may be a.jpg or a.png in"),
    bad("coco", {"images/a.jpg": b"no image"}, "bad file", "a.jpg: cannot be read: cannot identify image"),
    bad("coco", {"images/a.jpg": (140, 280)}, "image size", "is 140 × 280, its annotation is for 280 × 140"),
    *[bad("coco", {"labels.json": coco(("Car", box))}, "bad box", f"[0] (10): box {message}", CARS)
      for box, message in [
        ([-50, 20, 30, 40], "[-50, 20, 30, 40] of 'Car' lies to 100% outside its image of 280 × 140"),
        ([10, 20, 0, 40], "[10, 20, 0, 40] of 'Car' has a width or height that is not positive"),
        ([200, 100, 160, 80], "[200, 100, 160, 80] of 'Car' lies to 75% outside its image of 280 × 140"),
        ([10, 20, float("nan"), 4], "[10, 20, nan, 4] of 'Car' is not four numbers"),
        (["10,5", 20, 30, 4], "['10,5', 20, 30, 4] of 'Car' is not four numbers with decimal points"),
        ({"bbox": BOX, "attributes": {"rotation": "45"}}, "[0, 0, 280, 140] of 'Car' is turned"),
    ]],
    bad("coco", {"labels.json": coco(("hovercraft", BOX))}, "unknown class 'hovercraft'",
        "annotations[0] (10): class 'hovercraft' is not in the mapping of 'test'", EVERYTHING),
    bad("coco", {"labels.json": coco(("Car", {"image_id": 99}))}, "annotation without image",
        "annotations[0] (10): there is no image 99", EVERYTHING),  # no label at all belongs to an image
    bad("coco", {"labels.json": coco(("Car", BOX), ("man", {"image_id": 99}))}, "annotation without image",
        "(11): there is no image 99", ()),  # an image that was left out
    # Each of two entries of an image may lack the labels of the other.
    *[bad("coco", {"labels.json": coco(images=[{"id": i, "file_name": "a.jpg"} for i in ids])}, "bad record", message,
          count=2)
      for ids, message in [((1, 2), "[0] (1): image a.jpg is listed 2 times"), ((1, "1"), "[0] (1): another image")]],
    *[bad("coco", {"labels.json": text}, "bad file", "labels.json: cannot be read: ")
      for text in ("{", "[]", '{"images": {}, "annotations": 1, "categories": 2}', "{}".encode("utf-16-le"))],
    bad("coco", {"labels.json": coco(images=[3])}, "bad file", "it is not a JSON object with the lists categories, i"),
    bad("coco", {"labels.json": coco(("Car", [1, 2, 3]))}, "bad record", "images[0] (7): ValueError: not enough"),
    *[bad(format, {"labels/a.txt": f"\n{row}\n"}, "bad record", f"labels/a.txt:2: {row!r} is not a", EVERYTHING)
      for format, row in [
        ("yolo", "Car 0.5 0.5 1 1"),
        ("yolo", "0,0.5,0.5,1,1"),
        ("yolo", "0 x 1 2 3"),
        ("yolo", "0 0,5 0,5 1 1"),
        ("yolo", "0 0.5 0.5 0.2 0.2 0.9"),
        ("kitti", "Car 0 x 0 0 0 280 140"),
        ("kitti", "Car 0 0 0 1 2 nan 4"),
        ("kitti", "0 7 Car 0 0 0 1 2 3 4"),  # with frame and track, as KITTI's tracking labels
    ]],
    *[bad("yolo", {"labels/a.txt": row}, "bad box", f"labels/a.txt:1: box {row} of 'Car' {message}", CARS)
      for row, message in [
        ("0 140 70 20 30", "lies to 100% outside"),
        ("0 100 50 150 50 150 90", "lies to 100% outside"),
        ("0 0.5 0.5 0.2 0.2 0.9 12", "lies to 93% outside"),  # a confidence and the id of a track
    ]],
    bad("yolo", {"labels/a.txt": "0 0.5 0.5 1 1 0.5 0.5", "data.yaml": "names: [Car]\nkpt_shape: [2, 2]"},
        "bad record", "is not a class id and 4 numbers of a box, or 4 + 4, by kpt_shape of data.yaml", EVERYTHING),
    *[bad("yolo", {"data.yaml": text}, "bad file", "data.yaml: cannot be read: ")
      for text in ("", "names: [", "names: {x: A}")],
    *[bad("yolo", {"data.yaml": f"names: {text}"}, "bad file", f"names must be a list, or {{id: name}}, got {got}")
      for text, got in [("car", "'car'"), ("[[car]]", "[['car']]"), ("{0: [car]}", "{'0': ['car']}")]],
    bad("yolo", {"data.yaml": "names: [Car]\nkpt_shape: 17"}, "bad file", "kpt_shape must be [number of keypoints, 2"),
    *[bad("yolo", files | {"labels/a.txt": f"{i} 0.5 0.5 1 1"}, f"unknown class '{name}'",
          f"labels/a.txt:1: class '{name}'", EVERYTHING)
      for i, files, name in [
        (-1, {}, "id -1"),
        (1, {"data.yaml": "names: [Car, no]"}, "no"),  # not the boolean
        (1, {"classes.txt": "Car\n\nred light\n\n"}, "id 1"),  # an id without a name is no class; others keep theirs
    ]],
    bad("yolo", {"labels/b.txt": ""}, "annotation without image", "labels/b.txt: has no image in", ()),
    *[bad(format, {f"images/{name}": SIZE}, "two files of one name", f"image 'a' may be {names} in")
      for format, name, names in [("yolo", "a.png", "a.jpg or a.png"), ("voc", "a.JPG", "a.JPG or a.jpg")]],
    *[bad(format, {name: content}, "bad record", f"{name}: image a.jpg is listed 2 times", count=2)
      for format, name, content in [("kitti", "labels/a.TXT", ""), ("yolo", "labels/a.TXT", "")]],
    bad("kitti", {"images/b.png": SIZE}, "image without annotation", "images without annotation: 1, such as b", ()),
    bad("kitti", {"labels/a.txt": b"\xff\xfe\xff"}, "bad file", "labels/a.txt: cannot be read"),
    bad("voc", {"annotations/a.xml": "<annotation>"}, "bad file", "a.xml: cannot be read: no element"),
    bad("voc", {"annotations/a.xml": "<annotations/>"}, "bad file", "its root is <annotations>, not <annotation> of"),
    bad("voc", {"annotations/a.xml": voc(size=(9, 9))}, "image size", "280 × 140, its annotation is for 9 × 9"),
    *[bad("voc", {"annotations/a.xml": voc(("Car", *box))}, "bad box", message, CARS)
      for box, message in [((9, 9, "x", 9), "a.xml, object 0: box ['9', '9', 'x', '9'] of"),
                           ((.1, .1, .5, .5), "the first pixel")]],
    bad("bdd100k", {"labels.json": [frame(name="./a.jpg"), frame(bdd("Car", *BOX))]}, "bad record",
        "(./a.jpg): image a.jpg is listed 2 times", count=2),
    bad("bdd100k", {"labels.json": [frame(attributes={"weather": 3})]}, "unknown value", "(a.jpg): weather is 3", ()),
    bad("bdd100k", {"labels.json": [frame(labels=3)]}, "bad record", "[0] (a.jpg): TypeError: 'int' object is not it"),
    bad("bdd100k", {"labels.json": [frame({})]}, "unknown class 'None'", "(a.jpg), label 0: class", EVERYTHING),
    bad("bdd100k", {"labels.json": "[1, }"}, "bad file", "labels.json: cannot be read: Expecting value"),
    bad("masks", {"masks/a.png": np.zeros((70, 140), np.uint8)}, "image size", "the mask is 140 × 70"),
    bad("masks", {"masks/a.png": Image.new("RGB", SIZE, "red")}, "bad mask", "has colors in"),
    *[bad("masks", {"masks/a.png": np.full((140, 280), a, np.uint8)}, f"unknown class 'id {a}'", "a.png: class",
          EVERYTHING) for a in (9, 255)],
    bad("masks", {"masks/a.png": b"\x89PNG\r\n"}, "bad file", "a.png: cannot be read: cannot identify image"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "files", "kind", "count", "message", "uncertain"), BAD_INPUT)
def test_bad_input(tmp_path, format, files, kind, count, message, uncertain):
    mapping = source(tmp_path, format)
    write(tmp_path, files)
    records, problems = read(tmp_path, mapping)
    others = ("image without annotation", "empty source")
    assert {name: n for name, n in problems.counts.items() if name == kind or name not in others} == {kind: count}
    assert ("empty source" in problems.counts) == (uncertain is None)
    assert message in problems.messages[0]
    exhaustive = [record.scene.exhaustive for record in records]
    assert exhaustive == ([] if uncertain is None else [EXHAUSTIVE - set(uncertain)])


def test_a_lost_light_makes_lights_and_their_states_uncertain(tmp_path):
    files = {"labels.json": coco(("red light", [20, 20, 100, 100]), ("green light", [150, 20, 0, 40]))}
    keys = {"exhaustive": ["traffic light"], "attributed": {"traffic light": ["state"]}}
    [record], problems = read(tmp_path, source(tmp_path, "coco", files, **keys))
    assert problems.counts == {"bad box": 1} and not record.scene.exhaustive and not record.scene.attributed


def test_files_outside_of_the_source_are_not_read(tmp_path):
    mapping, labels, outside = source(tmp_path / "in", "coco"), tmp_path / "in/labels.json", tmp_path / "outside"
    labels.rename(outside)
    labels.symlink_to(outside)
    records, problems = read(tmp_path / "in", mapping)
    assert not records and f"leads to {outside}, " in problems.messages[0]
    assert problems.counts == {"refused file": 1, "empty source": 1}
    assert read(tmp_path / "nowhere", mapping)[1].counts == {"bad file": 1, "empty source": 1}


# Drafts: mappings for folders that have none


def draft(folder: Path, files: dict[str, Any]) -> SourceMapping:
    """The mapping that is drafted for a folder with these files."""
    write(folder, files)
    mapping, _ = draft_mapping(Folder(folder), folder / "draft.json")
    assert load_mapping(folder / "draft.json") == mapping
    return mapping


LABELS = {  # of the same images in three formats: 1 and 2 are for training, 3 is not
    "yolo": {
        "data.yaml": "train: images/train\nval: images/val\nnames: [car, motor_cycle, forklift]",
        **{f"labels/{split}.txt": f"{LINE}\n1 0.5 0.5 0.5 0.5" for split in ("train/1", "train/2", "val/3")},
    },
    "coco": {
        **{
            f"annotations/instances_{split}2017.json": {
                "images": [{"id": i, "file_name": f"{i}.jpg"} for i in images],
                "annotations": [{"image_id": i, "category_id": c, "bbox": BOX} for i in images for c in (1, 2)],
                "categories": [{"id": i, "name": n} for i, n in enumerate(["", "car", "motor_cycle", "forklift"])],
            }
            for split, images in {"train": (1, 2), "val": (3,)}.items()
        },
        "annotations/captions_train2017.json": {"images": [], "annotations": []},
    },
    "voc": {
        **{f"Annotations/{i}.xml": voc(("car", 1, 1, 280, 140), ("motor_cycle", 1, 1, 9, 9)) for i in (1, 2, 3)},
        "ImageSets/Main/train.txt": "1\n2",
        "ImageSets/Main/val.txt": "3",
    },
}


@pytest.mark.parametrize("format", LABELS)
def test_the_classes_and_splits_of_a_folder_are_drafted(tmp_path, monkeypatch, format):
    """Each file is opened once, for the draft and the records, and the folder is walked once."""
    folders = ["JPEGImages"] * 2 if format == "voc" else ["images/train", "images/val"]
    write(tmp_path, {f"{folders[i == 3]}/{i}.jpg": SIZE for i in (1, 2, 3)} | LABELS[format])
    folder, opened, real = Folder(tmp_path), Counter[Path](), Path.open
    with monkeypatch.context() as counting:
        counting.setattr(Path, "open", lambda path, *args, **more: opened.update([path]) or real(path, *args, **more))
        mapping, _ = draft_mapping(folder, tmp_path / "draft.json")
        assert read_source(folder, mapping, "train", Problems())
    assert {count for path, count in opened.items() if path.is_relative_to(tmp_path)} == {1}
    walked = ["images/train", "labels/train"] if format == "yolo" else ["."]
    assert [path.relative_to(tmp_path).as_posix() for path in folder.walked] == walked
    assert mapping.format == format and mapping.exhaustive == {"car", "motorcycle"}
    for split, names in {"train": ["1.jpg", "2.jpg"], "val": ["3.jpg"]}.items():
        records, problems = read(tmp_path, mapping, split)
        assert [record.image.name for record in records] == names and not problems.counts, problems.messages
        assert [item.category for item in records[0].scene.objects] == ["car", "motorcycle"]


def test_of_red_lights_alone_no_other_state_is_known():
    assert "attributed" not in match_classes(Found("coco", names=["red light", "car"]))


PAIRS = {"a/images/1.jpg": SIZE, "a/labels/1.txt": LINE, "b/images/2.jpg": SIZE, "b/labels/2.txt": LINE}
CLASSES_YAML = BOM + b"names: [Car, man]\n"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (PAIRS | {"data.yaml": CLASSES_YAML + b"train: C:\\set\\b\\images"}, "b/images/2.jpg"),
        (PAIRS | {"data.yaml": CLASSES_YAML + b"train: ../b/images"}, "b/images/2.jpg"),
        (PAIRS | {"data.yaml": CLASSES_YAML + b"train: b"}, "b/images/2.jpg"),
        ({"c/3.jpg": SIZE, "c/3.txt": LINE, "data.yaml": CLASSES_YAML + b"train: c"}, "c/3.jpg"),
        ({"obj_train_data/x/1.jpg": SIZE, "obj_train_data/x/1.txt": LINE, "obj.names": "car\nbus\n",
          "train.txt": "data/obj_train_data/x/1.jpg"}, "obj_train_data/x/1.jpg"),  # YOLO 1.1 of CVAT
        *[({f"{split}/1.jpg": SIZE for split in ("train", "val")}
           | {f"{split}.json": named(name.replace("train", split)) for split in ("train", "val")}, "train/1.jpg")
          for name in ("train\\1.jpg", "1", "/data/train/1.jpg")],
    ],
)  # fmt: skip
def test_the_images_of_a_draft_are_found(tmp_path, files, found):
    [record], problems = read(tmp_path, draft(tmp_path, files))
    assert record.scene.image_id == found and record.scene.objects
    assert problems.counts.keys() <= {"image without annotation"}, problems.messages  # those of the other split


def test_what_a_source_says_is_exhaustive_is_drafted(tmp_path):
    stated = ["vehicle", "bus", "motorcycle", "person", "green light", "red light", "sedan"]
    data = coco(categories=[{"id": i, "name": name} for i, name in enumerate([*stated, "hydrant"])])
    data["annotations"] = [{"image_id": 7, "category_id": i, "bbox": [i, 0, 9, 9]} for i in range(8)]
    files = {"train/a.jpg": SIZE, "train.json": data | {"info": {"exhaustive": stated}}, "val.json": "{"}
    mapping = draft(tmp_path, files)
    assert mapping.exhaustive == {"vehicle", "bus", "motorcycle", "person"}  # not each car, nor yellow lights
    assert mapping.attributed == {"traffic light": {"state"}} and meaning(mapping, "hydrant").category is None
    assert meaning(mapping, "vehicle").maybe == frozenset() and meaning(mapping, "motorcycle").maybe == {"person"}
    notes = "".join(json.loads((tmp_path / "draft.json").read_text())["notes"])
    assert f"Left out: {tmp_path}/val.json: cannot be read" in notes


def test_exhaustive_is_what_each_coco_file_labels_and_two_categories_of_one_name_are_one_class(tmp_path):
    files: dict[str, Any] = {f"{split}/a.jpg": SIZE for split in ("train", "val")}
    for split, names in {"train": ["car", "car", "person"], "val": ["car", "bus", "Person"]}.items():
        categories = [{"id": i, "name": name} for i, name in enumerate(names)]
        boxes = [{"image_id": 7, "category_id": i, "bbox": [i, 0, 9, 9]} for i in range(3)]
        files[f"{split}.json"] = coco(annotations=boxes, categories=categories)
    mapping = draft(tmp_path, files)
    assert mapping.exhaustive == {"car", "person"}
    [record], problems = read(tmp_path, mapping)
    assert [item.category for item in record.scene.objects] == ["car", "car", "person"]
    assert record.scene.exhaustive == {"car", "person"} and not problems.counts


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"annotations.xml": "<annotations/>"}, r"export one of these, .*annotations\.xml: .* root is <annotations>"),
        ({"tasks.json": [{"data": {"image": "/data/a.jpg"}}]}, r"tasks\.json: cannot be read: it is not a JSON"),
        ({}, "has none of a data.yaml with image folders, COCO JSON files or Pascal VOC XML files"),
        ({"data.yaml": "names: [A]\ntrain: [a, b]\nval: c.txt"},
         r"has none of .*: train: \['a', 'b'\] of data.yaml is no folder .* val: c.txt of"),
        ({"data.yaml": "names: [car]\ntrain: ../out"}, r"train: \.\./out of data.yaml is no folder inside of"),
        ({"Annotations/1.xml": "<annotation/>"}, "has none of its 1 images"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_be_drafted_says_why(tmp_path, files, message):
    with pytest.raises(DataError, match=message):
        draft(tmp_path, files)


# Mappings


def test_meanings_of_classes(tmp_path):
    names = {"car": "car", "dog": "dog", f"Fu{NFC}_x": "vehicle", "cat": {"class": "animal", "maybe": []}}
    mapping = source(tmp_path, "coco", classes=names, exhaustive=["car", "dog"])
    found = meaning(mapping, f"fu{NFD}-X")  # in another case and form
    assert found.category == "vehicle" and found.maybe == {"car"} and meaning(mapping, "cat").maybe == frozenset()
    mapping = source(tmp_path, "coco", classes={"parked": "parked car", "van": "vehicle"}, exhaustive=["parked car"])
    assert meaning(mapping, "van").maybe == {"parked car"}  # members of members, too


def test_shipped_mappings_are_valid():
    mappings = [load_mapping(name) for name in SHIPPED]
    for name, mapping in zip(SHIPPED, mappings):
        assert mapping.name == name
        assert json.loads((ROOT / f"data/formats/mappings/{name}.json").read_text())["license"]
    with pytest.raises(DataError, match=r"no_such\.json: cannot be read.* shipped mappings are .*bdd100k"):
        load_mapping("no_such")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"classes": {"Car": "automobile"}}, "'Car': 'automobile' is not one of"),
        ({"classes": {"Car": {"color": "red"}}}, "'Car': {'color': 'red'} has no 'class'"),
        ({"classes": None}, "missing 1 required positional argument: 'classes'"),
        ({"exhaustive": ["bus"]}, "exhaustive: 'bus' is not one of"),
        ({"splits": {"train": {"images": "x"}}}, "split 'train' does not name its annotations"),
        ("{", "not a mapping file: Expecting"),
    ],
)
def test_a_wrong_mapping(tmp_path, keys, message):
    with pytest.raises(DataError) as error:
        if isinstance(keys, str):
            write(tmp_path, {"mapping.json": keys})
            load_mapping(tmp_path / "mapping.json")
        source(tmp_path, "coco", **keys)
    assert f"{tmp_path / 'mapping.json'}: " in str(error.value) and message in str(error.value)

"""Datasets: folders that are complete or absent, sources, reports, balanced answers, and loading."""

import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, load_dataset
from PIL import Image
from truths import enumerate_questions

from traffic_vlm.common.files import DataError
from traffic_vlm.data.datasets import (
    FEATURES,
    LISTS,
    DatasetOptions,
    add_questions,
    load_rows,
    make_dataset,
    read_items,
    source_names,
    synthetic_rows,
)
from traffic_vlm.data.formats import Problems
from traffic_vlm.data.questions import Balancer, Question, ask, rebalance
from traffic_vlm.data.scene import Scene, scene_of
from traffic_vlm.data.synthetic import render
from traffic_vlm.data.truth import GroundTruth


def make(folder: Path, **options: object) -> dict:
    few = {"num_images": 24, "num_workers": 1, "split": "val"}
    return make_dataset(DatasetOptions(folder, **(few | options)))


def load(folder: Path, split: str = "val") -> Dataset:
    return load_dataset(str(folder), split=split)


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    """A dataset of 24 rendered scenes; tests must not change it."""
    folder = tmp_path_factory.mktemp("synthetic") / "set"
    make(folder)
    return folder


@pytest.fixture
def mine(tmp_path):
    """A COCO source of three images of 80 × 60, each with a car that is named "Cars" and a forklift."""
    folder = tmp_path / "mine"
    (folder / "train").mkdir(parents=True)
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 255, (60, 80, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "train" / f"{i}.png")
    boxes = [{"image_id": i, "category_id": 1, "bbox": [5 + 20 * i, 20, 30, 30]} for i in range(3)]
    annotations = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 80, "height": 60} for i in range(3)],
        "annotations": [*boxes, {"image_id": 0, "category_id": 2, "bbox": [0, 0, 9, 9]}],
        "categories": [{"id": 1, "name": "Cars"}, {"id": 2, "name": "forklift"}],
    }
    (folder / "train.json").write_text(json.dumps(annotations))
    mapping = {
        "name": "mine",
        "format": "coco",
        "splits": {split: {"images": "train", "annotations": "train.json"} for split in ("train", "val")},
        "classes": {"Cars": "car", "forklift": None},
        "exhaustive": ["car"],
    }
    (folder / "map.json").write_text(json.dumps(mapping))
    return folder


def mapped(folder: Path) -> str:
    """A folder like `mine` as a value of --source."""
    return f"{folder}/map.json={folder}"


# Files


def test_rows_are_loaded_as_the_report_counts_them(synthetic, tmp_path):
    rows, report = load(synthetic), json.loads((synthetic / "report.json").read_text())
    assert len(rows) == 24 and rows[0]["image"].size == (224, 224)
    assert set(rows.column_names) == set(FEATURES)
    assert all(len(row["questions"]) == len(row["answers"]) == len(row["question_types"]) > 0 for row in rows)
    assert report["images"] == 24 and report["sources"] == {"synthetic": 24} and not report["skipped"]
    assert report["questions"] == Counter(question_type for row in rows for question_type in row["question_types"])
    make(tmp_path / synthetic.name, num_images=2)  # a folder of the same name: not from the cache
    assert len(load(tmp_path / synthetic.name)) == 2


def test_a_run_that_fails_leaves_nothing_and_an_existing_folder_is_left_alone(tmp_path, run_script, capsys):
    run_script("make_dataset.py", "--output_dir", tmp_path / "set", "--num_images", 0, status=2)
    assert not list(tmp_path.iterdir())
    (tmp_path / "README.md").write_text("mine")
    run_script("make_dataset.py", "--output_dir", tmp_path, status=2)
    assert f"{tmp_path} exists; choose another --output_dir" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_training_splits_store_no_questions_and_get_balanced_ones_for_evaluation(tmp_path):
    report = make(tmp_path / "train", split="train")
    rows = load_rows([tmp_path / "train"])
    assert report["images"] == len(rows) == 24 and not report["questions"]
    assert not any(row[name] for row in rows for name in LISTS)
    asked = add_questions(rows)
    assert asked["scene"] == rows["scene"] and all(0 < len(row["questions"]) <= 16 for row in asked)
    for row in asked:  # every question is about the scene of its own row
        true = {
            (one.question_id, one.answer) for one in enumerate_questions(GroundTruth(Scene.from_json(row["scene"])))
        }
        assert true.issuperset(zip(row["question_ids"], row["answers"]))
    counts = Counter(pair for row in asked for pair in zip(row["question_types"], row["categories"], row["answers"]))
    assert all(
        counts[kind, name, "no"] == counts[kind, name, "yes"] for kind, name, answer in counts if answer == "yes"
    )
    assert add_questions(asked) is asked and add_questions(rows).to_list() == asked.to_list()
    *_, own = add_questions(load_rows([tmp_path / "train", write_own(tmp_path / "own", "1.png")]))
    assert own["questions"] == ["Is there a car?"] and scene_of(own) is None  # beside the others


# Sources


def test_sources_are_mixed_and_problems_are_counted(mine, tmp_path):
    image = mine / "train" / "1.png"
    image.write_bytes(image.read_bytes()[:5000])
    Image.new("RGB", (80, 60)).save(mine / "train" / "of_another_split.png")
    report = make(tmp_path / "out", source=[mapped(mine), "synthetic"], num_images=4)
    assert report["sources"] == {"mine": 2, "synthetic": 4} and report["skipped"] == {"unreadable image": 1}
    assert [*map(bool, load(tmp_path / "out")["group"])] == [True] * 2 + [False] * 4  # rendered scenes have none
    assert report["left_out"] == {"image without annotation": 1}
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert "1.png: the image cannot be read" in report["messages"][-1]
    assert report["advice"] == [
        "image without annotation (1): an image without objects needs an empty label file, or an entry in that of its "
        "split"
    ]


def test_the_report_says_why_nothing_is_answered_no_and_what_to_do(mine, tmp_path):
    mapping = json.loads((mine / "map.json").read_text())
    (mine / "map.json").write_text(json.dumps(mapping | {"exhaustive": [], "classes": {"Cars": "car"}}))
    report = make(tmp_path / "out", source=[mapped(mine)])
    why, unknown = report["advice"][:2]
    assert why.startswith(f"{mapped(mine)}: no class is exhaustive, so nothing can be answered no: list under 'exhaus")
    assert unknown.startswith("unknown class 'forklift' (1): add the class under 'classes' of the mapping, with a cat")
    (mine / "map.json").write_text(
        json.dumps(mapping | {"exhaustive": [], "classes": {"Cars": None, "forklift": None}})
    )
    with pytest.raises(
        DataError, match=r"no image has a possible question: .*nothing can be answered no: list .*3 images"
    ):
        make(tmp_path / "none", source=[mapped(mine)])
    assert not (tmp_path / "none").exists()


def test_images_whose_questions_would_not_be_balanced_are_left_out_and_counted(mine, tmp_path):
    mapping, labels = (json.loads((mine / name).read_text()) for name in ("map.json", "train.json"))
    (mine / "map.json").write_text(json.dumps(mapping | {"exhaustive": []}))
    for i in range(3, 40):
        shutil.copy(mine / "train" / "0.png", mine / "train" / f"{i}.png")
        labels["images"].append(labels["images"][0] | {"id": i, "file_name": f"{i}.png"})
        labels["annotations"].append(labels["annotations"][0] | {"image_id": i})
    (mine / "train.json").write_text(json.dumps(labels))
    report = make(tmp_path / "out", source=[mapped(mine)], num_images=40, questions_per_image=1)
    rows = load(tmp_path / "out")
    assert all(rows["questions"]) and len(rows) == report["images"] < 40
    assert report["left_out"]["nothing to ask"] == 40 - len(rows)


def test_a_folder_alone_is_read_by_the_names_of_its_classes(mine, tmp_path, capsys):
    folder, draft = str(mine), tmp_path / "out_mine.json"
    report = make(tmp_path / "out", source=[folder], split="train")
    assert report["sources"] == {"mine": 3} and report["skipped"] == {"unknown class 'forklift'": 1}
    printed = capsys.readouterr().out
    assert f"{folder} is read as coco, by {draft}:" in printed and f"--source {draft}={folder}" in printed
    assert "Cars = car" in printed and "No category for forklift:" in printed
    draft.write_text(draft.read_text().replace('"car"', '"truck"'))
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(DataError, match=f"mine.json differs .* was edited.* --source .*_mine.json={folder} uses it"):
        make(tmp_path / "out", source=[folder], split="train")
    make(tmp_path / "second", source=[f"{draft}={folder}"], split="train")
    assert '"truck"' in load(tmp_path / "second", "train")[0]["scene"]


def test_classes_without_a_box_are_not_exhaustive_in_a_folder_of_yolo(tmp_path, capsys):
    for folder in ("one/frames", "two/frames"):
        for part in ("images", "labels"):
            (tmp_path / folder / part / "train").mkdir(parents=True)
        Image.new("RGB", (64, 64)).save(tmp_path / folder / "images" / "train" / "1.png")
        (tmp_path / folder / "labels" / "train" / "1.txt").write_text("0 0.5 0.5 0.5 0.5")
        (tmp_path / folder / "data.yaml").write_text("train: images/train\nnames: [car, bus]")
    one, two = (str(tmp_path / name / "frames") for name in ("one", "two"))
    make(tmp_path / "out", source=[one], split="train")
    assert json.loads(load(tmp_path / "out", "train")[0]["scene"])["exhaustive"] == ["car"]
    assert "no image has a box of bus: nothing is taken to be absent of these" in capsys.readouterr().out
    with pytest.raises(DataError, match="two sources are named 'frames': rename a folder"):
        make(tmp_path / "both", source=[one, two], split="train")


def test_each_source_and_split_has_its_own_images(mine, tmp_path):
    def items(**options: object) -> list[list]:
        return list(read_items(DatasetOptions(tmp_path, **options), Problems()).values())

    for maximum, expected in {None: [3, 1000], 2: [2, 2], 5: [3, 5]}.items():
        assert [len(part) for part in items(source=[mapped(mine), "synthetic"], num_images=maximum)] == expected
    splits = ("train", "val", "test", "val.night")
    seeds = {split: items(num_images=5, split=split)[0] for split in splits}
    assert seeds["train"] == [0, 1, 2, 3, 4]
    assert len({seed for split in seeds.values() for seed in split}) == 20


def test_rows_have_the_camera_or_near_duplicates_as_their_group_and_a_split_may_be_a_part(mine, tmp_path):
    """Two images have the same pixels, in two files; only the first image has a camera."""
    annotations, mapping = (json.loads((mine / name).read_text()) for name in ("train.json", "map.json"))
    shutil.copy(mine / "train/1.png", mine / "train/2.png")
    make(tmp_path / "unnamed", source=[mapped(mine)])
    first, second, third = load(tmp_path / "unnamed")["group"]
    assert [first, second, third] == ["like train/0.png", *["like train/1.png"] * 2]
    for image, camera, part in zip(annotations["images"], ("north", "", ""), ("choose", "report", "choose")):
        image |= {"camera": camera, "part": part}
    mapping |= {"group": "camera"}
    mapping["splits"]["val"]["part"] = "choose"
    (mine / "train.json").write_text(json.dumps(annotations))
    (mine / "map.json").write_text(json.dumps(mapping))
    make(tmp_path / "named", source=[mapped(mine)])
    rows = load(tmp_path / "named")
    assert [Path(name).name for name in rows["image_id"]] == ["0.png", "2.png"]
    assert rows["group"][:] == ["north", "like train/2.png"]


def test_scene_labels_add_what_boxes_do_not_tell(mine, tmp_path):
    line = {"weather": "rain", "time_of_day": "day", "road": "wet", "traffic": "busy", "place": "parking"}
    line |= {"view": "roadside", "present": ["truck", "car"], "unsure": ["bus"]}
    entries = [{"image": f"mine/train/{i}.png"} | line for i in (0, 1, 99)]
    path, options = tmp_path / "labels" / "mine.jsonl", {"scene_labels": tmp_path / "labels"}
    path.parent.mkdir()
    path.write_text("\n".join(map(json.dumps, entries)))
    report = make(tmp_path / "out", source=[mapped(mine)], **options)
    assert report["skipped"]["image without scene labels"] == 1 and report["images"] == 3
    assert report["left_out"]["scene labels without image"] == 1
    scene = Scene.from_json(load(tmp_path / "out")[0]["scene"])
    assert scene.scene_attributes == {
        **{"weather": "rainy", "time of day": "day", "view": "other"},
        **{"road surface": "wet", "traffic density": "busy", "road type": "parking area"},
    }
    presence = {"truck": True, "train": False, "road construction": False}
    assert scene.presence.items() >= presence.items()
    assert not {"car", "vehicle", "bus"} & scene.presence.keys()  # boxed, of a boxed class, and unsure
    path.write_text(json.dumps(entries[0] | {"weather": "hot"}))
    messages = make(tmp_path / "hot", source=[mapped(mine)], **options)["messages"]
    assert "mine.jsonl:1: ValueError: weather is 'hot'" in messages[0]
    path.rename(path.with_name("other.jsonl"))
    with pytest.raises(DataError, match=r"labels/mine.jsonl: cannot be read: .*No such file"):
        make(tmp_path / "next", source=[mapped(mine)], **options)


def test_colors_of_vehicles_are_those_of_their_boxes(mine, tmp_path):
    made = make(tmp_path / "plain", source=[mapped(mine)])
    scene = Scene.from_json(load(tmp_path / "plain")[0]["scene"])
    item = next(item for item in scene.objects if item.category == "car")
    left, top, right, bottom = item.box
    x, y = scene.width, scene.height
    label = {"image": f"mine/{scene.image_id}", "class": "car", "color": "red"}
    label |= {"box": [left / x, top / y, (right - left) / x, (bottom - top) / y]}
    changes = [{}, {"color": "pink"}, {"class": "tree"}, {"box": [0, 0, 0.01, 0.01]}, {"class": "bus"}]
    changes += [{"image": "yours/train/0.png"}, {"image": "mine/train/99.png"}]
    path = tmp_path / "colors.jsonl"
    path.write_text("\n".join([json.dumps(label | change) for change in changes] + ["[]", "{"]))
    report = make(tmp_path / "out", source=[mapped(mine)], vehicle_colors=path)
    assert report["images"] == made["images"]
    colors = {name: count for name, count in report["skipped"].items() if "vehicle color" in name}
    assert colors == {"bad vehicle color": 2, "vehicle color without box": 4}
    assert report["left_out"]["vehicle color without image"] == 1
    named = [one for one in Scene.from_json(load(tmp_path / "out")[0]["scene"]).objects if one.is_largest]
    assert named == [replace(item, attributes=item.attributes | {"color": "red"}, is_largest=True)]
    path.write_text(json.dumps(label | {"color": "mixed"}))
    make(tmp_path / "mixed", source=[mapped(mine)], vehicle_colors=path)
    named = [one for one in Scene.from_json(load(tmp_path / "mixed")[0]["scene"]).objects if one.is_largest]
    assert named == [replace(item, is_largest=True)]
    with pytest.raises(DataError, match=r"no.jsonl: cannot be read: .*No such file"):
        make(tmp_path / "next", source=[mapped(mine)], vehicle_colors=tmp_path / "no.jsonl")


# Loading


@pytest.fixture(scope="module")
def rows():
    made = synthetic_rows(first_seed=900, num_images=6, questions_per_image=4)
    return Dataset.from_dict({name: [row[name] for row in made] for name in FEATURES})


def write(folder: Path, **splits: Dataset) -> Path:
    """Write Parquet files as make_dataset does."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for split, part in splits.items():
        part.to_parquet(str(folder / "data" / f"{split}-00000.parquet"))
    return folder


def line(name="1.png", questions=("Is there a car?",), answers=("yes",)) -> str:
    return json.dumps({"file_name": name, "questions": questions, "answers": answers}, ensure_ascii=False)


def write_own(folder: Path, *names: str, text: str | bytes | None = None, metadata="metadata.jsonl") -> Path:
    """Write small images of these names, and a list of questions with a line for each."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / name)
    text = "\n".join(map(line, names)) if text is None else text
    (folder / metadata).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_rows_of_folders(tmp_path, rows):
    folder, ids = write(tmp_path / "test [1]*?", val=rows), rows["image_id"]  # a name with all that patterns have
    assert load_rows([folder])["image_id"] == ids
    assert load_rows([folder], prefer="train")["image_id"] == ids  # it has no such split
    with pytest.raises(DataError, match="a folder is given twice"):
        load_rows([folder, folder / "data" / ".."])
    assert len(set(load_rows([folder], max_images=3)["image_id"])) == 3
    for i in range(2):  # two files of another split, with the names that `push_to_hub` gives
        rows.select([2 * i, 2 * i + 1]).to_parquet(str(folder / f"data/train-0000{i}-of-00002.parquet"))
    assert load_rows([folder], prefer="train")["image_id"] == ids[:4]
    assert load_rows([folder], "val", prefer="train")["image_id"] == ids


@pytest.mark.parametrize(
    ("splits", "change", "split", "message"),
    [
        (None, None, None, "no such dataset folder"),
        ((), None, None, "has neither data/"),
        (("val",), lambda rows: rows.select([]), None, "the dataset (has no rows|cannot be read: .*no data)"),
        (("val",), lambda rows: rows.remove_columns("image"), None, "has no column image"),
        (("train", "val"), lambda rows: rows, None, "has the splits train, val; --split"),
        (("val",), lambda rows: rows, "test", "has no split 'test', only val"),
    ],
)
def test_bad_folders_are_refused_in_one_line(tmp_path, rows, splits, change, split, message):
    folder = tmp_path / "bad"
    if splits is not None:
        write(folder, **{name: change(rows) for name in splits})
    with pytest.raises(DataError, match=rf"^[^\n]*{message}[^\n]*$"):
        load_rows([folder], split=split)


# Questions of one's own


def test_own_questions_get_defaults_and_the_names_of_their_folders(tmp_path):
    folders = [write_own(tmp_path / drive / "val", "1.png") for drive in ("drive1", "drive2")]
    rows = load_rows(folders)
    text, own = ["Is there a car?"], ["own"]
    expected = {"questions": text, "answers": ["yes"], "question_types": own, "categories": own, "question_ids": text}
    expected |= {"image": 0, "source": "drive1/val", "image_id": "1.png", "group": "", "scene": ""}
    assert {**rows[0], "image": 0} == expected
    assert rows["source"] == ["drive1/val", "drive2/val"] and load_rows(folders[:1])["source"] == ["val"]
    deep = [tmp_path / name for name in ("drive1/frames/val", "drive2/frames/val", "data/frames/other")]
    assert source_names(deep) == ["drive1/frames/val", "drive2/frames/val", "data/frames/other"]


NAMES = ["test_drive/1.png", "2.train.png", "dev/3.JPG", "evaluation.png"]
LINES = "\r\n".join(line(f".\\{name}", ["Is it\u2028night?"]) for name in NAMES)
CSV = "\n".join(["file_name,questions,answers", *(f"{name},Is it\u2028night?,yes." for name in NAMES)])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize(("metadata", "text"), [("metadata.jsonl", LINES), ("metadata.csv", CSV)])
def test_all_own_questions_are_read_whatever_the_names(tmp_path, capsys, metadata, text, encoding):
    text = text.encode(encoding)
    folder = write_own(tmp_path / "my [1] test*", *NAMES, "left_out.png", text=text, metadata=metadata)
    rows = load_rows([folder], prefer="train")
    assert rows["questions"] == [["Is it\u2028night?"]] * 4 and rows["answers"] == [["yes"]] * 4
    assert [one["image"].size for one in rows] == [(8, 8)] * 4
    said = capsys.readouterr().err
    assert f"{folder}: images with questions by {metadata}: 4; without a line, and left out: 1" in said


def test_folders_of_splits_with_own_questions(tmp_path, capsys):
    folder = write_own(tmp_path / "own/Train", "1.png").parent
    write_own(folder / "val", "1.png")
    assert len(load_rows([folder], prefer="train")) == len(load_rows([folder], split="val")) == 1
    with pytest.raises(DataError, match="has the splits train, val; --split"):
        load_rows([folder])
    write_own(folder / "other", "1.png")
    write_own(folder / "other/deeper", "1.png")
    assert len(load_rows([folder], prefer="train")) == 4  # not only splits
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{line()}\n{line('2.png', ['A?', 'B?'])}", r":2 \(2.png\): 2 questions have 1 answers"),
        (line(questions="Is it night?"), r":1 \(1.png\): questions must be a list of texts that .* got 'Is it"),
        (line(answers=["."]), r":1 \(1.png\): answers must be a list of texts that are not empty, got \['.'\]"),
        ('{"image": "1.png", "questions": []}', ":1: has no file_name: {'image': '1.png'"),
        ("null", ":1: has no file_name: None"),
        ("\n{'a': 1}", ":2: is not valid JSON: Expecting property name"),
        ("", "the dataset has no rows"),
        (line("7.png"), ":1: image '7.png' is missing"),
        (line("x.gif"), r"image 'x.gif' may be x.bmp or x.png"),
        (line("torn.jpg"), r"torn\.jpg cannot be decoded"),
    ],
)
def test_a_wrong_line_of_own_questions_is_named_before_the_run(tmp_path, text, message):
    folder = write_own(tmp_path, "1.png", "2.png", "x.png", "x.bmp", text=text)
    Image.effect_noise((60, 60), 90).convert("RGB").save(folder / "torn.jpg")
    (folder / "torn.jpg").write_bytes((folder / "torn.jpg").read_bytes()[:1000])
    with pytest.raises(DataError, match=rf"^[^\n]*{message}[^\n]*$"):
        load_rows([folder])


def test_lines_of_a_csv_file_about_one_image_are_one_row_and_commas_need_quotes(tmp_path):
    text = "file_name,questions,answers\n1.png,Is it wet?,no\n1.png,{},yes"
    folder = write_own(tmp_path, "1.png", text=text.format('"At night, is it?"'), metadata="metadata.csv")
    [row] = load_rows([folder])
    assert (row["questions"], row["answers"]) == (["Is it wet?", "At night, is it?"], ["no", "yes"])
    (folder / "metadata.csv").write_text(text.format("At night, is it?"))
    with pytest.raises(DataError, match=r"metadata\.csv:3: more cells than columns"):
        load_rows([folder])


# Balance of the answers


def leads(images: list[list[Question]], *names: str) -> Counter[tuple[str, ...]]:
    """Yes minus no of the questions, by the attributes of these names."""
    found: Counter[tuple[str, ...]] = Counter()
    for question in (question for questions in images for question in questions):
        found[tuple(getattr(question, name) for name in names)] += {"yes": 1, "no": -1}.get(question.answer, 0)
    return found


def test_settled_questions_have_as_many_yes_as_no_for_each_kind_and_class():
    rng, balancer = random.Random(0), Balancer()
    asked = [ask(GroundTruth(render(seed)[1]), rng, 16, balancer) for seed in range(30)]
    settled, kind = rebalance(asked), ("question_type", "category")
    assert all(set(kept) <= set(questions) for kept, questions in zip(settled, asked))
    assert any(leads(asked, *kind).values()) and not any(leads(settled, *kind).values())
    # No more are removed than needed, and none of a question id that does not lead.
    assert sum(map(len, asked)) - sum(map(len, settled)) == sum(map(abs, leads(asked, *kind).values()))
    before, after = leads(asked, "question_id"), leads(settled, "question_id")
    assert all(0 <= after[question_id] / (before[question_id] or 1) <= 1 for question_id in before)
    questions = [[Question("Is there a car?", "yes", "presence", "car", "presence/car")]] * 3  # no image is lost
    assert rebalance(questions) == questions
    assert [len(left) for left in rebalance([questions[0] * 2, *questions])] == [1, 1, 1, 1]

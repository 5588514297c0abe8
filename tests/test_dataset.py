"""Datasets: files that are complete or absent, stopped runs that continue, and balanced answers."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, load_dataset
from PIL import Image

from tiny import start_process
from traffic_vlm.data import dataset
from traffic_vlm.data.dataset import DatasetOptions, make_dataset, skipped_path
from traffic_vlm.data.formats import Problems, load_mapping, read_source
from traffic_vlm.data.formats.drafting import draft_mapping
from traffic_vlm.data.ground_truth import GroundTruth
from traffic_vlm.data.questions import Balancer, Question, ask, enumerate_questions, rebalance
from traffic_vlm.data.scene import Scene
from traffic_vlm.data.synthetic import render
from traffic_vlm.files import DataError


def make(folder: Path, **options: object) -> dict:
    return make_dataset(
        DatasetOptions(folder, **({"num_images": 24, "images_per_file": 8, "num_workers": 1} | options))
    )


def coco(folder: Path, broken: bool = False) -> str:
    """A tiny COCO source with a mapping of its own, as a value of --source."""
    (folder / "train").mkdir(parents=True)
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 255, (60, 80, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "train" / f"{i}.png")
    if broken:
        content = (folder / "train" / "1.png").read_bytes()
        (folder / "train" / "1.png").write_bytes(content[: len(content) // 2])
    images = [{"id": i, "file_name": f"{i}.png", "width": 80, "height": 60} for i in range(3)]
    boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [5 + 20 * i, 20, 30, 30]} for i in range(3)]
    annotations = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "auto"}]}
    (folder / "train.json").write_text(json.dumps(annotations))
    splits = {"train": {"images": "train", "annotations": "train.json"}}
    mapping = {"name": "mine", "format": "coco", "splits": splits, "classes": {"auto": "car"}, "exhaustive": ["car"]}
    (folder / "map.json").write_text(json.dumps(mapping))
    return f"{folder / 'map.json'}={folder}"


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic") / "set"
    make(folder)
    return folder


def load(folder: Path) -> Dataset:
    return load_dataset(str(folder), split="train")


def test_rows_are_loaded_as_the_report_counts_them(synthetic, tmp_path):
    rows, report = load(synthetic), json.loads((synthetic / "report.json").read_text())
    assert len(rows) == 24 and rows[0]["image"].size == (224, 224)
    assert set(rows.column_names) == set(dataset.FEATURES)
    assert all(len(row["questions"]) == len(row["answers"]) == len(row["question_types"]) > 0 for row in rows)
    assert report["images"] == 24 and report["sources"] == {"synthetic": 24} and not report["skipped"]
    assert report["questions"] == Counter(question_type for row in rows for question_type in row["question_types"])
    make(tmp_path / synthetic.name, num_images=2, first_seed=24)  # a folder of the same name: not from the cache
    assert set(load(tmp_path / synthetic.name)["image_id"]).isdisjoint(rows["image_id"])


def start(folder: Path, hook: str, **options: int) -> subprocess.Popen:
    """Start make_dataset.py in a new process, in which `hook` runs first."""
    code = f"""
import os, runpy, signal, sys
from itertools import count
numbers = count(1)
{hook}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    arguments = [f"--{name}={value}" for name, value in options.items()]
    flags = ["-c", code]
    return start_process("make_dataset.py", f"--output_dir={folder}", *arguments, flags=flags, start_new_session=True)


@pytest.mark.slow
def test_a_killed_run_continues_and_gives_the_same_files(tmp_path):
    """It is killed before a third file gets its name."""
    options = {"num_images": 4, "images_per_file": 1, "num_workers": 1}
    kill = """
def kill(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith(".parquet") and next(numbers) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
"""
    killed = start(tmp_path / "set", kill, **options)
    assert "Error" not in killed.communicate(timeout=60)[1] and killed.returncode == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").glob("data/*.parquet")}
    assert len(before) == 2 and all(pq.read_table(path).num_rows == 1 for path in before)
    reports = [make(tmp_path / name, **options) for name in ("set", "never_stopped")]
    assert reports[0] == reports[1] and before == {path: path.stat().st_mtime_ns for path in before}
    rows = [load(tmp_path / name).to_list() for name in ("set", "never_stopped")]
    assert rows[0] == rows[1] and len(rows[0]) == 4
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_workers_end_with_a_run_that_is_stopped_while_it_starts_them(tmp_path):
    """The signal arrives as soon as the second worker is forked."""
    stop = "next(numbers) == 3 and signal.raise_signal(signal.SIGINT)"
    process = start(tmp_path / "set", f"os.register_at_fork(after_in_parent=lambda: {stop})")
    try:
        said = process.communicate(timeout=60)[1]  # until the last process ends: workers inherit the pipes
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130 and "stopped; the same command continues this run" in said


def test_sources_are_mixed_and_problems_are_counted(tmp_path):
    source = coco(tmp_path / "mine", broken=True)
    Image.new("RGB", (80, 60)).save(tmp_path / "mine" / "train" / "of_another_split.png")
    report = make(tmp_path / "out", source=[source, "synthetic"], num_images=4)
    assert report["sources"] == {"mine": 2, "synthetic": 4} and report["skipped"] == {"unreadable image": 1}
    assert report["left_out"] == {"image not listed": 1}
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert "1.png: the image cannot be read" in report["messages"][1]
    with pytest.raises(DataError, match=r"1\.png: the image cannot be read"):
        make(tmp_path / "strict", source=[source], strict=True)
    assert not list((tmp_path / "strict").rglob("*.parquet"))


CLASS_NAMES = ["car", "motor_bike", "forklift"]  # a name of ours, a synonym, and one that has no category
VAL = {5, 11}  # of twelve images; the others are for training


def write_unmapped(folder: Path, format: str) -> None:
    """Write twelve images of 80 × 60: each has a motor bike, every second one a car, the first one a forklift."""
    bike, car, forklift = (1, 50, 10, 75, 50), (0, 5, 10, 45, 40), (2, 0, 0, 5, 5)
    coco = {
        split: {"images": [], "annotations": [], "categories": [{"id": i, "name": n} for i, n in enumerate(names)]}
        for names in [[*CLASS_NAMES, "never used"]]
        for split in ("train", "val")
    }
    texts = {"yolo": {"data.yaml": f"train: ../images/train\nval: images/val\nnames: {CLASS_NAMES}\n"}, "voc": {}}
    for i in range(12):
        split = "val" if i in VAL else "train"
        path = folder / ("JPEGImages" if format == "voc" else f"images/{split}") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80, 60), (i, 0, 0)).save(path)
        coco[split]["images"].append({"id": i, "file_name": f"{i}.png"})
        lines, objects = "", ""
        for name, left, top, right, bottom in [car] * (i % 2) + [bike] + [forklift] * (i == 0):
            box = [left, top, right - left, bottom - top]
            coco[split]["annotations"].append({"image_id": i, "category_id": name, "bbox": box})
            lines += f"{name} {(left + right) / 160} {(top + bottom) / 120} {box[2] / 80} {box[3] / 60}\n"
            corners = {"xmin": left + 1, "ymin": top + 1, "xmax": right, "ymax": bottom}
            box_xml = "".join(f"<{key}>{value}</{key}>" for key, value in corners.items())
            objects += f"<object><name>{CLASS_NAMES[name]}</name><bndbox>{box_xml}</bndbox></object>"
        texts["yolo"][f"labels/{split}/{i}.txt"] = lines
        texts["voc"][f"Annotations/{i}.xml"] = f"<annotation>{objects}</annotation>"
    texts["voc"] |= {f"ImageSets/Main/{s}.txt": "\n".join(str(i["id"]) for i in coco[s]["images"]) for s in coco}
    texts["coco"] = {f"annotations/instances_{s}2017.json": json.dumps(coco[s]) for s in coco}
    texts["coco"]["annotations/captions_train2017.json"] = '{"images": [], "annotations": []}'
    write_texts(folder, texts[format])


def write_texts(folder: Path, texts: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("format", ["coco", "yolo", "voc"])
def test_a_folder_alone_is_read_by_the_names_of_its_classes(tmp_path, capsys, format):
    folder, draft = tmp_path / "mine", tmp_path / "out_mine.json"
    write_unmapped(folder, format)
    report = make(tmp_path / "out", source=[str(folder)], num_images=None)
    assert report["sources"] == {"mine": 10} and report["skipped"] == {"unknown class 'forklift'": 1}
    assert report["yes_rates"]["presence/car"] == 0.5
    printed = capsys.readouterr().out
    assert f"{folder} is read as {format}, by {draft}:" in printed and f"--source {draft}={folder}" in printed
    assert all(text in printed for text in ("car = car", "motor_bike = motorcycle", "No category for forklift:"))
    mapping = load_mapping(draft)
    assert set(mapping.splits) == {"train", "val"} and mapping.exhaustive == {"car"}  # not each motorcycle, perhaps
    [first, *_] = read_source(folder, mapping, "val")
    assert [item.category for item in first.scene.objects] == ["car", "motorcycle"]
    assert first.scene.objects[1].box == pytest.approx((50, 10, 75, 50), abs=1e-6)
    draft.write_text(draft.read_text().replace('"car": "car"', '"car": "vehicle"').replace('    "car"\n', ""))
    with pytest.raises(DataError, match=f"mine.json differs .* was edited.* --source .*_mine.json={folder} uses it"):
        make(tmp_path / "out", source=[str(folder)], num_images=None)
    assert make(tmp_path / "second", source=[f"{draft}={folder}"], split="val", num_images=None)["images"] == 2


def test_folders_of_a_data_yaml_are_inside_of_its_folder(tmp_path):
    folder = tmp_path / "mine"
    write_unmapped(folder, "yolo")  # with train: ../images/train
    for split in ("train", "test"):
        (tmp_path / "images" / split).mkdir(parents=True)
    draft_mapping(folder, tmp_path / "draft.json")
    splits = load_mapping(tmp_path / "draft.json").splits
    assert splits["train"] == {"images": "images/train", "labels": "labels/train"}
    with (folder / "data.yaml").open("a") as file:
        file.write("test: ../images/test\n")
    with pytest.raises(DataError, match=rf"data.yaml: test: \.\./images/test is outside of {folder}: "):
        draft_mapping(folder, tmp_path / "new.json")


def test_nothing_is_drafted_from_a_link_out_of_the_folder(tmp_path):
    write_unmapped(tmp_path / "mine", "yolo")
    (tmp_path / "mine/data.yaml").symlink_to((tmp_path / "mine/data.yaml").rename(tmp_path / "outside"))
    with pytest.raises(DataError, match=f"data.yaml leads to {tmp_path}/outside, which is outside of"):
        draft_mapping(tmp_path / "mine", tmp_path / "draft.json")
    assert not (tmp_path / "draft.json").exists()


def test_each_source_and_split_has_its_own_images(tmp_path):
    def items(**options: object) -> list[list]:
        return list(dataset.read_items(DatasetOptions(tmp_path, **options), Problems()).values())

    sources = [coco(tmp_path / "mine"), "synthetic"]
    for maximum, expected in {None: [3, 1000], 2: [2, 2], 5: [3, 5]}.items():
        assert [len(part) for part in items(source=sources, num_images=maximum)] == expected
    splits = ("train", "val", "test", "val.night")
    seeds = {split: items(num_images=5, first_seed=3, split=split)[0] for split in splits}
    assert seeds["train"] == [3, 4, 5, 6, 7]
    assert len({seed for split in seeds.values() for seed in split}) == 20


def test_a_folder_with_something_else_is_left_alone(synthetic, tmp_path, run_script, capsys):
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match=r"has README\.md of something else"):
        make(tmp_path)
    with pytest.raises(DataError, match="first_seed: 0 before, 5 now"):
        make(synthetic, first_seed=5)
    run_script("make_dataset.py", "--output_dir", tmp_path / "file", status=2)
    assert f"{tmp_path / 'file'}" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"README.md": "mine", "file": "mine"}


def test_damaged_files_of_a_run_are_named(synthetic, tmp_path):
    folder = shutil.copytree(synthetic, tmp_path / "set")
    path = folder / "data" / "train-00001.parquet"
    for damaged, message in (
        (skipped_path(path), f"is damaged .*; delete {path} and run"),
        (path, f"is damaged .*; delete {path} and run"),
        (folder / ".options.json", f"is damaged .*, or delete {folder} to start over"),
    ):
        complete = damaged.read_bytes()
        damaged.write_text("{")
        with pytest.raises(DataError, match=rf"{damaged}.* {message}"):
            make(folder)
        damaged.write_bytes(complete)


def test_rows_do_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "BLOCK", 4)
    for workers in (1, 3):
        make(tmp_path / str(workers), num_workers=workers)
    rows = [load(tmp_path / str(workers)).to_list() for workers in (1, 3)]
    assert rows[0] == rows[1] and len(rows[0]) == 24


def test_a_source_that_has_changed_is_noticed(tmp_path):
    source = coco(tmp_path / "mine")
    make(tmp_path / "set", source=[source])
    path = tmp_path / "mine" / "train.json"
    path.write_text(path.read_text().replace("[25, 20, 30, 30]", "[26, 20, 30, 30]"))
    with pytest.raises(DataError, match=r"images of .*mine: .* before, .* now.*choose another folder, or delete"):
        make(tmp_path / "set", source=[source])


def test_a_full_disk_leaves_no_partial_file(tmp_path, monkeypatch):
    def fail(_, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr("datasets.Dataset.to_parquet", fail)
        make(tmp_path, num_images=2)
    assert not list(tmp_path.rglob("*.parquet")) and not list(tmp_path.rglob("*.tmp"))
    assert make(tmp_path, num_images=2)["images"] == 2 == len(load(tmp_path))


# Balance of the answers


def yes_minus_no(pairs) -> Counter:
    """Of pairs (key, answer), by key."""
    leads: Counter = Counter()
    for key, answer in pairs:
        leads[key] += {"yes": 1, "no": -1}.get(answer, 0)
    return leads


def test_settled_questions_have_as_many_yes_as_no_for_each_kind_and_class():
    def leads(images, *names: str) -> Counter:
        questions = [question for questions in images for question in questions]
        return yes_minus_no((tuple(getattr(one, name) for name in names), one.answer) for one in questions)

    rng, balancer = random.Random(0), Balancer()
    asked = [ask(GroundTruth(render(seed)[1]), rng, 16, balancer) for seed in range(30)]
    settled, kind = rebalance(asked), ("question_type", "category")
    assert all(set(kept) <= set(questions) for kept, questions in zip(settled, asked))
    assert any(leads(asked, *kind).values()) and not any(leads(settled, *kind).values())
    # No more are removed than needed, and none of a question id that does not lead.
    assert sum(map(len, asked)) - sum(map(len, settled)) == sum(map(abs, leads(asked, *kind).values()))
    before, after = leads(asked, "question_id"), leads(settled, "question_id")
    assert all(0 <= after[question_id] / (before[question_id] or 1) <= 1 for question_id in before)


def test_without_balance_yes_is_as_frequent_as_in_the_images(tmp_path):
    true = defaultdict(list)
    for seed in range(8):
        for one in enumerate_questions(GroundTruth(render(seed)[1])):
            if one.question_type == "presence":
                true[f"presence/{one.category}"].append(one.answer == "yes")
    natural = {name: pytest.approx(sum(found) / len(found), abs=1e-3) for name, found in true.items()}
    options = {"num_images": 8, "questions_per_image": 1000}  # so many are all that there are
    balanced, asked_all = (make(tmp_path / str(on), balance=on, **options)["yes_rates"] for on in (True, False))
    assert {name: rate for name, rate in asked_all.items() if name.startswith("presence")} == natural
    assert {balanced[name] for name in natural if name in balanced} == {0.5}


def test_no_image_is_lost_to_the_balance():
    questions = [[Question("Is there a car?", "yes", "presence", "car", "presence/car")]] * 3
    assert rebalance(questions) == questions
    assert [len(left) for left in rebalance([questions[0] * 2, *questions])] == [1, 1, 1, 1]


def test_scene_labels_add_what_boxes_do_not_tell(tmp_path):
    source = coco(tmp_path / "mine")
    line = {"weather": "rain", "time_of_day": "day", "road": "wet", "traffic": "busy", "place": "parking"}
    line |= {"view": "roadside", "present": ["truck", "car"], "unsure": ["bus"]}
    entries = [{"image": f"mine/train/{i}.png"} | line for i in range(2)]
    (tmp_path / "labels").mkdir()
    path = tmp_path / "labels" / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    report = make(tmp_path / "out", source=[source], scene_labels=tmp_path / "labels")
    assert report["skipped"]["image without scene labels"] == 1 and report["images"] == 3
    scene = Scene.from_json(load(tmp_path / "out")[0]["scene"])
    assert scene.scene_attributes == {
        **{"weather": "rainy", "time of day": "day", "view": "other"},
        **{"road surface": "wet", "traffic density": "busy", "road type": "parking area"},
    }
    presence = {"truck": True, "train": False, "road construction": False}
    assert scene.presence.items() >= presence.items()
    assert not {"car", "vehicle", "bus"} & scene.presence.keys()  # boxed, of a boxed class, and unsure
    with pytest.raises(DataError, match=r"labels/other.jsonl does not exist; --scene_labels needs a file"):
        shutil.copytree(tmp_path / "mine", tmp_path / "other")
        make(tmp_path / "next", source=[source[:-4] + "other"], scene_labels=tmp_path / "labels")
    path.write_text(json.dumps(entries[0] | {"weather": "hot"}))
    with pytest.raises(DataError, match=r"mine.jsonl:1.*weather is 'hot'"):
        make(tmp_path / "next", source=[source], scene_labels=tmp_path / "labels", strict=True)

"""Datasets: files that are complete or absent, stopped runs that continue, and balanced answers."""

import contextlib
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from datasets import load_dataset
from PIL import Image

from tiny import ROOT
from traffic_vlm.data import dataset
from traffic_vlm.data.dataset import DatasetOptions, SyntheticRows, make_dataset, skipped_path, write_file
from traffic_vlm.data.formats import Problems, load_mapping, read_source
from traffic_vlm.data.formats.drafting import draft_mapping
from traffic_vlm.data.ground_truth import GroundTruth
from traffic_vlm.data.questions import Balancer, NaturalRates, Question, ask, enumerate_questions, rebalance
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


@pytest.fixture
def refusal(run_script):
    """A function that runs a script in this process and returns the one line with which it stops."""

    def run(script: str, *options: object) -> str:
        with pytest.raises(SystemExit) as stopped:
            run_script(script, *options)
        assert isinstance(stopped.value.code, str) and "\n" not in stopped.value.code
        return stopped.value.code

    return run


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic") / "set"
    make(folder)
    return folder


def test_load_dataset_reads_the_folder(synthetic):
    rows = load_dataset(str(synthetic), split="train")
    assert len(rows) == 24 and rows[0]["image"].size == (224, 224)
    assert set(rows.column_names) == set(dataset.FEATURES)
    assert all(len(row["questions"]) == len(row["answers"]) == len(row["question_types"]) > 0 for row in rows)
    report = json.loads((synthetic / "report.json").read_text())
    assert report["images"] == 24 and report["sources"] == {"synthetic": 24} and not report["skipped"]
    assert report["questions"] == Counter(question_type for row in rows for question_type in row["question_types"])
    assert all(0 <= rate <= 1 for rate in report["yes_rates"].values())


def test_a_folder_of_the_same_name_is_not_loaded_from_the_cache(synthetic, tmp_path):
    make(tmp_path / synthetic.name, num_images=2, first_seed=24)
    rows = [load_dataset(str(folder), split="train") for folder in (synthetic, tmp_path / synthetic.name)]
    assert set(rows[0]["image_id"]).isdisjoint(rows[1]["image_id"])


@pytest.mark.slow
def test_a_run_killed_three_times_gives_the_same_files(tmp_path):
    folder = tmp_path / "set"
    script = [sys.executable, ROOT / "scripts" / "make_dataset.py", "--output_dir", folder]
    command = [*map(str, script), "--num_images", "24", "--images_per_file", "1", "--num_workers", "1"]

    def written() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in folder.glob("data/*.parquet")}

    for _ in range(3):
        before = written()
        process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while written().keys() == before.keys() and process.poll() is None:
            time.sleep(0.01)
        assert process.poll() is None, "it ended before it could be killed"
        os.killpg(process.pid, signal.SIGKILL)  # with its workers
        process.wait()
        after = written()
        assert len(before) < len(after) < 24
        assert before.items() <= after.items()  # complete files are not written again
        for name in after:
            assert len(load_dataset("parquet", data_files=str(folder / "data" / name), split="train")) == 1
    subprocess.run(command, check=True, capture_output=True)
    assert len(written()) == 24 and after.items() <= written().items()
    assert not list(folder.rglob("*.tmp"))
    make(tmp_path / "never_stopped", images_per_file=1)
    results = [
        (load_dataset(str(path), split="train").to_list(), json.loads((path / "report.json").read_text()))
        for path in (folder, tmp_path / "never_stopped")
    ]
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_a_run_that_is_stopped(tmp_path, end):
    script = [sys.executable, str(ROOT / "scripts" / "make_dataset.py"), "--output_dir", str(tmp_path / "set")]
    process = subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while (
            len(workers := psutil.Process(process.pid).children(recursive=True)) < 3
        ):  # two, and one that connects them
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(end)
        assert "stopped; the same command continues this run" in process.communicate(timeout=60)[1]
        assert not psutil.wait_procs(workers, timeout=10)[1]
    finally:
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()


def test_sources_are_mixed_and_problems_are_counted(tmp_path):
    source = coco(tmp_path / "mine", broken=True)
    report = make(tmp_path / "out", source=[source, "synthetic"], num_images=4)
    assert report["sources"] == {"mine": 2, "synthetic": 4} and report["skipped"] == {"unreadable image": 1}
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert "1.png: the image cannot be read" in report["messages"][0]
    with pytest.raises(DataError, match=r"1\.png: the image cannot be read"):
        make(tmp_path / "strict", source=[source], strict=True)
    assert not list((tmp_path / "strict").rglob("*.parquet"))


CLASS_NAMES = ["car", "motor_bike", "forklift"]  # a name of ours, a synonym, and one that has no category
VAL = {5, 11}  # of twelve images; the others are for training


def write_unmapped(folder: Path, format: str) -> None:
    """Write twelve images of 80 × 60: each has a motor bike, every second one a car, the first one a forklift."""
    bike, car, forklift = (1, 50, 10, 75, 50), (0, 5, 10, 45, 40), (2, 0, 0, 5, 5)
    coco: dict = {split: {"images": [], "annotations": []} for split in ("train", "val")}
    for i in range(12):
        split, labels = "val" if i in VAL else "train", [car] * (i % 2) + [bike] + [forklift] * (i == 0)
        path = folder / ("JPEGImages" if format == "voc" else f"images/{split}") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80, 60), (i, 0, 0)).save(path)
        coco[split]["images"].append({"id": i, "file_name": f"{i}.png"})
        lines, objects = [], []
        for name, left, top, right, bottom in labels:
            box = [left, top, right - left, bottom - top]
            coco[split]["annotations"].append({"image_id": i, "category_id": name, "bbox": box})
            lines.append(f"{name} {(left + right) / 160} {(top + bottom) / 120} {box[2] / 80} {box[3] / 60}\n")
            corners = zip(("xmin", "ymin", "xmax", "ymax"), (left + 1, top + 1, right, bottom))
            box_xml = "".join(f"<{key}>{value}</{key}>" for key, value in corners)
            objects.append(f"<object><name>{CLASS_NAMES[name]}</name><bndbox>{box_xml}</bndbox></object>")
        file, text = {
            "coco": ("annotations/captions_train2017.json", '{"images": [], "annotations": []}'),
            "yolo": (f"labels/{split}/{i}.txt", "".join(lines)),
            "voc": (f"Annotations/{i}.xml", f"<annotation>{''.join(objects)}</annotation>"),
        }[format]
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    for split, data in coco.items():
        numbers = [image["id"] for image in data["images"]]
        data["categories"] = [{"id": i, "name": name} for i, name in enumerate([*CLASS_NAMES, "never used"])]
        file, text = {
            "coco": (f"annotations/instances_{split}2017.json", json.dumps(data)),
            "yolo": ("data.yaml", f"train: ../images/train\nval: images/val\nnames: {CLASS_NAMES}\n"),
            "voc": (f"ImageSets/Main/{split}.txt", "\n".join(map(str, numbers))),
        }[format]
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)


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


def test_a_draft_is_never_replaced(tmp_path):
    folder, draft = tmp_path / "a/mine", tmp_path / "out_mine.json"
    for path in (folder, tmp_path / "b/mine"):
        write_unmapped(path, "yolo")
        assert "mine is read as yolo" in draft_mapping(path, draft)  # the same draft
    data = folder / "data.yaml"
    data.write_text(data.read_text().replace("forklift", "van"))
    with pytest.raises(DataError, match=r"out_mine.json differs from the draft .* the folder has changed"):
        draft_mapping(folder, draft)


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


def test_drafted_coco_ids_are_compared_as_numbers(tmp_path):
    write_unmapped(tmp_path / "mine", "coco")
    for path in tmp_path.glob("mine/annotations/instances_*.json"):
        path.write_text(re.sub(r'"category_id": (\d)', r'"category_id": \1.0', path.read_text()))
    draft_mapping(tmp_path / "mine", tmp_path / "draft.json")
    assert set(load_mapping(tmp_path / "draft.json").classes) == {"car", "motor bike"}


@pytest.mark.parametrize(
    ("format", "name"),
    [("yolo", "data.yaml"), ("coco", "annotations/instances_val2017.json"), ("voc", "Annotations/1.xml")],
)
def test_nothing_is_drafted_from_a_link_out_of_the_folder(tmp_path, format, name):
    write_unmapped(tmp_path / "mine", format)
    (tmp_path / "mine" / name).symlink_to((tmp_path / "mine" / name).rename(tmp_path / "outside"))
    with pytest.raises(DataError, match=f"{name} leads to {tmp_path}/outside, which is outside of"):
        draft_mapping(tmp_path / "mine", tmp_path / "draft.json")
    assert not (tmp_path / "draft.json").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has none of a data.yaml with image folders, COCO JSON files or Pascal VOC XML files"),
        ({"data.yaml": "names: [car]\ntrain: nowhere"}, "data.yaml: train, val and test are no folders"),
        ({"data.yaml": "- car"}, "data.yaml: class names cannot be read: it has none"),
        (
            {"data.yaml": "names: [forklift]\ntrain: ."},
            r"none of its classes \(forklift\) .* 'classes' of .*out_mine.json, and",
        ),
        ({"Annotations/1.xml": "<annotation/>"}, "has none of its 1 images"),
        (
            {"a/1.xml": "<annotation/>", "a/1.png": "", "b/1.xml": "<annotation/>", "b/1.png": ""},
            "a and .*/b both have the split train",
        ),
    ],
)
def test_a_folder_alone_that_cannot_be_read(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    (tmp_path / "mine").mkdir(exist_ok=True)
    with pytest.raises(DataError, match=message):
        make(tmp_path / "out", source=[str(tmp_path / "mine")])


def test_the_number_of_images_is_a_maximum_for_each_source(tmp_path):
    source = coco(tmp_path / "mine")
    for count, expected in {None: (3, 1000), 2: (2, 2), 5: (3, 5)}.items():
        options = DatasetOptions(tmp_path, source=[source, "synthetic"], num_images=count)
        items = dataset.read_items(options, Problems())
        assert tuple(len(part) for part in items.values()) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--source", "camvid"], "camvid=FOLDER"),
        (["--source", "nonsense=/tmp"], "nonsense"),
        (["--source", "synthetic", "synthetic"], "given twice: synthetic synthetic"),
        (["--source", "camvid=/tmp", "camvid=/tmp/"], "given twice: camvid=/tmp camvid=/tmp/"),
        (["--num_images", "0"], "have no usable image: --num_images is 0"),
        (["--num_workers", "0"], "--num_workers must be at least 1, got 0"),
        (["--images_per_file", "-1"], "--images_per_file must be at least 1, got -1"),
        (["--split", "../train"], "--split must be words with dots between, like train or val.night, got '../train'"),
    ],
)
def test_bad_options(tmp_path, refusal, options, message):
    assert message in refusal("make_dataset.py", "--output_dir", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("measure_loading.py", ["--batch_size", "0"], "--batch_size must be at least 1, got 0"),
        ("measure_loading.py", ["--processor", "no/folder"], "--processor must be the folder"),
        ("measure_loading.py", ["--dataset", "no/folder"], "must be synthetic or a folder made by make_dataset.py"),
        ("contact_sheet.py", ["--columns", "0"], "--columns must be at least 1, got 0"),
        ("contact_sheet.py", ["--output", ROOT], "--output must be a PNG file"),
    ],
)
def test_bad_options_of_the_other_scripts(refusal, script, options, message):
    required = ["--dataset", "synthetic"] if script.startswith("measure") and "--dataset" not in options else []
    assert message in refusal(script, *required, *options)


def test_a_folder_with_something_else_is_left_alone(synthetic, tmp_path, refusal):
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DataError, match=r"has README\.md of something else"):
        make(tmp_path)
    with pytest.raises(DataError, match="first_seed: 0 before, 5 now"):
        make(synthetic, first_seed=5)
    assert str(tmp_path / "file") in refusal("make_dataset.py", "--output_dir", tmp_path / "file")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"README.md": "mine", "file": "mine"}


@pytest.mark.parametrize("content", ["", "{", "3"])
def test_damaged_files_of_a_run_are_named(synthetic, tmp_path, content):
    folder = shutil.copytree(synthetic, tmp_path / "set")
    path = folder / "data" / "train-00001.parquet"
    for damaged in (skipped_path(path), path):
        complete = damaged.read_bytes()
        damaged.write_text(content)
        with pytest.raises(DataError, match=rf"{damaged}.* is damaged .*; delete {path} and run"):
            make(folder)
        damaged.write_bytes(complete)
    (folder / ".options.json").write_text(content)
    with pytest.raises(DataError, match=rf"options\.json is damaged .*, or delete {folder} to start over"):
        make(folder)


def test_rows_do_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "BLOCK", 4)
    for workers in (1, 3):
        make(tmp_path / str(workers), num_workers=workers)
    rows = [load_dataset(str(tmp_path / str(workers)), split="train").to_list() for workers in (1, 3)]
    assert rows[0] == rows[1] and len(rows[0]) == 24


@pytest.mark.parametrize("changed", ["annotation", "image", "list"])
def test_a_source_that_has_changed_is_noticed(tmp_path, changed):
    source = coco(tmp_path / "mine")
    make(tmp_path / "set", source=[source])
    path = tmp_path / "mine" / "train.json"
    annotations = json.loads(path.read_text())
    if changed == "image":
        Image.new("RGB", (80, 60)).save(tmp_path / "mine" / "train" / "2.png")
    elif changed == "annotation":
        annotations["annotations"][1]["bbox"][0] += 1
    else:
        annotations["images"].pop()
    path.write_text(json.dumps(annotations))
    with pytest.raises(DataError, match=r"images of .*mine: .* before, .* now.*choose another folder, or delete"):
        make(tmp_path / "set", source=[source])


def test_splits_have_synthetic_scenes_of_their_own(tmp_path):
    seeds = {}
    for split in ("train", "val", "test", "val.night"):
        options = DatasetOptions(tmp_path, num_images=5, first_seed=3, split=split)
        [seeds[split]] = dataset.read_items(options, Problems()).values()
    assert seeds["train"] == [3, 4, 5, 6, 7]
    assert len({seed for split in seeds.values() for seed in split}) == 20
    assert render(seeds["val"][0])[1].image_id == str(seeds["val"][0])


def test_a_full_disk_leaves_no_partial_file(tmp_path, monkeypatch):
    def fail(_, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("datasets.Dataset.to_parquet", fail)
    path, options = tmp_path / "data" / "train-00000.parquet", DatasetOptions(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, [1, 2], 0, options)
    assert not list(path.parent.glob("*.parquet")) and not list(path.parent.glob("*.tmp"))
    monkeypatch.undo()
    write_file(path, [1, 2], 0, options)
    assert [file for file in path.parent.iterdir() if file != skipped_path(path)] == [path]


def test_synthetic_rows_are_divided_among_workers():
    loader = torch.utils.data.DataLoader(
        SyntheticRows(3, 5), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    assert [row["image_id"] for row in loader] == ["3", "4", "5", "6", "7"]


def test_loading_is_measured_without_the_batches_that_the_workers_prepared():
    script = runpy.run_path(str(ROOT / "scripts/measure_loading.py"))

    def loader():
        for index in range(10):
            time.sleep(0.3 if index < 4 else 0)
            yield {"pixel_values": torch.zeros(2, 3, 4, 4), "question_ends": torch.zeros(2, 3)}

    images, questions, seconds = script["measure"](loader(), skip=4, num_images=1000)
    assert (images, questions) == (12, 36) and seconds < 0.3
    assert script["measure"](loader(), skip=1, num_images=4)[0] == 4


# Balance of the answers


def yes_minus_no(questions, key) -> Counter:
    leads: Counter = Counter()
    for question in questions:
        leads[key(question)] += {"yes": 1, "no": -1}.get(question.answer, 0)
    return leads


def test_settled_questions_have_as_many_yes_as_no_for_each_kind_and_class():
    rng, balancer = random.Random(0), Balancer()
    asked = [ask(GroundTruth(render(seed)[1]), rng, 16, balancer) for seed in range(60)]
    settled = rebalance(asked)
    assert all(set(kept) <= set(questions) for kept, questions in zip(settled, asked))
    before, after = ([question for questions in rows for question in questions] for rows in (asked, settled))
    by_category = yes_minus_no(before, lambda question: (question.question_type, question.category))
    assert any(by_category.values())
    assert not any(yes_minus_no(after, lambda question: (question.question_type, question.category)).values())
    # No more are removed than needed, and none of a question id that does not lead.
    assert len(before) - len(after) == sum(map(abs, by_category.values()))
    leads, settled_leads = (
        yes_minus_no(questions, lambda question: question.question_id) for questions in (before, after)
    )
    assert all(0 <= settled_leads[question_id] / (leads[question_id] or 1) <= 1 for question_id in leads)


def test_several_files_together_are_balanced(tmp_path):
    """But for 1 % of the questions: the only question of an image is kept."""
    report = make(tmp_path, num_images=120, images_per_file=40, num_workers=2)
    rows = load_dataset(str(tmp_path), split="train").select_columns(["question_types", "categories", "answers"])
    leads: Counter = Counter()
    for row in rows:
        for question_type, category, answer in zip(row["question_types"], row["categories"], row["answers"]):
            leads[question_type, category] += {"yes": 1, "no": -1}.get(answer, 0)
    assert len(rows) == 120 and sum(map(abs, leads.values())) <= 0.01 * report["questions"].total()
    assert {question_type for question_type, _ in leads} > {"presence", "place", "count", "color", "relation"}


def test_without_balance_yes_is_as_frequent_as_in_the_images(tmp_path):
    scene = render(0)[1]
    asked = ask(GroundTruth(scene), random.Random(0), 1000, NaturalRates(), ["presence"])
    truths = [truth for truth in enumerate_questions(GroundTruth(scene)) if truth.question_type == "presence"]
    assert {(one.question_id, one.answer) for one in asked} == {(one.question_id, one.answer) for one in truths}
    rates = [
        make(tmp_path / str(balance), num_images=20, questions_per_image=1000, balance=balance)["yes_rates"]
        for balance in (True, False)
    ]
    answers = defaultdict(list)  # so many questions are all that there are
    for seed in range(20):
        for truth in enumerate_questions(GroundTruth(render(seed)[1])):
            if truth.question_type == "presence":
                answers[f"presence/{truth.category}"].append(truth.answer == "yes")
    natural = {name: pytest.approx(sum(found) / len(found), abs=1e-3) for name, found in answers.items()}
    balanced, asked_all = ({name: one[name] for name in one if name in natural} for one in rates)
    assert asked_all == natural and set(balanced.values()) == {0.5}


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
    rows = load_dataset(str(tmp_path / "out"), split="train")
    scene = Scene.from_json(rows[0]["scene"])
    assert scene.scene_attributes == {
        **{"weather": "rainy", "time of day": "day", "view": "other"},
        **{"road surface": "wet", "traffic density": "busy", "road type": "parking area"},
    }
    presence = {"truck": True, "train": False, "road construction": False}
    assert scene.presence.items() >= presence.items()
    assert not {"car", "vehicle", "bus"} & scene.presence.keys()  # boxed, of a boxed class, and unsure
    crop = scene.cropped(0, 0, 40, 30)
    assert crop.presence == {}  # also of what is absent, or "cropped" would mean "no"
    assert crop.scene_attributes.keys() == scene.scene_attributes.keys() - {"view", "traffic density"}
    with pytest.raises(DataError, match=r"labels/other.jsonl does not exist; --scene_labels needs a file"):
        shutil.copytree(tmp_path / "mine", tmp_path / "other")
        make(tmp_path / "next", source=[source[:-4] + "other"], scene_labels=tmp_path / "labels")
    path.write_text(json.dumps(entries[0] | {"weather": "hot"}))
    with pytest.raises(DataError, match=r"mine.jsonl:1.*weather is 'hot'"):
        make(tmp_path / "next", source=[source], scene_labels=tmp_path / "labels", strict=True)

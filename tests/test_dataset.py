"""Datasets: shards that are whole or absent, runs that go on where they were, batches that keep the truth."""

import colorsys
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import load_dataset
from PIL import Image
from transformers import Trainer, TrainingArguments

from tiny import ROOT, tiny_model
from traffic_vlm.data.collator import TrafficCollator, augment, change_light
from traffic_vlm.data.dataset import Shard, ShardReport, SyntheticStream, report_path, write_shard
from traffic_vlm.data.questions import Balancer, Question, ask, rebalance
from traffic_vlm.data.readers import Record
from traffic_vlm.data.scene import Scene, SceneObject
from traffic_vlm.data.synthetic import render
from traffic_vlm.training.collator import SupervisedCollator
from traffic_vlm.utils import DataError


def command(folder, *options: str) -> list[str]:
    script = str(ROOT / "scripts" / "make_dataset.py")
    sizes = ["--num_images", "24", "--shard_size", "8", "--num_workers", "2"]
    return [sys.executable, script, "--output_dir", str(folder), *sizes, *options]


def make(folder, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(folder, *options), capture_output=True, text=True)


def coco(folder, broken: bool = False):
    """A tiny COCO source with a mapping of its own."""
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
    mapping = json.loads((ROOT / "data" / "mappings" / "highway.json").read_text())
    mapping |= {"name": "mine", "classes": {"auto": "car"}, "exhaustive": ["car"], "attributed": {}, "facts": {}}
    mapping["splits"] = {"train": mapping["splits"]["train"]}
    (folder / "map.json").write_text(
        json.dumps({k: v for k, v in mapping.items() if k not in ("presence", "facts_of")})
    )
    return folder


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic") / "set"
    run = make(folder)
    assert run.returncode == 0, run.stderr
    return folder


def test_load_dataset_just_works(synthetic):
    rows = load_dataset(str(synthetic), split="train")
    assert len(rows) == 24
    row = rows[0]
    assert row["image"].size == (224, 224)
    assert len(row["questions"]) == len(row["answers"]) == len(row["kinds"]) > 0
    assert {"source", "image_id", "scene", "labels", "facts"} <= set(row)
    report = json.loads((synthetic / "report.json").read_text())
    assert report["images"] == 24
    assert sum(report["questions"].values()) == sum(len(row["questions"]) for row in rows)
    assert all(0 <= rate <= 1 for rate in report["yes_rates"].values())


def test_another_dataset_in_a_folder_of_the_same_name_is_another_dataset(synthetic, tmp_path):
    """And not what `load_dataset` has in its cache."""
    assert make(tmp_path / synthetic.name, "--num_images", "2", "--first_seed", "24").returncode == 0
    rows = [load_dataset(str(folder), split="train") for folder in (synthetic, tmp_path / synthetic.name)]
    assert set(rows[0]["image_id"]).isdisjoint(rows[1]["image_id"])


def test_the_same_options_give_the_same_files_however_often_they_stop(tmp_path):
    """Killed three times, with its worker, each time when another file is there, and started again."""
    folder, never_stopped = tmp_path / "set", tmp_path / "never_stopped"
    one_by_one = ["--shard_size", "1", "--num_workers", "1"]

    def written() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in folder.glob("data/*.parquet")}

    for _ in range(3):
        before = written()
        process = subprocess.Popen(
            command(folder, *one_by_one), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while written().keys() == before.keys() and process.poll() is None:
            time.sleep(0.01)
        assert process.poll() is None, "it ended before it could be killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        after = written()
        assert len(before) < len(after) < 24
        assert before.items() <= after.items()  # what was there is not written again
        for name in after:  # and what is there is whole
            assert len(load_dataset("parquet", data_files=str(folder / "data" / name), split="train")) == 1
    assert make(folder, *one_by_one).returncode == 0
    assert len(written()) == 24 and after.items() <= written().items()
    assert not list(folder.rglob("*.tmp"))
    assert make(never_stopped, *one_by_one).returncode == 0
    rows = [load_dataset(str(path), split="train").to_list() for path in (folder, never_stopped)]
    assert rows[0] == rows[1]
    reports = [json.loads((path / "report.json").read_text()) for path in (folder, never_stopped)]
    assert reports[0] == reports[1]


def test_a_folder_with_another_dataset_is_refused(synthetic):
    run = make(synthetic, "--first_seed", "5")
    assert run.returncode != 0
    assert "first_seed: 0 before, 5 now" in run.stderr


def test_sources_are_mixed_and_problems_are_counted(tmp_path):
    source = coco(tmp_path / "mine", broken=True)
    name = f"{source / 'map.json'}={source}"
    run = make(tmp_path / "out", "--source", name, "synthetic", "--shard_size", "32")
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["sources"] == {"mine": 2, "synthetic": 24}
    assert report["skipped"] == {"unreadable image": 1}
    assert "1.png" in report["messages"][0]
    strict = make(tmp_path / "strict", "--source", name, "--strict")
    assert strict.returncode != 0
    assert "1.png" in strict.stderr
    assert not list((tmp_path / "strict").rglob("*.parquet"))


def refusal(monkeypatch, script: str, *options: object) -> str:
    """The one line with which a script stops. In this process, as a new one takes seconds to begin."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, options)])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    assert isinstance(stopped.value.code, str) and "\n" not in stopped.value.code
    return stopped.value.code


def test_a_folder_of_something_else_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("mine")
    assert "has another's README.md" in refusal(monkeypatch, "make_dataset.py", "--output_dir", tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("script", ["make_dataset.py", "measure_loading.py", "contact_sheet.py", "build_files.py"])
def test_unknown_options_are_named(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--output_dir", "x", "--dataset", "x", "--num_image5", "3"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "unrecognized arguments: " in said and "--num_image5 3" in said


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--source", "camvid"], "camvid=FOLDER"),
        (["--source", "nonsense=/tmp"], "nonsense"),
        (["--source", "synthetic", "synthetic"], "given twice: synthetic synthetic"),
        (["--source", "camvid=/tmp", "camvid=/tmp/"], "given twice: camvid=/tmp camvid=/tmp/"),
        (["--num_images", "0"], "image that can be used"),
        (["--source", "camvid=/nowhere"], "/nowhere"),
        (["--num_workers", "0"], "--num_workers must be at least 1, got 0"),
        (["--shard_size", "-1"], "--shard_size must be at least 1, got -1"),
        (["--split", "../train"], "--split must be words with dots between, like train or val.night, got '../train'"),
        (["--split", "a..b"], "got 'a..b'"),
    ],
)
def test_bad_options_are_named(tmp_path, monkeypatch, options, named):
    assert named in refusal(monkeypatch, "make_dataset.py", "--output_dir", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("script", "options", "named"),
    [
        ("measure_loading.py", ["--batch_size", "0"], "--batch_size must be at least 1, got 0"),
        ("measure_loading.py", ["--num_images", "0"], "--num_images must be at least 1, got 0"),
        ("measure_loading.py", ["--num_workers", "-1"], "--num_workers must be at least 0, got -1"),
        ("measure_loading.py", ["--processor", "no/folder"], "--processor must be the folder"),
        (
            "measure_loading.py",
            ["--dataset", "no/folder"],
            "must be synthetic or a folder made by make_dataset.py, got",
        ),
        ("contact_sheet.py", ["--num_images", "0"], "--num_images must be at least 1, got 0"),
        ("contact_sheet.py", ["--columns", "0"], "--columns must be at least 1, got 0"),
        ("contact_sheet.py", ["--questions_per_image", "-1"], "--questions_per_image must be at least 0, got -1"),
        ("contact_sheet.py", ["--output", ROOT], "--output must be a PNG file"),
        ("contact_sheet.py", ["--output", ROOT / "LICENSE" / "x.png", "--num_images", "1"], "x.png cannot be written"),
    ],
)
def test_bad_options_of_the_other_scripts_are_named(monkeypatch, script, options, named):
    needed = ["--dataset", "synthetic"] if script.startswith("measure") and "--dataset" not in options else []
    assert named in refusal(monkeypatch, script, *needed, *options)


def test_an_empty_folder_is_no_dataset(monkeypatch, tmp_path):
    said = refusal(monkeypatch, "measure_loading.py", "--dataset", tmp_path, "--processor", ROOT)
    assert said.startswith(f"--dataset {tmp_path} cannot be loaded")


def test_an_output_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    said = refusal(monkeypatch, "make_dataset.py", "--output_dir", tmp_path / "file", "--num_images", 1)
    assert f"{tmp_path / 'file'} cannot be written" in said and "goes on" not in said


@pytest.mark.parametrize("content", ["", "{", "[1]", "3"])
def test_broken_files_of_a_run_are_named(monkeypatch, synthetic, tmp_path, content):
    folder = shutil.copytree(synthetic, tmp_path / "set")
    options = ["--output_dir", folder, "--num_images", 24, "--shard_size", 8]
    report = report_path(folder / "data" / "train-00001.parquet")
    report.write_text(content)
    said = refusal(monkeypatch, "make_dataset.py", *options)
    assert f"{report} is broken" in said and f"delete {folder / 'data' / 'train-00001.parquet'}" in said
    (folder / ".parts" / "plan.json").write_text(content)
    said = refusal(monkeypatch, "make_dataset.py", *options)
    assert "plan.json is broken" in said and f"delete {folder} to make it anew" in said


@pytest.mark.parametrize("changed", ["annotation", "image", "list"])
def test_a_source_that_has_changed_is_noticed(monkeypatch, tmp_path, changed):
    source = coco(tmp_path / "mine")
    name = f"{source / 'map.json'}={source}"
    options = ["--output_dir", tmp_path / "set", "--source", name]
    assert make(tmp_path / "set", "--source", name).returncode == 0
    annotations = json.loads((source / "train.json").read_text())
    if changed == "image":
        Image.new("RGB", (80, 60)).save(source / "train" / "2.png")
    elif changed == "annotation":
        annotations["annotations"][1]["bbox"][0] += 1
    else:
        annotations["images"].pop()
    (source / "train.json").write_text(json.dumps(annotations))
    said = refusal(monkeypatch, "make_dataset.py", *options, "--num_images", 24, "--shard_size", 8)
    assert f"images of {name}: " in said and "choose another --output_dir, or delete" in said


def test_splits_have_synthetic_scenes_of_their_own(monkeypatch, tmp_path):
    code = runpy.run_path(str(ROOT / "scripts" / "make_dataset.py"))
    seeds = {}
    for split in ("train", "val", "test", "val.night"):
        arguments = code["Arguments"](tmp_path, num_images=5, first_seed=3, split=split)
        [seeds[split]] = code["read_sources"](arguments, code["Problems"]()).values()
    assert seeds["train"] == [3, 4, 5, 6, 7]
    assert len({seed for split in seeds.values() for seed in split}) == 20
    assert render(seeds["val"][0])[1].image_id == str(seeds["val"][0])


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    shard = Shard(tmp_path / "data" / "train-00000.parquet", (1, 2), "seed")
    shard.path.parent.mkdir()

    def full(*_, **__):
        shard.path.with_suffix(".tmp").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("traffic_vlm.data.dataset.Dataset.to_parquet", full)
    with pytest.raises(OSError, match="No space left"):
        write_shard(shard)
    assert list(shard.path.parent.iterdir()) == []
    monkeypatch.undo()
    report = write_shard(shard)
    assert report.images == 2
    assert ShardReport.from_json(report_path(shard.path).read_text()) == report


def test_an_unreadable_image_is_an_error_if_strict(tmp_path):
    (tmp_path / "x.jpg").write_text("no image")
    record = Record(tmp_path / "x.jpg", Scene(10, 10))
    shard = Shard(tmp_path / "data" / "train-00000.parquet", (record,), "seed", strict=True)
    with pytest.raises(DataError, match=r"x\.jpg"):
        write_shard(shard)


# Batches


def colored(left: str, right: str) -> tuple[Image.Image, Scene]:
    """A red and a blue box, called cars."""
    shades = {"red": (220, 30, 30), "blue": (30, 30, 220)}
    image = Image.new("RGB", (224, 224), (120, 120, 120))
    image.paste(shades[left], (20, 90, 80, 140))
    image.paste(shades[right], (150, 90, 210, 140))
    boxes = ((20.0, 90.0, 80.0, 140.0), (150.0, 90.0, 210.0, 140.0))
    cars = [SceneObject("car", box, attributes={"color": name}) for box, name in zip(boxes, (left, right))]
    return image, Scene(224, 224, tuple(cars), exhaustive=frozenset({"car"}), attributed={"car": frozenset({"color"})})


def test_augmented_boxes_still_hold_their_colors():
    """Whatever is mirrored, cut and relit: the pixels in a box are of the colour that the scene says."""
    rng, seen = random.Random(0), set()
    for _ in range(60):
        image, scene = augment(*colored("red", "blue"), rng)
        assert image.size == (scene.width, scene.height)
        pixels = np.asarray(image).astype(int)
        for item in scene.objects:
            left, top, right, bottom = (round(value) for value in item.box)
            if item.visible < 0.5 or right - left < 12 or not item.attributes:
                continue
            red, _, blue = pixels[top + 4 : bottom - 4, left + 4 : right - 4].mean((0, 1))
            assert (red > blue) == (item.attributes["color"] == "red")
            seen.add((item.attributes["color"], (left + right) / 2 < scene.width / 2))
    assert len(seen) == 4  # both colours on both sides


SHADES = {
    "white": (235, 235, 235),
    "silver": (190, 192, 195),
    "gray": (125, 125, 125),
    "black": (28, 28, 30),
    "red": (200, 30, 30),
    "orange": (235, 125, 30),
    "yellow": (235, 205, 40),
    "brown": (110, 70, 40),
    "green": (40, 130, 60),
    "blue": (40, 70, 190),
}


@pytest.mark.parametrize(("name", "shade"), SHADES.items())
def test_colors_keep_their_names_in_another_light(name, shade):
    image, rng = Image.new("RGB", (16, 16), shade), random.Random(1)
    hue, saturation, _ = colorsys.rgb_to_hsv(*np.array(shade) / 255)
    for _ in range(100):
        seen = np.asarray(change_light(image, rng)).astype(float).mean((0, 1))
        assert min(SHADES, key=lambda other: ((np.array(SHADES[other]) - seen) ** 2).sum()) == name
        assert np.abs(seen - shade).max() < 0.1 * 255
        if saturation > 0.5:
            turn = abs(colorsys.rgb_to_hsv(*seen / 255)[0] - hue)
            assert min(turn, 1 - turn) < 10 / 360


def test_nothing_is_known_of_what_darkness_hides():
    image, scene = colored("red", "blue")
    scene, rng, dark = replace(scene, facts={"weather": "clear", "time of day": "day"}), random.Random(0), 0
    for _ in range(100):
        seen, known = augment(image, scene, rng, cropped=0.0)
        assert [item.box for item in known.objects] in (
            [item.box for item in each.objects] for each in (scene, scene.flipped())
        )
        if known.facts:
            assert np.asarray(seen).mean() > 0.8 * np.asarray(image).mean()
            assert known.facts == scene.facts and all(item.attributes for item in known.objects)
        else:
            assert np.asarray(seen).mean() < 0.8 * np.asarray(image).mean()
            assert not known.attributed and not any(item.attributes for item in known.objects)
            dark += 1
    assert 2 < dark < 25


def test_batches_are_packed_and_labelled(processor, synthetic):
    rows = [row for _, row in zip(range(3), SyntheticStream(first_seed=7))]
    for training in (True, False):
        collate = TrafficCollator(processor, questions_per_image=6, training=training)
        batch = collate(rows if training else list(load_dataset(str(synthetic), split="train").select(range(3))))
        assert batch["pixel_values"].shape == (3, 3, 224, 224)
        assert (batch["question_ends"] >= 0).sum(-1).max() <= 6
        assert ((batch["labels"] != -100).sum(-1) > 0).all()
        assert batch["labels"].shape == batch["segment_ids"].shape == batch["input_ids"].shape
    again = TrafficCollator(processor, questions_per_image=6)(rows)
    other = TrafficCollator(processor, questions_per_image=6, seed=1)(rows)
    assert torch.equal(again["input_ids"], TrafficCollator(processor, questions_per_image=6)(rows)["input_ids"])
    assert not torch.equal(again["pixel_values"], other["pixel_values"])


def test_trainer_takes_the_stream(processor, tmp_path):
    options = {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": "none", "save_strategy": "no"}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, remove_unused_columns=False, logging_steps=1, **options)
    collate = TrafficCollator(processor, questions_per_image=4)
    trainer = Trainer(tiny_model(), arguments, collate, SyntheticStream())
    assert trainer.train().metrics["train_loss"] > 0


def test_questions_of_people_are_never_mirrored(processor):
    image = Image.new("RGB", (40, 40), (200, 0, 0))
    image.paste((0, 0, 200), (20, 0, 40, 40))
    row = {"image": image, "questions": ["Is there a car on the left?"], "answers": ["yes"], "scene": None}
    for seed in range(8):
        [pixels] = TrafficCollator(processor, seed=seed)([row])["pixel_values"]
        assert pixels[0, :, :100].mean() > pixels[0, :, 124:].mean()


def test_a_batch_without_questions_says_so(processor):
    row = {"image": Image.new("RGB", (40, 40)), "scene": Scene(40, 40).to_json()}
    with pytest.raises(ValueError, match="any of the 1 images"):
        TrafficCollator(processor)([row])


def unbalanced(count: int) -> list[dict]:
    """Rows of which the balance soon forbids all: the same answer is always the true one."""
    scene = Scene(40, 40, (SceneObject("car", (0.0, 0.0, 40.0, 40.0)),)).to_json()
    return [{"image": Image.new("RGB", (40, 40)), "scene": scene} for _ in range(count)]


@pytest.mark.parametrize("stored", [False, True])
def test_a_batch_of_which_the_balance_forbids_all_is_asked_nevertheless(processor, stored):
    collate = TrafficCollator(processor, questions_per_image=4)
    for row in unbalanced(30):
        row |= {"questions": ["Is it day?"], "answers": ["yes"]} if stored else {}
        assert ((collate([row])["labels"] != -100).sum(-1) > 0).all()


@pytest.mark.parametrize("rewordings", [0, 1])
def test_yes_and_no_are_balanced_within_each_source(processor, rewordings):
    """One in which cars are nearly always there and one in which they hardly are: neither is to tell the answer."""
    car = SceneObject("car", (10.0, 10.0, 30.0, 30.0))
    rng, answers = random.Random(0), {"city": Counter(), "path": Counter()}
    kinds = ("presence", "weather")  # where there are cars, more can be asked
    collate = SupervisedCollator(processor, questions_per_image=4, kinds=kinds, rewordings=rewordings)
    for _ in range(400):
        source = rng.choice(["city", "path"])
        objects = (car,) if rng.random() < {"city": 0.9, "path": 0.1}[source] else ()
        facts = {"weather": "clear"} if objects else {}
        scene = Scene(40, 40, objects, facts, exhaustive=frozenset({"car"}), source=source)
        asked = collate._asked_anew({"image": Image.new("RGB", (40, 40)), "scene": scene.to_json()}, rng)
        answers[source].update(question.answer for question in asked.questions if question.label == "car")
    for counts in answers.values():
        assert counts.total() > 30
        assert abs(counts["yes"] - counts["no"]) <= Balancer().tolerance


def test_training_sees_the_pixels_that_use_sees(processor):
    deep = Image.fromarray(np.full((40, 40), 20000, np.uint16))  # 16 bits, a third of full light
    row = {"image": deep, "scene": None, "questions": ["Is there a car?"], "answers": ["no"]}
    seen = TrafficCollator(processor, training=False)([row])["pixel_values"]
    assert torch.equal(seen, processor(images=deep, return_tensors="pt")["pixel_values"])


def test_a_window_in_which_nothing_is_known_is_not_taken(processor):
    """One sign in a corner, of which most windows show a part only."""
    sign = SceneObject("stop sign", (0.0, 0.0, 12.0, 12.0))
    row = {"image": Image.new("RGB", (100, 100)), "scene": Scene(100, 100, (sign,)).to_json()}
    for seed in range(20):
        balancers = defaultdict(lambda: Balancer(tolerance=99))
        batch = TrafficCollator(processor, seed=seed, balancers=balancers, rng=random.Random(seed))([row, row])
        assert len(batch["pixel_values"]) == 2


def test_rows_of_a_stream_are_asked_the_same_each_time_without_training(processor):
    rows = list(SyntheticStream(0, 3))
    collate = TrafficCollator(processor, questions_per_image=4, training=False)
    first, again, alone = collate(rows), collate(rows[::-1]), collate(rows[1:2])
    assert torch.equal(first["input_ids"], collate(rows)["input_ids"])
    assert torch.equal(first["pixel_values"].flip(0), again["pixel_values"])
    length = alone["input_ids"].shape[1]
    assert torch.equal(first["input_ids"][1, -length:], alone["input_ids"][0])
    assert (first["question_ends"] >= 0).sum() == 12


def leads_of(questions, key) -> dict:
    """How many more yes than no there are for each key."""
    leads: Counter = Counter()
    for question in questions:
        leads[key(question)] += {"yes": 1, "no": -1}.get(question.answer, 0)
    return leads


def test_settled_questions_have_as_many_yes_as_no_for_each_kind_and_class():
    rng, balancer = random.Random(0), Balancer()
    scenes = [Scene.from_json(row["scene"]) for row in SyntheticStream(0, 60)]
    asked = [ask(scene, rng, 16, balancer) for scene in scenes]
    settled = rebalance(asked)
    before, after = ([question for questions in rows for question in questions] for rows in (asked, settled))
    assert any(leads_of(before, lambda question: (question.kind, question.label)).values())
    assert not any(leads_of(after, lambda question: (question.kind, question.label)).values())
    assert all(set(kept) <= set(questions) for kept, questions in zip(settled, asked))
    # No more is taken than is needed, none but yes and no, and none of a fact that does not lead.
    by_class = leads_of(before, lambda question: (question.kind, question.label))
    assert len(before) - len(after) == sum(map(abs, by_class.values()))
    leads, settled_leads = (leads_of(questions, lambda question: question.fact) for questions in (before, after))
    assert all(0 <= settled_leads[fact] / (leads[fact] or 1) <= 1 for fact in leads)


def test_several_files_together_have_as_many_yes_as_no_for_each_kind_and_class(tmp_path):
    """But for 1 % of the questions: the only question of an image is not taken away."""
    (tmp_path / "data").mkdir()
    total = ShardReport()
    for number in range(3):
        seeds = tuple(range(40 * number, 40 * number + 40))
        total.merge(write_shard(Shard(tmp_path / "data" / f"train-{number:05d}.parquet", seeds, f"0/{number}")))
    leads = {what: total.answers[f"{what}/yes"] - total.answers[f"{what}/no"] for what in total.yes_rates()}
    assert total.images == 120 and sum(map(abs, leads.values())) <= 0.01 * total.questions.total()
    assert {what.split("/")[0] for what in leads} > {"presence", "place", "count", "color", "relation"}


def test_no_image_is_lost_to_the_balance():
    questions = [[Question("Is there a car?", "yes", "presence", "car", "presence/car")]] * 3
    assert rebalance(questions) == questions
    assert [len(left) for left in rebalance([questions[0] * 2, *questions])] == [1, 1, 1, 1]


def cpu_seconds(work) -> float:
    """Of a call, the least of three: other processes take time, but no processor time of this one."""
    times = []
    for _ in range(3):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer slows Python but not Pillow")
def test_drawing_and_collating_an_image_cost_no_more_than_twelve_resizes(processor):
    """From 1024 × 1024 pixels; when this was written they cost 3.3."""
    rows, picture = list(SyntheticStream(0, 16)), Image.effect_noise((1024, 1024), 50).convert("RGB")
    resize = cpu_seconds(lambda: [picture.resize((224, 224), Image.Resampling.BICUBIC) for _ in range(16)])
    draw = cpu_seconds(lambda: list(SyntheticStream(0, 16)))
    collate = cpu_seconds(lambda: TrafficCollator(processor)(rows))
    assert draw + collate < 12 * resize


def test_workers_of_a_stream_take_turns():
    loader = torch.utils.data.DataLoader(
        SyntheticStream(3, 5), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    assert sorted(int(row["image_id"]) for row in loader) == [3, 4, 5, 6, 7]


def test_loading_is_measured_without_the_batches_that_the_workers_prepared():
    script = runpy.run_path(str(ROOT / "scripts/measure_loading.py"))

    def loader():
        for index in range(10):
            time.sleep(0.3 if index < 4 else 0)
            yield {"pixel_values": torch.zeros(2, 3, 4, 4), "question_ends": torch.zeros(2, 3)}

    images, questions, seconds = script["measure"](loader(), skip=4, num_images=1000)
    assert (images, questions) == (12, 36) and seconds < 0.3
    assert script["measure"](loader(), skip=1, num_images=4)[0] == 4

"""Datasets: shards that are whole or absent, runs that go on where they were, batches that keep the truth."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from datasets import load_dataset
from PIL import Image
from transformers import Trainer, TrainingArguments

from tiny import ROOT, tiny_model
from traffic_vlm.data.collator import TrafficCollator, augment, change_light
from traffic_vlm.data.dataset import Shard, ShardReport, SyntheticStream, report_path, write_shard
from traffic_vlm.data.readers import DataError, Record
from traffic_vlm.data.scene import Scene, SceneObject


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


def test_the_same_options_give_the_same_files_however_often_they_stop(synthetic, tmp_path):
    """Killed at random moments, with all its workers, and started again."""
    folder, rng = tmp_path / "set", random.Random(0)
    for _ in range(4):
        process = subprocess.Popen(
            command(folder), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(rng.uniform(2.0, 6.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for path in folder.glob("data/*.parquet"):  # what is there is whole
            assert len(load_dataset("parquet", data_files=str(path), split="train")) == 8
    assert make(folder).returncode == 0
    assert not list(folder.rglob("*.tmp"))
    assert load_dataset(str(folder), split="train").to_list() == load_dataset(str(synthetic), split="train").to_list()
    reports = [json.loads((path / "report.json").read_text()) for path in (folder, synthetic)]
    assert reports[0] == reports[1]


def test_a_folder_with_another_dataset_is_refused(synthetic):
    run = make(synthetic, "--first_seed", "5")
    assert run.returncode != 0
    assert "first_seed: 0 before, 5 now" in run.stderr


def test_sources_are_mixed_and_problems_are_counted(tmp_path):
    source = coco(tmp_path / "mine", broken=True)
    name = f"{source / 'map.json'}={source}"
    run = make(tmp_path / "out", "--source", name, "synthetic")
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["sources"] == {"mine": 2, "synthetic": 24}
    assert report["skipped"] == {"unreadable image": 1}
    assert "1.png" in report["messages"][0]
    strict = make(tmp_path / "strict", "--source", name, "--strict")
    assert strict.returncode != 0
    assert "1.png" in strict.stderr
    assert not list((tmp_path / "strict").rglob("*.parquet"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--source", "camvid"], "camvid=FOLDER"),
        (["--source", "nonsense=/tmp"], "nonsense"),
        (["--num_images", "0"], "image that can be used"),
        (["--source", "camvid=/nowhere"], "/nowhere"),
        (["--num_workers", "0"], "--num_workers must be at least 1, got 0"),
        (["--shard_size", "-1"], "--shard_size must be at least 1, got -1"),
    ],
)
def test_bad_options_are_named(tmp_path, options, named):
    run = make(tmp_path / "out", *options)
    assert run.returncode != 0
    assert named in run.stderr
    assert "Traceback" not in run.stderr


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
            if item.visible < 0.5 or right - left < 12:
                continue
            red, _, blue = pixels[top + 4 : bottom - 4, left + 4 : right - 4].mean((0, 1))
            assert (red > blue) == (item.attributes["color"] == "red")
            seen.add((item.attributes["color"], (left + right) / 2 < scene.width / 2))
    assert len(seen) == 4  # both colours on both sides


def test_light_changes_keep_the_order_of_the_channels():
    image, rng = Image.new("RGB", (8, 8), (200, 150, 40)), random.Random(1)
    for _ in range(30):
        red, green, blue = np.asarray(change_light(image, rng)).astype(float).mean((0, 1))
        assert red > green > blue


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


def test_workers_of_a_stream_take_turns():
    loader = torch.utils.data.DataLoader(
        SyntheticStream(3, 5), batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    assert sorted(int(row["image_id"]) for row in loader) == [3, 4, 5, 6, 7]

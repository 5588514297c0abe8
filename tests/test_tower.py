"""Training of the vision tower: targets, images, head, loss, evaluation, checkpoints and the script."""

import io
import json
import re
import shutil
from functools import partial

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import TrainingArguments

from tiny import ROOT, TINY_TOWER
from traffic_vlm.configuration_traffic_vlm import TrafficVLMVisionConfig
from traffic_vlm.data.dataset import DatasetOptions, Mixture, make_dataset
from traffic_vlm.data.formats import Problems
from traffic_vlm.data.ground_truth import GroundTruth
from traffic_vlm.data.presence import CATEGORIES, HEAD_QUESTIONS, INDEX, REGIONS, region_targets
from traffic_vlm.data.scene import Scene, SceneObject
from traffic_vlm.data.scene_labels import SCENE_VALUES, read_scene_labels, with_scene_labels
from traffic_vlm.data.synthetic import render
from traffic_vlm.evaluation.metrics import auc, balanced_accuracy
from traffic_vlm.files import DataError
from traffic_vlm.training.auxiliary.head import (
    PATCH_WEIGHT,
    PresenceLoss,
    QueryHead,
    load_training_head,
    save_training_head,
)
from traffic_vlm.training.checkpoints import last_checkpoint
from traffic_vlm.training.start import load_tower
from traffic_vlm.training.tower import TowerImages, TowerModel, TowerTrainer, answer_presence, load_images, pixels_of
from traffic_vlm.vision_traffic_vlm import TrafficVLMVisionModel


LIGHT = TINY_TOWER | {"neck": "depthwise", "neck_width": 16, "intermediate_size": 32, "num_hidden_layers": 1}
LINE = dict.fromkeys(SCENE_VALUES) | {"image": "a.jpg", "present": [], "unsure": []}


def region_of(scene, category):
    return region_targets(GroundTruth(scene))[INDEX[category]].tolist()


def boxes(category, *given, labels=(), visible=1.0, **attributes):
    """A scene with objects of one category; all objects of the categories `labels` are labeled."""
    objects = tuple(SceneObject(category, box, visible=visible, attributes=attributes) for box in given)
    return Scene(300, 300, objects, exhaustive=frozenset(labels), attributed={category: frozenset(attributes)})


cars = partial(boxes, "car", labels=("car", "bus"))


def mask(columns, filled=1.0, category="sky"):
    """A scene with a mask that fills a fraction of some of 14 columns of the image."""
    coverage = [[filled if column in columns else 0.0 for column in range(14)] for _ in range(14)]
    area = 1400 * len(columns) * filled  # in pixels
    item = SceneObject(category, (0, 0, 140, 140), area, 1.0, {}, tuple(map(tuple, coverage)), False)
    return Scene(140, 140, (item,), exhaustive=frozenset({"sky", "person", "pedestrian", "rider"}))


def labels_of(tmp_path, **fields):
    path = tmp_path / "source.jsonl"
    path.write_text(json.dumps(LINE | fields))
    return next(read_scene_labels(path, Problems(strict=True)))[1]


# Targets


CAR, RED_LIGHT = (10, 100, 60, 160), boxes("traffic light", (10, 10, 40, 90), state="red")
LIMIT = boxes("speed limit sign", (10, 10, 90, 90), labels=("speed limit sign",), value="50")


@pytest.mark.parametrize(
    ("scene", "category", "expected"),
    [
        (cars(CAR), "car", [1, 1, 0, 0]),
        (cars((60, 100, 130, 160)), "car", [1, -1, -1, 0]),  # in two thirds
        (cars(CAR), "bus", [0] * 4),
        (cars(CAR), "vehicle", [1, 1, -1, -1]),  # there may be others
        (cars(), "person", [-1] * 4),
        (cars((10, 100, 15, 160)), "car", [-1, -1, 0, 0]),  # tiny: 5 of 300 pixels are 3.7 of 224
        (cars(CAR, visible=0.2), "car", [-1, -1, 0, 0]),  # hidden
        (cars(CAR, (210, 100, 240, 160)).cropped(150, 0, 300, 300), "car", [1, 0, 1, 0]),
        (cars(CAR).flipped(), "car", [1, 0, 0, 1]),
        (mask({0}).flipped(), "sky", [1, 0, 0, 1]),
        (mask({13}, 0.01), "sky", [-1, 0, 0, -1]),  # too small an area
        (mask({0}, category="pedestrian"), "person", [1, 1, 0, 0]),  # its superclass
        (mask({0}, category="pedestrian"), "rider", [0] * 4),
        (RED_LIGHT, "red light", [1, 1, 0, 0]),
        (RED_LIGHT, "yellow light", [-1] * 4),  # some sources do not label yellow lights
        (RED_LIGHT.cropped(0, 60, 300, 300), "red light", [-1] * 4),  # the color of a cut light
        (LIMIT, "speed limit 30", [0] * 4),
        (LIMIT.flipped(), "speed limit 50", [-1] * 4),
    ],
)
def test_targets_follow_boxes_masks_window_and_mirroring(scene, category, expected):
    assert region_of(scene, category) == expected


def test_scene_labels_hold_for_the_whole_image_and_some_of_them_for_crops(tmp_path):
    labels = labels_of(tmp_path, weather="rain", road="none", present=["bicycle", "car"], unsure=["truck"])
    scene = with_scene_labels(cars(), labels)
    crop, wide = scene.cropped(0, 0, 180, 180), scene.cropped(0, 0, 270, 270)
    assert region_of(scene, "car") == [0, 0, 0, 0]  # boxes take precedence
    assert region_of(scene, "bicycle") == [1, -1, -1, -1] and region_of(crop, "bicycle") == [-1] * 4
    assert region_of(wide, "animal")[0] == 0
    assert region_of(crop, "animal")[0] == -1  # or "cropped" would mean "no"
    assert region_of(scene, "truck")[0] == -1 and region_of(scene, "vehicle")[0] == 1
    assert region_of(crop, "weather: rain")[0] == 1 and region_of(scene, "weather: fog")[0] == 0
    assert region_of(scene, "road: wet")[0] == -1 and region_of(scene, "time_of_day: day")[0] == -1
    tiny = Scene(256, 256, (SceneObject("traffic light", (100, 20, 103, 24)),))
    tiny = with_scene_labels(tiny, labels_of(tmp_path))
    assert region_of(tiny, "traffic light")[0] == -1  # not seen, but there may be one
    roadside = with_scene_labels(cars(), labels_of(tmp_path, view="roadside"))  # scenes cannot always tell it apart
    assert [region_of(roadside, f"view: {name}")[0] for name in ("driver", "camera", "roadside")] == [0, 0, -1]


@pytest.mark.parametrize("change", [lambda scene: scene, Scene.flipped, lambda scene: scene.cropped(20, 10, 200, 224)])
def test_targets_and_answers_of_the_decoder_are_one_truth(change):
    """Only of lights does a target know more: a source that gives their states leaves out no red or green one."""
    known = 0
    for seed in range(40):
        scene = change(render(seed)[1])
        truth = GroundTruth(scene)
        region = region_targets(truth)
        for question_id, place in HEAD_QUESTIONS.items():
            answer = truth.find(tuple(question_id.split("/")))
            if answer is not None or not question_id.startswith("light_state"):
                assert region[place] == (-1 if answer is None else answer.answer == "yes"), (seed, question_id)
                known += answer is not None
    assert known > 2000


def test_an_invalid_scene_label_is_reported_with_its_line(tmp_path):
    path = tmp_path / "source.jsonl"
    for fields, named in (
        ({"weather": "none"}, "none"),
        ({"present": ["ufo"]}, "ufo"),
        ({"present": None}, "TypeError"),
    ):
        path.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | fields) + "\n")
        problems = Problems()
        assert len(list(read_scene_labels(path, problems))) == 1
        assert f"{path}:2" in problems.messages[0] and named in problems.messages[0]
    with pytest.raises(DataError, match="TypeError"):
        list(read_scene_labels(path, Problems(strict=True)))


# Images


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Datasets of 30 images per split: every second one has a car, a bright square on the left or right."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        (root / "highway" / split).mkdir(parents=True)
        images, annotations = [], []
        for index in range(30):
            picture = rng.integers(0, 80, (96, 96, 3), np.uint8)
            if index % 2:
                left = 4 if index % 4 == 1 else 66
                picture[40:66, left : left + 26] = 250
                box = [left, 40, 26, 26]
                annotations.append({"id": index, "image_id": index, "category_id": 1, "bbox": box, "area": 676})
            Image.fromarray(picture).save(root / "highway" / split / f"{index}.png")
            images.append({"id": index, "file_name": f"{index}.png", "width": 96, "height": 96})
        categories = [{"id": 1, "name": "car"}]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / "highway" / f"{split}.json").write_text(json.dumps(content))
        make_dataset(DatasetOptions(root / split, [f"highway={root / 'highway'}"], split=split, num_workers=1))
    return root


@pytest.fixture(scope="module")
def rows(data):
    return load_images(data / "train")


def test_rows_hold_the_images_and_unusable_ones_are_named(rows, data, tmp_path):
    table = pq.read_table(data / "train" / "data" / "train-00000.parquet")
    stored = table.to_pylist()
    assert len(rows) == 30 and rows.unique("source") == ["highway"]
    expected = np.asarray(Image.open(io.BytesIO(stored[7]["image"]["bytes"])))
    np.testing.assert_allclose(cv2.resize(pixels_of(rows[7]), (96, 96)), expected, atol=40)
    stored[3]["image"]["bytes"] = stored[3]["image"]["bytes"][:300]
    (tmp_path / "data").mkdir()
    pq.write_table(pa.Table.from_pylist(stored, table.schema), tmp_path / "data" / "train-00000.parquet")
    with pytest.raises(DataError, match=rf"image {re.escape(stored[3]['image_id'])} cannot be read"):
        load_images(tmp_path)


def test_images_without_scenes_are_refused(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    line = {"file_name": "a.png", "questions": ["Is there a car?"], "answers": ["no"]}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(line))
    with pytest.raises(DataError, match="has no scenes"):
        load_images(tmp_path)


def test_augmentation_moves_objects_and_targets_together_and_depends_only_on_the_index(rows):
    images, found = TowerImages(Mixture([rows.select([1])], None, 60), ["a", "highway"]), 0
    for item in (images[index] for index in range(60)):
        car = item["patch"][INDEX["car"]]
        brightness = item["pixels"].float().reshape(16, 16, 16, 16, 3).mean((1, 3, 4))
        if (car == 1).any() and (car == 0).any():
            found += 1
            assert brightness[car == 1].max() > brightness[car == 0].max()
    assert found > 30
    again = TowerImages(Mixture([rows.select([1])], None, 90), ["a", "highway"])[59]
    assert all(torch.equal(again[name], item[name]) for name in item)
    assert item["source"] == 1 and not torch.equal(images[0]["pixels"], item["pixels"])


# Head and loss


def test_a_third_depends_only_on_its_own_columns():
    torch.manual_seed(0)
    head, tokens = QueryHead(8), torch.randn(1, 36, 8)
    plain = head(tokens, (6, 6))[0]
    changed = tokens.clone().reshape(1, 6, 6, 8)
    changed[:, :, 5] += 1.0
    other = head(changed.flatten(1, 2), (6, 6))[0]
    moved = (plain - other).abs().amax((0, 1)) > 1e-5
    assert moved.tolist() == [True, False, False, True]


def test_the_loss_balances_yes_and_no_within_a_source_and_ignores_unknown():
    patch = torch.tensor([1, 0, -1, -1]).reshape(1, 1, 2, 2).expand(12, 1, 2, 2)
    region = torch.zeros(12, len(CATEGORIES), 4, dtype=torch.int8)
    region[0], region[8:] = 1, 1  # yes for 1 of 8 images in the first source, for 3 of 4 in the second
    region[11] = 0
    source = torch.tensor([0] * 8 + [1] * 4)
    logits, patches = torch.zeros(region.shape, requires_grad=True), torch.zeros(12, 4, 1, requires_grad=True)
    loss = PresenceLoss(2)
    loss((logits, patches), region, patch, source).backward()
    counts = loss.counts[..., 0, 0]
    assert (counts[:, 1] / counts.sum(1)).tolist() == pytest.approx([1 / 8, 3 / 4, 4 / 12])
    ones = torch.ones(2)
    within = [(4 * ones / torch.tensor([7.0, 1.0])), (2 * ones / torch.tensor([1.0, 3.0]))]  # no, yes
    everywhere = 0.25 * 6 * ones / torch.tensor([8.0, 4.0])
    expected = [
        (0.5 - answer) * float(within[index][answer] + everywhere[answer]) / (12 * len(CATEGORIES) * 4)
        for index, answer in zip(source.tolist(), region[:, 0, 0].tolist())
    ]
    assert logits.grad[:, 0, 0].tolist() == pytest.approx(expected)
    each = PATCH_WEIGHT * 0.5 / 24
    assert patches.grad[0, :, 0].tolist() == pytest.approx([-4 * each, each, 0, 0])


def test_without_a_yes_in_a_source_its_no_has_no_weight():
    logits = torch.zeros(2, len(CATEGORIES), 4, requires_grad=True)
    unknown = torch.full((2, len(CATEGORIES), 1, 1), -1)
    source = torch.zeros(2, dtype=int)
    PresenceLoss(1)((logits, torch.zeros(2, 1, len(CATEGORIES))), torch.zeros_like(logits), unknown, source).backward()
    assert not logits.grad.any()


# Training


def tiny_tower():
    torch.manual_seed(0)
    return TrafficVLMVisionModel(TrafficVLMVisionConfig(**LIGHT)), QueryHead(24)


def train_tower(folder, rows, steps, **options):
    """A trainer that has trained, from the last checkpoint in a folder."""
    images = TowerImages(Mixture([rows], None, 8 * steps), ["highway"])
    defaults = {"learning_rate": 1e-2, "logging_steps": 1, "save_steps": steps // 2, "save_total_limit": 2}
    defaults |= {"max_steps": steps, "per_device_train_batch_size": 8, "report_to": "none", "use_cpu": True}
    arguments = TrainingArguments(str(folder), **(defaults | options))
    trainer = TowerTrainer(TowerModel(*tiny_tower(), 1), arguments, train_dataset=images, eval_dataset=rows)
    checkpoint = last_checkpoint(folder)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return trainer


def test_answers_about_presence_are_a_table_of_evaluation(data, monkeypatch):
    """The model finds the 8 of 15 cars that are on the left, and says no to all else."""

    def logits(pixels):
        found = torch.full((len(pixels), len(CATEGORIES), 4), -2.0)
        found[pixels[:, :, :128].amax((1, 2, 3)) > 200, INDEX["car"], 0] = 2.0
        return (found,)

    model = TowerModel(*tiny_tower(), 1)
    monkeypatch.setattr(model, "logits", logits)
    answers = answer_presence(model, load_images(data / "val"), batch_size=7)
    car = answers[answers["question_id"] == "car/whole"]
    assert len(car) == 30 and balanced_accuracy(car) == pytest.approx((8 / 15 + 1) / 2)
    assert auc(car) == pytest.approx((8 * 15 + 7 * 15 / 2) / 225)
    assert set(answers["region"]) == set(REGIONS) and (answers["truth"][answers["category"] == "bus"] == "no").all()


def test_a_tower_learns_its_averaged_weights_are_saved_and_a_resumed_run_has_the_same_result(rows, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    trainer = train_tower(whole, rows, 24)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 24 and np.mean(losses[-6:]) < 0.8 * np.mean(losses[:6])

    shutil.copytree(whole / "checkpoint-12", stopped / "checkpoint-12")
    resumed = train_tower(stopped, rows, 24, dataloader_num_workers=2)
    assert len(resumed.state.log_history) == len(trainer.state.log_history)
    torch.testing.assert_close(resumed.model.state_dict(), trainer.model.state_dict())
    torch.testing.assert_close(resumed.average.values, trainer.average.values)

    last = trainer.model.head.bias.detach().clone()
    trainer.evaluate()
    assert torch.equal(trainer.model.head.bias, last)
    saved = load_tower(str(whole / "tower")).state_dict(), load_training_head(whole / "tower").state_dict()
    trainer.average.swap()
    assert not torch.equal(trainer.model.head.bias, last)
    torch.testing.assert_close(saved, (trainer.model.tower.state_dict(), trainer.model.head.state_dict()))
    report = (whole / "report.md").read_text()
    assert report.startswith("| source | balanced accuracy |") and "\n| category | balanced accuracy |" in report
    assert "| highway | " in report


def test_the_script_trains_a_tower_with_its_head_and_resumes(data, tmp_path, run_script, capsys):
    tower, head = tiny_tower()
    tower.save_pretrained(tmp_path / "start")
    save_training_head(head, tmp_path / "start")
    datasets = ("--train_dataset", data / "train", "--eval_dataset", data / "val", "--start_from", tmp_path / "start")
    command = (*datasets, "--output_dir", tmp_path / "run", "--images", 8, "--batch_size", 4)
    run_script("train_tower.py", *command)
    trained = load_training_head(tmp_path / "run" / "tower").state_dict()
    changes = [(trained[name] - value).abs().max() for name, value in head.state_dict().items()]
    assert 0 < max(changes) < 0.01
    run_script("train_tower.py", *command)
    assert "resuming from step 2 of 2" in capsys.readouterr().out
    run_script("train_tower.py", *command, "--batch_size", 2, status=2)
    assert "something else (batch_size: 4 before, 2 now)" in capsys.readouterr().err


def test_training_can_start_from_the_shipped_tower_and_its_head():
    tower, head = load_tower(str(ROOT)), load_training_head(ROOT)
    with torch.inference_mode():
        regions, _ = head(tower.eval()(torch.zeros(1, 3, 256, 256)).last_hidden_state, (16, 16))
    assert regions.shape == (1, len(CATEGORIES), 4) and tower.dtype == torch.float32

"""Training of the vision tower: targets, images, head, loss, evaluation, resumed runs and the script."""

import json
import math
import re
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from runs import NO_EVAL, history, learn, own_folder
from tiny import ROOT, TINY_TOWER
from traffic_vlm.common.files import DataError
from traffic_vlm.configuration_traffic_vlm import TrafficVLMVisionConfig, token_grid
from traffic_vlm.data.augment import MAX_ENLARGED, random_window
from traffic_vlm.data.datasets import FEATURES, LISTS, SyntheticRows
from traffic_vlm.data.formats import Problems
from traffic_vlm.data.formats.scene_labels import SCENE_VALUES, read_scene_labels, with_scene_labels
from traffic_vlm.data.grammar import TYPES
from traffic_vlm.data.questions import Candidates
from traffic_vlm.data.scene import Scene, SceneObject
from traffic_vlm.data.synthetic import render
from traffic_vlm.data.truth import GroundTruth
from traffic_vlm.evaluation.metrics import auc, balanced_accuracy
from traffic_vlm.locating_traffic_vlm import find_objects
from traffic_vlm.training.auxiliary.centers import center_targets
from traffic_vlm.training.auxiliary.losses import LOSSES, ForwardPass, make_targets
from traffic_vlm.training.auxiliary.presence import (
    CATEGORIES,
    HEAD_QUESTIONS,
    INDEX,
    REGIONS,
    PresenceLoss,
    QueryHead,
    load_training_head,
    region_targets,
    region_weights,
    save_training_head,
    targets,
)
from traffic_vlm.training.auxiliary.tower import answer_presence, predict_presence
from traffic_vlm.training.collator import Prepared, TrafficCollator
from traffic_vlm.training.drawing import Drawing, draw_chances
from traffic_vlm.training.model import TowerModel, add_parts, load_tower
from traffic_vlm.training.options import TrainOptions
from traffic_vlm.training.rows import open_datasets, rows_for_tower
from traffic_vlm.vision_traffic_vlm import TrafficVLMVisionModel


LIGHT = TINY_TOWER | {"neck_width": 16, "num_hidden_layers": 1}
STORED, SIDE = 384, 256  # of the images in pixels: in files, and by default in training


# Targets


def scene_of(category, *boxes, labels=(), visible=1.0, size=300, **attributes):
    """A scene with objects of one category; all objects of the categories `labels` are labeled."""
    objects = tuple(SceneObject(category, box, visible=visible, attributes=attributes) for box in boxes)
    return Scene(size, size, objects, exhaustive=frozenset(labels), attributed={category: frozenset(attributes)})


CAR = scene_of("car", (0, 0, 130, 100), labels=("car", "bus"))
RED_LIGHT = scene_of("traffic light", (10, 10, 40, 90), state="red")
LIMIT = scene_of("speed limit sign", (10, 10, 90, 90), labels=("speed limit sign",), value="50")


def region_of(scene, category):
    return region_targets(GroundTruth(scene))[INDEX[category]].tolist()


def test_targets_and_answers_of_the_decoder_are_one_truth():
    """Only of lights does a target know more: a source that gives their states leaves out no red or green one."""
    known, changes = 0, (lambda scene: scene, Scene.flipped, lambda scene: scene.cropped(20, 10, 200, 224))
    for seed in range(60):
        truth = GroundTruth(changes[seed % 3](render(seed)[1]))
        region = region_targets(truth)
        for key, place in HEAD_QUESTIONS.items():
            answer = truth.find(key)
            if answer is not None or key[0] != "light_state":
                assert region[place] == (-1 if answer is None else answer.answer == "yes"), (seed, key)
                known += answer is not None
    assert known > 3000


@pytest.mark.parametrize(
    ("scene", "category", "expected"),
    [
        (CAR, "vehicle", [1, 1, -1, -1]),  # there may be others
        (RED_LIGHT, "red light", [1, 1, 0, 0]),
        (RED_LIGHT, "yellow light", [-1] * 4),  # some sources do not label yellow lights
        (RED_LIGHT.cropped(0, 60, 300, 300), "red light", [-1] * 4),  # the color of a cut light
        (LIMIT, "speed limit 30", [0] * 4),
        (LIMIT.flipped(), "speed limit 50", [-1] * 4),
    ],
)
def test_what_is_known_of_regions(scene, category, expected):
    assert region_of(scene, category) == expected


def test_counts_of_scene_labels_are_answers_for_the_whole_image(tmp_path):
    line = dict.fromkeys(SCENE_VALUES) | {"image": "a.jpg", "present": ["car", "van", "person"], "unsure": []}
    lines = [line | {"counts": {"car": 7, "van": 2}}, line | {"unsure": ["bus"], "counts": {"car": 1}}, line]
    lines.append(line | {"counts": {"car": 0}})
    (tmp_path / "source.jsonl").write_text("\n".join(map(json.dumps, lines)))
    problems, whole = Problems(), Scene(300, 300)
    counted, unsure, without = (
        with_scene_labels(whole, labels) for _, labels in read_scene_labels(tmp_path / "source.jsonl", problems)
    )
    assert problems.counts == {"bad scene label": 1} and "{'car': 0}" in problems.messages[0]

    def answers(scene):
        truth = GroundTruth(scene)
        keys = Candidates(truth, TYPES["count"]).find_keys()
        return {"/".join(key[1:]): found.answer for key in keys if (found := truth.find(key))}

    found = answers(counted)
    assert [found[f"{name}/what"] for name in ("car", "van", "bus", "vehicle")] == ["many", "2", "0", "many"]
    assert [found[f"van/over/{limit}"] for limit in (1, 2)] == ["yes", "no"] and "person/what" not in found
    assert answers(counted.flipped()) == found
    cropped = answers(counted.cropped(0, 0, 300, 299))
    assert cropped == answers(without) and not {"car/what", "van/what"} & cropped.keys()
    assert answers(unsure)["car/what"] == "1" and not {"bus/what", "vehicle/what"} & answers(unsure).keys()
    boxed = replace(counted, objects=(SceneObject("van", (9, 9, 99, 99)),), exhaustive=frozenset({"van"}))
    assert answers(boxed)["van/what"] == "1"  # boxes tell the number


def test_scene_labels_hold_for_the_whole_image_and_some_of_them_for_crops(tmp_path):
    problems = Problems()

    def labeled(scene, **fields):
        line = dict.fromkeys(SCENE_VALUES) | {"image": "a\u2028.jpg", "present": [], "unsure": []} | fields
        text = json.dumps(line, ensure_ascii=False)  # with a separator of lines that does not end a line of JSON
        (tmp_path / "source.jsonl").write_text(text, encoding="utf-8")
        [(_, labels)] = read_scene_labels(tmp_path / "source.jsonl", problems)
        return with_scene_labels(scene, labels)

    scene = labeled(CAR, weather="rain", road="none", view="roadside", present=["bicycle", "bus"], unsure=["truck"])
    crop, wide = scene.cropped(0, 0, 180, 180), scene.cropped(0, 0, 270, 270)
    for changed, category, expected in (
        (scene, "bus", [1, -1, -1, -1]),  # the boxes left it out
        (labeled(CAR), "bus", [0, 0, 0, 0]),
        (labeled(CAR, unsure=["bus"]), "bus", [-1] * 4),
        (scene, "bicycle", [1, -1, -1, -1]),
        (crop, "bicycle", [-1] * 4),
        (wide, "animal", [0, -1, -1, -1]),
        (crop, "animal", [-1] * 4),  # or "cropped" would mean "no"
        (scene, "truck", [-1] * 4),
        (scene, "vehicle", [1, 1, -1, -1]),
        (crop, "weather: rain", [1, -1, -1, -1]),
        (scene, "weather: fog", [0, -1, -1, -1]),
        (scene, "road: wet", [-1] * 4),
        (labeled(replace(CAR, exhaustive=frozenset({"pedestrian"})), present=["person"]), "pedestrian", [-1] * 4),
    ):
        assert region_of(changed, category) == expected, category
    for fields, named in (({"weather": "none"}, "none"), ({"present": ["ufo"]}, "ufo"), ({"present": None}, "TypeE")):
        with pytest.raises(ValueError, match="unpack"):  # the line is left out
            labeled(CAR, **fields)
        assert re.search(f"source.jsonl:1.*{named}", problems.messages[-1])


# Images


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """A dataset folder of 30 images: every second one has a car, a bright square on the left or right."""
    folder, rng, rows = tmp_path_factory.mktemp("dataset"), np.random.default_rng(0), []
    for index in range(30):
        image, boxes = rng.integers(0, 80, (STORED, STORED, 3), np.uint8), []
        if index % 2:
            left = 15 if index % 4 == 1 else 264
            image[159:264, left : left + 105] = 250
            boxes.append((left, 159, left + 105, 264))
        scene = scene_of("car", *boxes, labels=("car", "bus"), size=STORED).to_json()
        row = {"image": Image.fromarray(image), "source": "highway", "image_id": f"{index}.png", "scene": scene}
        row["group"] = f"camera {index // 3}"
        rows.append(row | {name: [] for name in LISTS})
    (folder / "data").mkdir()
    Dataset.from_list(rows, FEATURES).to_parquet(str(folder / "data" / "train-00000.parquet"))
    return folder


@pytest.fixture(scope="module")
def rows(dataset):
    return open_datasets([str(dataset)])[0]


def batches_of(rows, steps, sides=(SIDE,), seed=0, pictures=2, **fields):
    """A function that makes the batch of a step."""
    config = TrafficVLMVisionConfig(**LIGHT | {"pool_above": 280})
    options = TrainOptions("start", sizes=[*sides], questions_per_image=0, images_per_epoch=pictures * steps, **fields)
    drawing = Drawing([rows], options, (SIDE, SIDE), pictures * steps, seed)
    collate = TrafficCollator(None, 0, {"presence": partial(targets, vision_config=config, sources=("a", "highway"))})
    return lambda step: collate(drawing.__getitems__(range(step * pictures, (step + 1) * pictures)))


def test_a_batch_depends_only_on_its_step_and_has_the_targets_of_its_grid(rows):
    batches = batches_of(rows.select([1] * 8), 40, (SIDE, 320))
    for batch in map(batches, range(39)):
        side = batch["pixel_values"].shape[-1]
        patch = 32 if side > 280 else 16
        assert batch["targets"]["presence"]["inside"].shape == (4, (side // patch) ** 2)
        assert batch["targets"]["presence"]["source"].unique().tolist() == [1]
    torch.testing.assert_close(batches_of(rows.select([1] * 8), 40, (SIDE, 320))(38), batch, rtol=0, atol=0)
    assert not torch.equal(batches(0)["pixel_values"], batch["pixel_values"])


def test_a_batch_has_one_size_and_about_the_pixels_of_the_default_one(rows):
    options = TrainOptions("start", sizes=[256, 352, 448], size_weights=[60, 25, 15], images_per_epoch=3200)
    drawing, found = Drawing([rows.select_columns("group")], options, (256, 256), 32000, 0), []
    for drawing.epoch in range(10):
        found += [drawing.__getitems__(range(first, first + 32)) for first in range(0, 3200, 32)]
    count, side = np.array([(len(drawn.rows), drawn.size[0]) for drawn in found[:900]]).T
    assert all((len(drawn.rows), drawn.size) == (32, (256, 256)) for drawn in found[900:])
    assert set(side) == {256, 352, 448} and 0.9 < (count * side**2).mean() / (32 * 256 * 256) < 1.1
    assert abs((side == 256).mean() - 0.6) < 0.05 and abs((side == 448).mean() - 0.15) < 0.04


def test_any_process_draws_the_same_rows_for_an_epoch_by_the_weights_of_the_sources():
    parts = [
        Dataset.from_dict({"name": [f"{name}{i}" for i in range(size)]}) for name, size in (("a", 40), ("b", 160))
    ]

    def drawn(epoch=0, seed=1, **fields):
        drawing = Drawing(parts, TrainOptions("start", images_per_epoch=600, **fields), (64, 64), 1800, seed)
        drawing.epoch = epoch
        assert len(drawing) == 600
        return [row["name"] for first in range(0, 600, 8) for row in drawing.__getitems__([first] * 8).rows]

    def fraction(names):
        return sum(name[0] == "a" for name in names) / len(names)

    assert drawn() == drawn() and drawn() not in (drawn(epoch=1), drawn(seed=2))
    assert abs(fraction(drawn()) - 40 * 12 / 1800) < 0.05  # by the square root a third, but each 12 times at most
    few = {"train_dataset": ["a", "b"], "train_weights": [1, 9]}
    assert abs(fraction(drawn(**few)) - 0.1) < 0.04
    with pytest.raises(ValueError, match=r"every dataset must have rows, these have \[40, 0\]"):
        Drawing([parts[0], parts[1].select([])], TrainOptions("start"), (64, 64), 100, 0)


def test_a_camera_counts_with_the_square_root_of_its_pictures_and_no_picture_is_drawn_more_than_twelve_times():
    groups = [["a"] * 9 + ["b"], ["c", "d"]]
    chances = draw_chances(groups, [3, 1], 12)
    np.testing.assert_allclose(chances, [0.75 / 12] * 9 + [0.75 / 4] + [1 / 8] * 2)
    limited = draw_chances(groups, [3, 1], 100)  # at most 0.12: b, c and d have that much, the pictures of a the rest
    np.testing.assert_allclose(limited, [0.64 / 9] * 9 + [0.12] * 3)
    for draws in (144, 1000):  # there are too few pictures
        np.testing.assert_allclose(draw_chances(groups, [3, 1], draws), [1 / 12] * 12)
    rows = Dataset.from_dict({"group": ["", "", "a", "a"]})  # images without a group are not alike
    options = TrainOptions("start", train_dataset=["a", "synthetic"], train_weights=[3, 1])
    found = Drawing([rows, SyntheticRows(num_images=2)], options, (64, 64), 12, 0).chances
    np.testing.assert_allclose(found / found[0], [1, 1, *[0.5**0.5] * 2, *[(2 + 2**0.5) / 6] * 2])


def test_small_pictures_are_neither_drawn_for_large_sizes_nor_cropped_much(rows):
    assert batches_of(rows, 10, (320,), pictures=8)(0)["pixel_values"].shape == (5, 3, 320, 320)
    with pytest.raises(ValueError, match="no image is large enough for 512 × 512 pixels"):
        batches_of(rows, 10, (256, 512))
    with pytest.raises(ValueError, match="no image is large enough for 512 × 512 pixels"):  # of the last batches
        Drawing([rows], TrainOptions("start", sizes=[256], questions_per_image=0), (512, 512), 99, 0)
    rng = np.random.default_rng(0)
    windows = np.array([random_window(Scene(400, 300), rng, (256, 352)) for _ in range(300)])
    width, height = windows[:, 2] - windows[:, 0], windows[:, 3] - windows[:, 1]
    assert 0 <= width.min() - 352 / MAX_ENLARGED < 3 and 0 <= height.min() - 256 / MAX_ENLARGED < 3


def test_a_tower_needs_scenes_to_train_on_and_to_be_evaluated_on(rows, tmp_path):
    own = open_datasets([str(own_folder(tmp_path / "own"))])
    for train, held in (([rows], own), (own, [rows])):
        with pytest.raises(DataError, match="own has no scenes"):
            rows_for_tower(train, held, ["own" if one is own else "made" for one in (train, held)])


# Head and loss


def test_a_third_depends_only_on_its_own_columns():
    torch.manual_seed(0)
    head, tokens, inside = QueryHead(8), torch.randn(1, 6, 6, 8), region_weights(6, 6)
    changed = tokens.clone()
    changed[:, :, 5] += 1.0
    plain, other = (head(some.flatten(1, 2), inside) for some in (tokens, changed))
    assert ((plain - other).abs().amax((0, 1)) > 1e-5).tolist() == [True, False, False, True]


def test_the_loss_balances_yes_and_no_within_each_source_and_ignores_unknown():
    """Numbers of no and yes: 7 and 1 in the first source, 1 and 3 in the second, 20 and 0 in the third."""
    source, answers = torch.tensor([0] * 8 + [1] * 4 + [2] * 20), [1, *[0] * 7, 1, 1, 1, *[0] * 21]
    region = torch.tensor(answers, dtype=torch.int8)[:, None, None].repeat(1, len(CATEGORIES), 4)
    region[:, 1] = -1
    logits = torch.zeros(region.shape, requires_grad=True)
    PresenceLoss(3)(logits, region, source).backward()

    def weight(no, yes, answer):  # equal in sum; at most 16 times that of the other answer
        return min((no + yes) / 2, 16 * min(no, yes)) / max(1, (no, yes)[answer])

    counts = [(7, 1), (1, 3), (20, 0)]
    known = 32 * (len(CATEGORIES) - 1) * 4
    expected = [
        (0.5 - answer) * (weight(*counts[index], answer) + 0.25 * weight(28, 4, answer)) / known
        for index, answer in zip(source.tolist(), answers)
    ]
    assert logits.grad[:, 0, 0].tolist() == pytest.approx(expected) and not logits.grad[:, 1].any()


# Training


def loss_of(model, batch):
    """The sum of the losses of a batch, whose pixels are 0..255."""
    passed = ForwardPass(model, model(batch["pixel_values"] / 127.5 - 1))
    return sum(LOSSES[name](passed, **tensors) for name, tensors in batch["targets"].items())


def tower_model(tower, head, num_sources=1):
    return TowerModel(tower, nn.ModuleDict({"head": head, "loss": PresenceLoss(num_sources)}))


def load_tower_model(folder):
    return tower_model(load_tower(folder), load_training_head(folder)).eval()


def tiny_tower():
    torch.manual_seed(0)
    return TrafficVLMVisionModel(TrafficVLMVisionConfig(**LIGHT)), QueryHead(24)


def test_pooled_tokens_start_as_the_means_of_four_patches_and_small_images_keep_theirs():
    tower, _ = tiny_tower()
    pooled, pixels = add_parts(tower, pool_above=128).eval(), torch.randn(2, 3, 160, 128)
    x = torch.randn(2, 80, 16)
    means = x.unflatten(1, (5, 2, 4, 2)).mean((2, 4)).flatten(1, 2)
    torch.testing.assert_close(pooled.pool(x, (10, 8)), means)
    assert pooled(pixels).last_hidden_state.shape == (2, 20, 24) and token_grid(pooled.config, 160, 128) == (5, 4)
    small = pixels[:, :, :128]
    torch.testing.assert_close(pooled(small).last_hidden_state, tower.eval()(small).last_hidden_state)


def test_statistics_of_batch_normalization_stay_in_training(rows):
    model = tower_model(*tiny_tower(), 2)
    before = {name: value.clone() for name, value in model.tower.named_buffers()}
    loss_of(model.train(), batches_of(rows, 10)(0)).backward()
    torch.testing.assert_close(dict(model.tower.named_buffers()), before)
    assert model.training_head["head"].training and model.tower.convolutions.stem[1].weight.grad is not None


def test_answers_about_presence_are_a_table_of_evaluation(rows, processor):
    """The model finds the 8 of 15 cars that are on the left, and says no to all else."""

    class Found(QueryHead):
        def forward(self, pixels, inside):
            found = torch.full((len(pixels), len(CATEGORIES), 4), -2.0)
            found[pixels[..., : SIDE // 2].amax((1, 2, 3)) > 0.6, INDEX["car"], 0] = 2.0
            return found

    model = tower_model(tiny_tower()[0], Found(24)).eval()
    model.forward = lambda pixels: SimpleNamespace(last_hidden_state=pixels)
    answers = answer_presence(model, processor, rows)
    car = answers[answers["question_id"] == "car/whole"]
    assert len(car) == 30 and balanced_accuracy(car) == pytest.approx((8 / 15 + 1) / 2)
    assert auc(car) == pytest.approx((8 * 15 + 7 * 15 / 2) / 225)
    assert (answers["truth"][answers["question_id"].isin([f"bus/{region}" for region in REGIONS])] == "no").all()
    assert "person/whole" not in set(answers["question_id"])  # unknown


CENTERED = scene_of("car", (60, 90, 120, 150), (200, 30, 300, 90), labels=("car",), size=320)


def test_center_targets_are_heat_around_each_object_and_its_size():
    found = center_targets(CENTERED, ["car", "bus", "person"], 320, 320)
    heat, shape = found["heat"], found["shape"]
    assert heat.shape == (3, 40, 40) and np.argwhere(heat[0] == 1).tolist() == [[7, 31], [15, 11]]
    assert np.argwhere(found["is_center"]).tolist() == [[7, 31], [15, 11]] and not heat[1:].any()
    assert 0.02 < heat[0, 7, 32] < 1 and heat[0, 7, 35] == 0
    assert shape[:, 7, 31] == pytest.approx([math.log(100 / 320), math.log(60 / 320), 0.25, 0.5])
    assert found["weight"][0].all() and not found["weight"][1:].any()  # only cars are all labeled
    hidden = center_targets(replace(CENTERED, exhaustive=frozenset()), ["car"], 320, 320)["weight"][0]
    assert hidden[7, 31] == 1 and hidden[30, 10] == 0  # known near the center alone
    rider = center_targets(scene_of("rider", (60, 90, 120, 150), labels=("person",), size=320), ["person"], 320, 320)
    assert not rider["is_center"].any() and (rider["weight"] == 0).sum() == 8 * 8  # its box may lack the vehicle


def test_a_center_head_learns_where_objects_are():
    torch.manual_seed(0)
    tower, head = tiny_tower()
    model = tower_model(add_parts(tower, located={"bus": 0.3, "car": 0.3}), head).train()
    pixels = torch.zeros(1, 3, 320, 320)
    for item in CENTERED.objects:
        left, top, right, bottom = map(int, item.box)
        pixels[..., top:bottom, left:right] = 255
    image = Prepared(pixels[0].numpy(), [], GroundTruth(CENTERED), "")
    made = make_targets(["presence", "centers"], None, model.tower.config, [""])
    batch = {"pixel_values": pixels}
    batch["targets"] = {name: target([image], batch) for name, target in made.items()}
    optimizer = torch.optim.Adam(model.tower.center_head.parameters(), 0.01)
    for _ in range(250):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    centers = model(pixels / 127.5 - 1).centers[0].detach()
    boxes = [[round(320 * side) for side in box] for _, box, _ in find_objects(centers, 1, 0.3)]
    assert sorted(boxes) == [pytest.approx(item.box, abs=6) for item in CENTERED.objects]


@pytest.fixture(scope="module")
def new_tower(start, dataset, tmp_path_factory):
    """A function that trains a tiny tower on the dataset, without a decoder; and the folder that it starts from."""
    folder = tmp_path_factory.mktemp("tower")
    tower, head = tiny_tower()
    tower.save_pretrained(folder)
    save_training_head(head, folder)
    options = (
        f"--from_scratch true --config {start} --vision_tower {folder} --questions_per_image 0 "
        f"--train_dataset {dataset} --sizes 256 288 --image_size 256 --pool_above 280 "
        "--adam_beta2 0.98 --average_decay 0.998 --load_best_model_at_end false --save_strategy steps "
        "--report_to none"
    )
    return lambda output, more: learn(None, output, f"{options} {more}"), folder


def test_a_tower_alone_has_the_losses_of_a_short_loop(new_tower, rows, tmp_path):
    """Draws, moments, clipping, and a decay of matrices and kernels alone."""
    train, _ = new_tower
    train(tmp_path, f"--max_steps 4 --save_steps 4 --seed 5 --learning_rate 0.01 {NO_EVAL}")
    losses, batches = [], batches_of(rows, 4, (256, 288), seed=5, pictures=4)
    tower, head = tiny_tower()
    model = tower_model(add_parts(tower, pool_above=280), head, 2).train()
    groups = [
        {"params": [one for one in model.parameters() if (one.ndim > 1) == decays], "weight_decay": 0.05 * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.98))
    for step in range(4):
        loss = loss_of(model, batches(step))
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert [entry["loss"] for entry in history(tmp_path)] == pytest.approx(losses, rel=1e-3)
    last = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    torch.testing.assert_close(
        last["training_head.head.bias"], model.training_head["head"].bias.detach(), rtol=1e-3, atol=1e-5
    )
    assert (tmp_path / "tower" / "model.safetensors").is_file()


def test_a_tower_learns_its_average_is_saved_and_a_resumed_run_has_the_same_result(
    new_tower, dataset, rows, tmp_path, capsys
):
    (train, start), whole, stopped = new_tower, tmp_path / "whole", tmp_path / "stopped"
    options = "--max_steps 24 --per_device_train_batch_size 8 --save_steps 12 --learning_rate 0.01 --eval_steps 12 "
    options += f"--eval_strategy steps --eval_dataset {dataset}"
    train(whole, options)
    printed = capsys.readouterr().out
    assert "10 groups are also in --eval_dataset" in printed and "'highway: camera 0'" in printed
    assert printed.count("'eval_balanced_accuracy'") == 2 and printed.count("'balanced_accuracy'") == 1
    assert "tower is in" in printed
    shutil.copytree(whole / "checkpoint-12", stopped / "checkpoint-12")  # in the middle of an epoch
    train(stopped, f"{options} --dataloader_num_workers 2")
    assert f"resuming from {stopped / 'checkpoint-12'}" in capsys.readouterr().out
    last, average, *resumed = (
        load_file(folder / "checkpoint-24" / name)
        for folder in (whole, stopped)
        for name in ("model.safetensors", "average.safetensors")
    )
    torch.testing.assert_close(resumed, [last, average])
    assert [entry["step"] for entry in history(whole, "eval_balanced_accuracy")] == [12, 24]

    trained, prefix = load_tower_model(str(whole / "tower")), "training_head.head"
    saved = trained.state_dict()
    torch.testing.assert_close({name: saved[name] for name in average}, average)
    assert (
        0 < average[f"{prefix}.bias"].norm() < last[f"{prefix}.bias"].norm()
    )  # it starts at 0, and the average follows
    batch = batches_of(rows, 10, seed=1, pictures=30)(0)
    batch["targets"]["presence"]["source"].zero_()
    with torch.no_grad():
        models = load_tower_model(str(start)), trained
        before, after = (float(loss_of(model, batch)) for model in models)
    assert after < 0.8 * before


def test_the_shipped_tower_and_its_head_see_what_photographs_show(processor):
    model = load_tower_model(str(ROOT))
    for name, category, region, is_present in (
        ("crossing", "car", "left", True),
        ("crossing", "car", "right", False),
        ("night", "stop sign", "whole", True),
        ("night", "car", "whole", False),
    ):
        photograph = Dataset.from_dict({"image": [Image.open(ROOT / f"docs/{name}.jpg")]})
        [p_present] = predict_presence(model, processor, photograph)
        assert (p_present[INDEX[category], REGIONS.index(region)] > 0.5) == is_present, (name, category)

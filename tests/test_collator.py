"""Batches: packed questions and targets by an oracle, and balance within each source."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from tiny import tiny_model
from traffic_vlm.configuration_traffic_vlm import TrafficVLMVisionConfig
from traffic_vlm.data.datasets import SyntheticRows
from traffic_vlm.data.grammar import paraphrases_of
from traffic_vlm.data.questions import TOLERANCE
from traffic_vlm.data.scene import CLASSES, Scene, SceneObject, is_a
from traffic_vlm.data.synthetic import render
from traffic_vlm.training.auxiliary.grounding import box_patches
from traffic_vlm.training.auxiliary.losses import LOSSES, make_targets
from traffic_vlm.training.auxiliary.presence import HEAD_QUESTIONS
from traffic_vlm.training.collator import TrafficCollator
from traffic_vlm.training.drawing import Drawn


class Collator(TrafficCollator):
    """A collator of rows, with all targets, which keeps the images and questions of its last batch."""

    def __init__(self, processor, questions, sources=(), side=256):
        targets = make_targets(LOSSES, processor, TrafficVLMVisionConfig(located={"car": 0.3}), sources)
        super().__init__(processor, questions, targets)
        self.size, self.rng = (side, side), np.random.default_rng(0)

    def __call__(self, rows):
        return super().__call__(Drawn(rows, self.size, self.rng))

    def add_targets(self, images, batch):
        self.prepared = images
        return super().add_targets(images, batch)

    def read(self, batch):
        """{(row, last column of a question): (its image, the question)}, by the tokens of each question alone."""
        alone, found = {}, {}
        for image, item in enumerate(self.prepared):
            for question in item.questions:
                tokens = self.processor(text=question.text, suffix=question.answer)
                alone[image, *tokens["input_ids"][0], *tokens["labels"][0]] = question
        images = batch.get("image_index", torch.arange(len(self.prepared))).tolist()
        for row, segments in enumerate(batch["segment_ids"]):
            for segment in range(1, int(segments.max()) + 1):
                columns, image = (segments == segment).nonzero().flatten(), images[row]
                ids, labels = batch["input_ids"][row, columns].tolist(), batch["labels"][row, columns].tolist()
                assert batch["position_ids"][row, columns].tolist() == list(range(len(columns)))
                found[row, int(columns[labels.count(-100) - 1])] = image, alone[image, *ids, *labels]
        assert len(found) == sum(len(item.questions) for item in self.prepared)
        return found


def own(questions=("Is there a car?",), scene=None):
    """A row with a black image, and with hand-written questions or a scene."""
    row = {"image": Image.new("RGB", (40, 40)), "scene": scene and scene.to_json(), "source": "x"}
    return row | ({"questions": questions, "answers": ["no"] * len(questions)} if scene is None else {})


def test_targets_are_true_and_stand_where_their_questions_do(processor):
    collate = Collator(processor, 32, sources=("a", "synthetic"))
    batch = collate([SyntheticRows()[i] for i in range(8)])
    asked, presence = collate.read(batch), batch["targets"]["presence"]
    assert presence["source"].tolist() == [1] * 8
    assert max(Counter(image for image, _ in asked.values()).values()) <= 32
    for image, question in asked.values():
        if question.key in HEAD_QUESTIONS:
            assert presence["region"][image][HEAD_QUESTIONS[question.key]] == (question.answer == "yes")
    kinds = set()
    for row, end, other_row, other_end, is_exclusion in batch["targets"]["agreement"]["pairs"].tolist():
        (image, one), (same, other) = asked[row, end], asked[other_row, other_end]
        first, second = one.answer == "yes", other.answer == "yes"
        assert image == same and (not (first and second) if is_exclusion else first <= second)
        kinds.add((is_exclusion, second))
    assert kinds >= {(0, True), (0, False), (1, False)}


def test_grounding_targets_are_the_patches_of_the_objects_that_a_noun_names(processor):
    collate = Collator(processor, 16)
    batch = collate([SyntheticRows(first_seed=7)[i] for i in range(4)])
    asked, targets, with_boxes = collate.read(batch), batch["targets"]["grounding"], 0
    assert len(targets["patches"]) == len(targets["words"]) and targets["patches"].any(-1).all()
    for (row, column), patches in zip(targets["words"].tolist(), targets["patches"].numpy()):
        image, question = asked[row, min(end for r, end in asked if r == row and end >= column)]
        [word] = processor.tokenizer.convert_ids_to_tokens([int(batch["input_ids"][row, column])])
        assert word in {noun.split()[-1] for noun in CLASSES[question.category][:2]}
        scene = collate.prepared[image].truth.scene
        named = [item for item in scene.objects if is_a(item.category, question.category)]
        if all(item.coverage is None for item in named):
            touched = box_patches([item.box for item in named], scene, (16, 16)).max(0)
            filled = box_patches(question.boxes, scene, (16, 16)).max(0, initial=0)
            assert ((filled.ravel() == 1) <= patches).all() and (patches <= (touched.ravel() > 0)).all()
            with_boxes += len(question.boxes)
    assert with_boxes > 10


def test_rows_are_fitted_to_the_questions_and_the_loss_stays_the_same(processor):
    """One image has ten questions, the other has one: with one row per image, half of the tokens would be padding."""
    asked = [[f"Is there a {category}?" for category in list(CLASSES)[:9]] + ["What color is it?"], ["Is it dark?"]]
    answers = [["no"] * 9 + ["red"], ["yes"]]
    images = list(np.random.default_rng(0).integers(0, 255, (2, 40, 40, 3), np.uint8))
    collate = Collator(processor, 16)
    rows = [{"image": Image.fromarray(image)} for image in images]
    batch = collate([row | {"questions": q, "answers": a} for row, q, a in zip(rows, asked, answers)])
    assert len(collate.read(batch)) == 11 and batch["attention_mask"].float().mean() > 0.8
    del batch["targets"]
    pixels = batch["pixel_values"] = batch["pixel_values"] / 127.5 - 1  # in new light
    model, alone = tiny_model(), processor(images, asked, answers, return_tensors="pt") | {"pixel_values": pixels}
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(model(**alone).loss.item(), rel=1e-5)


def test_hand_written_questions_are_all_drawn_in_time_and_not_mirrored(processor):
    names, seen = ["car", "bus", "truck", "person", "dog", "bicycle"], Counter()
    image = Image.new("RGB", (40, 40), (200, 0, 0))
    image.paste((0, 0, 200), (20, 0, 40, 40))
    collate = Collator(processor, 2)
    for _ in range(30):
        batch = collate([own([f"Is there a {name}?" for name in names]) | {"image": image}])
        assert len(collate.read(batch)) == 2
        red = batch["pixel_values"][0, 0].float()
        assert red[:, :100].mean() > red[:, 124:].mean()
        seen.update(question.text for question in collate.prepared[0].questions)
    assert len(seen) == len(names)


def test_batches_of_training_have_one_size(processor):
    """Images without a question are replaced by others of the batch, so that every batch has as many images."""
    empty = own(scene=Scene(40, 40))
    rows = [empty, own(["Is there a car?"]), empty, own(["Hello, is there a bus?"])]
    batch = Collator(processor, 16)(rows)
    assert len(batch["pixel_values"]) == 4 and batch["segment_ids"].amax(1).tolist() == [1] * 4  # questions a row
    asked = processor.tokenizer.batch_decode(batch["input_ids"])
    assert sum("[SOS] is there a bus?" in text for text in asked) == 2  # in the words that are asked
    with pytest.raises(ValueError, match="no image of this batch has a question"):
        Collator(processor, 4)([empty] * 2)


def test_some_questions_have_other_words_around_them(processor):
    collate = Collator(processor, 16)
    collate([{"image": image, "scene": scene.to_json()} for image, scene in map(render, range(4))])
    asked = [question for item in collate.prepared for question in item.questions]
    is_core = [question.text in paraphrases_of(question.question_id) for question in asked]
    assert any(is_core) and not all(is_core)


def test_each_batch_has_one_of_the_sizes_and_targets_of_its_grid(processor):
    rows = [{"image": image, "scene": scene.to_json()} for image, scene in map(render, range(2))]
    for side in (192, 320):
        batch = Collator(processor, 4, side=side)(rows)
        assert batch["pixel_values"].shape == (2, 3, side, side)
        assert batch["targets"]["presence"]["inside"].shape == (4, (side // 16) ** 2)
        assert batch["targets"]["centers"]["is_center"].shape == (2, side // 8, side // 8)


def test_a_batch_keeps_questions_when_the_balancer_rejects_all(processor):
    """Always the same answer is true: the balancer soon rejects every question."""
    collate = Collator(processor, 4)
    row = own(scene=Scene(40, 40, (SceneObject("car", (0.0, 0.0, 40.0, 40.0)),)))
    for _ in range(30):
        assert ((collate([row])["labels"] != -100).sum(-1) > 0).all()


def test_yes_and_no_are_balanced_within_each_source(processor):
    """Cars are frequent in one source and rare in the other: the source must not predict the answer."""
    car = SceneObject("car", (10.0, 10.0, 30.0, 30.0))
    rng, answers = random.Random(0), {"city": Counter(), "path": Counter()}
    collate, rows = Collator(processor, 4), []
    for _ in range(400):
        source = rng.choice(["city", "path"])
        objects = (car,) if rng.random() < {"city": 0.9, "path": 0.1}[source] else ()
        weather = {"weather": "clear"} if objects else {}
        rows.append(own(scene=Scene(40, 40, objects, weather, exhaustive=frozenset({"car"}), source=source)))
    for first in range(0, 400, 40):
        collate(rows[first : first + 40])
        for item in {id(item.truth): item for item in collate.prepared}.values():  # some are repeated
            asked = [one.answer for one in item.questions if one.key == ("presence", "car")]
            answers[item.truth.scene.source].update(asked)
    for counts in answers.values():
        assert counts.total() > 15 and abs(counts["yes"] - counts["no"]) <= TOLERANCE

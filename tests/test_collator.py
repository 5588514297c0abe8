"""Batches: augmentation keeps the ground truth, questions are balanced, grounded and packed; datasets are mixed."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image

from tiny import tiny_model
from traffic_vlm.data.collator import TrafficCollator
from traffic_vlm.data.dataset import Mixture, SyntheticRows
from traffic_vlm.data.ground_truth import GroundTruth
from traffic_vlm.data.presence import INDEX
from traffic_vlm.data.questions import Balancer
from traffic_vlm.data.scene import CLASSES, Scene, SceneObject
from traffic_vlm.data.synthetic import render
from traffic_vlm.training.collator import SupervisedCollator


def count_questions(batch, image=0):
    return int(batch["segment_ids"][batch["image_index"] == image].amax(1).sum())


def text_at(processor, batch, row, column):
    """The text of a packed question up to a column."""
    segments = batch["segment_ids"][row, : column + 1]
    return processor.decode(batch["input_ids"][row, : column + 1][segments == segments[-1]])


def own(questions=("Is there a car?",), scene=None):
    """A row with a black image, and with hand-written questions or a scene."""
    row = {"image": Image.new("RGB", (40, 40)), "scene": scene and scene.to_json(), "source": "x"}
    return row | ({"questions": questions, "answers": ["no"] * len(questions)} if scene is None else {})


def rendered(count):
    return [{"image": image, "scene": scene.to_json(), "source": "x"} for image, scene in map(render, range(count))]


def test_grounding_targets_are_at_the_nouns_of_the_questions(processor):
    rows = [dict(SyntheticRows(first_seed=seed)[0]) for seed in (3, 4, 5)]
    batch = SupervisedCollator(processor, 8, sources=("a", "synthetic"))(rows)
    targets = batch["targets"]
    assert targets.source.tolist() == [1, 1, 1]
    positions = targets.grounding_words.tolist()
    assert len(positions) == len(targets.grounding) > 0 and targets.grounding.any(-1).all()
    nouns = {noun.split()[-1] for singular, plural, _ in CLASSES.values() for noun in (singular, plural)}
    grounded = {processor.tokenizer.convert_ids_to_tokens(int(batch["input_ids"][row, end])) for row, end in positions}
    assert grounded <= nouns
    assert all(batch["labels"][row, column] == -100 for row, column in positions)  # of the question, not the answer


def test_intermediate_targets_are_the_true_values(processor, monkeypatch):
    monkeypatch.setattr("traffic_vlm.data.augment.HIDDEN", {})
    light = SceneObject("traffic light", (0, 0, 10, 20), attributes={"state": "green"})
    cars = [SceneObject("car", (x, 20, x + 12, 38), attributes={"color": "blue"}) for x in (0, 26)]
    labels = frozenset({"traffic light", "car", "bus"})
    scene = Scene(40, 40, (light, *cars), {"weather": "foggy"}, labels, {"car": frozenset({"color"})})
    compared = {
        "light_state/traffic light/is/red": "green",
        "side/traffic light/is/right": "left",
        "color/car/are/blue": "blue",
        "count/car/over/2": "2",
        "weather/weather/is/rainy": "foggy",
        "presence/bus": None,
        "place/car/left": None,
        "color/car/any/red": None,
        "side/bus/is/left": None,  # there is no bus
    }
    found = {question_id: GroundTruth(scene).compared(tuple(question_id.split("/"))) for question_id in compared}
    assert found == compared

    batch = SupervisedCollator(processor, 16)([own(scene=scene)])
    targets = batch["targets"]
    assert targets.region[0, INDEX["car"], 0] == 1
    assert targets.region[0, INDEX["weather: fog"]].tolist() == [1, -1, -1, -1]
    values = {}
    for row, column, value in targets.intermediate.tolist():
        assert batch["labels"][row, column + 1] in (4, 5)  # the next word is the yes or no
        values[text_at(processor, batch, row, column)] = processor.decode(value)
    assert values and set(values.values()) <= {"green", "left", "right", "center", "blue", "2", "1", "0", "foggy"}
    assert all(value == "foggy" for text, value in values.items() if "weather" in text)


def test_some_questions_are_paraphrased(processor):
    batch = SupervisedCollator(processor, 16, paraphrases=3)(rendered(4))
    pairs = batch["targets"].paraphrases
    assert 8 <= len(pairs) <= 4 * 3
    for pair in pairs.reshape(-1, 2, 2).tolist():
        texts = {text_at(processor, batch, row, end) for row, end in pair}
        answers = {int(batch["labels"][row, end + 1]) for row, end in pair}
        assert len(texts) == 2 and len(answers) == 1 and answers <= {4, 5}
    assert all(count_questions(batch, image) <= 16 for image in range(4))


def test_agreement_targets_are_pairs_whose_true_answers_agree(processor):
    batch = SupervisedCollator(processor, 16)(rendered(8))
    kinds = set()
    for row, end, other_row, other_end, is_exclusion in batch["targets"].agreement.tolist():
        first, second = (int(batch["labels"][place]) == 4 for place in ((row, end + 1), (other_row, other_end + 1)))
        assert not (first and second) if is_exclusion else first <= second
        kinds.add((is_exclusion, second))
    assert kinds >= {(0, True), (0, False), (1, False)}


def test_hand_written_questions_are_all_drawn_in_time_and_not_paraphrased(processor):
    names = ["car", "bus", "truck", "person", "dog", "bicycle"]
    collate, seen = SupervisedCollator(processor, 2, paraphrases=1), set()
    for _ in range(30):
        batch = collate([own([f"Is there a {name}?" for name in names])])
        assert count_questions(batch) == 2 and not len(batch["targets"].paraphrases)
        seen |= set(batch["input_ids"].flatten().tolist())
    assert seen >= set(processor.tokenizer.convert_tokens_to_ids(names))


@pytest.mark.parametrize("side", ["left", "right"])
def test_fitted_rows_hold_the_same_questions_in_fewer_tokens(processor, side):
    """One image has ten questions, the other has one; the loss is the same as with one row per image."""
    texts = [
        [f"Is there a {category}?" for category in list(CLASSES)[:9]] + ["What color is the traffic light?"],
        ["Is it dark?"],
    ]
    answers = [["no"] * 9 + ["red"], ["yes"]]
    images = list(np.random.default_rng(0).integers(0, 255, (2, 224, 224, 3), np.uint8))
    packed, batch = (
        dict(processor(images, texts, answers, True, row_tokens, return_tensors="pt", padding_side=side))
        for row_tokens in (512, "fit")
    )
    assert torch.equal(batch["pixel_values"], packed["pixel_values"])
    asked = [(image, *pair) for image in range(2) for pair in zip(texts[image], answers[image])]
    for (image, text, answer), (row, start, end) in zip(asked, batch.pop("question_spans").tolist(), strict=True):
        alone = {name: value[0] for name, value in processor(text=text, suffix=answer, on_unknown="ignore").items()}
        alone["position_ids"] = list(range(len(alone["input_ids"])))
        columns = slice(start, start + len(alone["input_ids"]))
        assert batch["image_index"][row] == image
        for name in ("input_ids", "labels", "position_ids"):
            assert batch[name][row, columns].tolist() == alone[name]
        assert alone["labels"][end - start] == -100 != alone["labels"][end - start + 1]  # the answer follows
    used = packed["attention_mask"].sum()
    assert batch["attention_mask"].sum() == used
    assert used / packed["input_ids"].numel() < 0.6 < 0.8 < used / batch["input_ids"].numel()
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    model = tiny_model().eval()
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(model(**packed).loss.item(), rel=1e-5)


def test_a_mixture_follows_its_weights_and_depends_only_on_seed_and_epoch():
    rows = [Dataset.from_dict({"name": [name] * size}) for name, size in (("a", 5), ("b", 50))]

    def drawn(epoch=0, seed=1):
        mixture = Mixture(rows, [3, 1], images_per_epoch=2000, seed=seed)
        mixture.set_epoch(epoch)
        return [mixture[i]["name"] for i in range(2000)]

    assert 0.72 < drawn().count("a") / 2000 < 0.78
    assert drawn() == drawn() and drawn() not in (drawn(epoch=1), drawn(seed=2))
    assert len(Mixture(rows)) == 55


def test_what_cannot_be_mixed_or_collated_is_refused(processor):
    one, none = Dataset.from_dict({"name": ["a"]}), Dataset.from_dict({"name": []})
    for rows, weights, message in (
        ([one, one], [1], "2 datasets need as many positive weights"),
        ([one, one], [1, 0], "2 datasets need as many positive weights"),
        ([one, none], None, r"must have rows, these have \[1, 0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            Mixture(rows, weights)
    with pytest.raises(ValueError, match="none of the 2 images"):
        TrafficCollator(processor)([own(scene=Scene(40, 40))] * 2)
    with pytest.raises(ValueError, match="must be fewer than questions_per_image=2, got 2"):
        SupervisedCollator(processor, 2, paraphrases=2)


def test_batches_of_training_have_one_size(processor):
    """Images without a question are replaced by others of the batch, so that every batch has as many images."""
    empty = own(scene=Scene(40, 40))
    rows = [empty, own(["Is there a car?"]), empty, own(["Is it night?"])]
    batch = TrafficCollator(processor)(rows)
    assert len(batch["pixel_values"]) == 4
    assert batch["segment_ids"].amax(1).tolist() == [1, 1, 1, 1]  # questions of each row, which has an image
    assert len(TrafficCollator(processor, training=False)(rows)["pixel_values"]) == 2


def test_images_with_stored_questions_are_not_mirrored(processor):
    image = Image.new("RGB", (40, 40), (200, 0, 0))
    image.paste((0, 0, 200), (20, 0, 40, 40))
    for seed in range(8):
        [pixels] = TrafficCollator(processor, seed=seed)([own() | {"image": image}])["pixel_values"]
        assert pixels[0, :, :100].mean() > pixels[0, :, 124:].mean()


@pytest.mark.parametrize("stored", [False, True])
def test_a_batch_keeps_questions_when_the_balancer_rejects_all(processor, stored):
    """Always the same answer is true: the balancer soon rejects every question."""
    collate = TrafficCollator(processor, questions_per_image=4)
    row = own(scene=Scene(40, 40, (SceneObject("car", (0.0, 0.0, 40.0, 40.0)),)))
    row |= {"questions": ["Is it day?"], "answers": ["yes"]} if stored else {}
    for _ in range(30):
        assert ((collate([row])["labels"] != -100).sum(-1) > 0).all()


@pytest.mark.parametrize(
    ("collator", "options"),
    [(TrafficCollator, {}), (SupervisedCollator, {"paraphrases": 1})],
    ids=["plain", "paraphrased"],
)
def test_yes_and_no_are_balanced_within_each_source(processor, collator, options):
    """Cars are frequent in one source and rare in the other: the source must not predict the answer."""
    car = SceneObject("car", (10.0, 10.0, 30.0, 30.0))
    rng, answers = random.Random(0), {"city": Counter(), "path": Counter()}
    collate = collator(processor, 4, ("presence", "weather"), **options)
    for _ in range(800):
        source = rng.choice(["city", "path"])
        objects = (car,) if rng.random() < {"city": 0.9, "path": 0.1}[source] else ()
        weather = {"weather": "clear"} if objects else {}
        truth = GroundTruth(Scene(40, 40, objects, weather, exhaustive=frozenset({"car"}), source=source))
        answers[source].update(one.answer for one in collate.ask(truth, rng) if one.category == "car")
    for counts in answers.values():
        assert counts.total() > 30 and abs(counts["yes"] - counts["no"]) <= Balancer().tolerance


def test_training_and_inference_see_the_same_pixels(processor):
    deep = Image.fromarray(np.full((40, 40), 20000, np.uint16))  # 16 bits
    seen = TrafficCollator(processor, training=False)([own() | {"image": deep}])["pixel_values"]
    assert torch.equal(seen, processor(images=deep, return_tensors="pt")["pixel_values"])


def test_evaluation_asks_the_same_questions_in_any_order(processor):
    rows = [SyntheticRows()[i] for i in range(3)]
    collate = TrafficCollator(processor, questions_per_image=4, training=False)
    first, again, alone = collate(rows), collate(rows[::-1]), collate(rows[1:2])
    assert torch.equal(first["input_ids"], collate(rows)["input_ids"])
    assert torch.equal(first["pixel_values"].flip(0), again["pixel_values"])
    length = alone["input_ids"].shape[1]
    assert torch.equal(first["input_ids"][1, -length:], alone["input_ids"][0])
    assert (first["question_ends"] >= 0).sum() == 12

"""Training batches: targets at the right words, paraphrases, packed rows, mixtures of datasets."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image

from tiny import tiny_model
from traffic_vlm.data.ground_truth import View
from traffic_vlm.data.grounding import class_words
from traffic_vlm.data.mixture import Mixture, SyntheticRows
from traffic_vlm.data.presence import CATEGORIES, INDEX
from traffic_vlm.data.scene import CLASSES, Scene, SceneObject
from traffic_vlm.data.synthetic import render
from traffic_vlm.training.collator import SupervisedCollator


def count_questions(batch, image=0):
    return int(batch["segment_ids"][batch["image_index"] == image].amax(1).sum())


def test_grounding_targets_are_at_the_nouns_of_the_questions(processor):
    rows = [dict(SyntheticRows(first_seed=seed)[0]) for seed in (3, 4, 5)]
    batch = SupervisedCollator(processor, 8, grid=(14, 14))(rows)
    assert batch["region_targets"].shape == (3, len(CATEGORIES), 4)
    assert batch["patch_targets"].shape == (3, len(CATEGORIES), 14, 14)
    positions = batch["grounding_targets"].any(-1).nonzero()
    assert len(positions) > 0
    nouns = {word for label in CLASSES for word in class_words(label)}
    for row, column in positions.tolist():
        assert processor.tokenizer.convert_ids_to_tokens(int(batch["input_ids"][row, column])) in nouns
        assert batch["labels"][row, column] == -100  # a word of the question, not of the answer


def test_intermediate_targets_are_the_true_values(processor):
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
    assert {fact: View(scene).compared(tuple(fact.split("/"))) for fact in compared} == compared

    image = Image.new("RGB", (40, 40))
    row = {"image": image, "scene": scene.to_json(), "questions": None, "answers": None, "source": "x"}
    batch = SupervisedCollator(processor, 16, grid=(14, 14))([row])
    assert batch["region_targets"][0, INDEX["car"], 0] == 1
    assert batch["region_targets"][0, INDEX["weather: fog"]].tolist() == [1, -1, -1, -1]
    found = {}
    for row, column in batch["intermediate_targets"].nonzero().tolist():
        assert batch["labels"][row, column + 1] in (4, 5)  # the next word is the yes or no
        segment = batch["segment_ids"][row]
        text = processor.decode(batch["input_ids"][row, : column + 1][segment[: column + 1] == segment[column]])
        found[text] = processor.decode(batch["intermediate_targets"][row, column])
    assert found and set(found.values()) <= {"green", "left", "right", "center", "blue", "2", "1", "0", "foggy"}
    assert all(value == "foggy" for text, value in found.items() if "weather" in text)


def test_some_questions_are_paraphrased(processor):
    rows = [{"image": image, "scene": scene.to_json()} for image, scene in map(render, range(4))]
    batch = SupervisedCollator(processor, 16, paraphrases=3)(rows)
    pairs = batch["paraphrase_pairs"]
    assert 8 <= pairs.max() <= 4 * 3
    for pair in range(1, int(pairs.max()) + 1):
        texts, answers = set(), set()
        for row, end in (pairs == pair).nonzero().tolist():
            answers.add(int(batch["labels"][row, end + 1]))
            question = batch["segment_ids"][row, : end + 1] == batch["segment_ids"][row, end]
            texts.add(processor.decode(batch["input_ids"][row, : end + 1][question]))
        assert len(texts) == 2 and len(answers) == 1 and answers <= {4, 5}
    assert all(count_questions(batch, image) <= 16 for image in range(4))
    with pytest.raises(ValueError, match="paraphrases must be fewer than questions_per_image=2, got 2"):
        SupervisedCollator(processor, 2, paraphrases=2)
    without = SupervisedCollator(processor, 16)(rows)
    assert not without["paraphrase_pairs"].any()


def test_hand_written_questions_are_not_paraphrased(processor):
    texts = ["Is there a car?", "Is there a bus?", "Is there a car?"]
    row = {"image": Image.new("RGB", (40, 40)), "scene": None, "questions": texts, "answers": ["yes", "no", "yes"]}
    batch = SupervisedCollator(processor, 16, paraphrases=3)([row])
    assert not batch["paraphrase_pairs"].any() and count_questions(batch) == 3


def test_all_hand_written_questions_are_drawn_in_time(processor):
    texts = [f"Is there a {name}?" for name in ("car", "bus", "truck", "person", "dog", "bicycle")]
    row = {"image": Image.new("RGB", (40, 40)), "scene": None, "questions": texts, "answers": ["no"] * 6}
    collate = SupervisedCollator(processor, 2, paraphrases=1)
    seen = set()
    for _ in range(30):
        batch = collate([row])
        assert count_questions(batch) == 2
        seen |= set(batch["input_ids"].flatten().tolist())
    assert seen >= set(processor.tokenizer.convert_tokens_to_ids([text.split()[-1][:-1] for text in texts]))


def test_fitted_rows_hold_the_same_questions_in_fewer_tokens(processor):
    """One image has ten questions, the other has one; the loss is the same as with one row per image."""
    texts = [
        [f"Is there a {label}?" for label in list(CLASSES)[:9]] + ["What color is the traffic light?"],
        ["Is it dark?"],
    ]
    answers = [["no"] * 9 + ["red"], ["yes"]]
    images = np.random.default_rng(0).integers(0, 255, (2, 224, 224, 3), np.uint8)
    packed = dict(processor(images=list(images), text=texts, suffix=answers, packed=True, return_tensors="pt"))
    fitted = processor(
        images=list(images), text=texts, suffix=answers, packed=True, row_tokens="fit", return_tensors="pt"
    )
    batch = dict(fitted)
    assert torch.equal(batch["pixel_values"], packed["pixel_values"])

    def questions(batch, images):
        """Ids, labels and positions of the questions about each image, in any order."""
        found = [[] for _ in texts]
        for row, image in enumerate(images):
            for segment in batch["segment_ids"][row].unique():
                mask = batch["segment_ids"][row] == segment
                if segment:
                    names = ("input_ids", "labels", "position_ids", "attention_mask")
                    found[image].append([batch[name][row, mask].tolist() for name in names])
        return [sorted(image) for image in found]

    assert questions(batch, batch["image_index"].tolist()) == questions(packed, range(2))
    used = packed["attention_mask"].sum()
    assert batch["attention_mask"].sum() == used
    assert used / packed["input_ids"].numel() < 0.6 < 0.8 < used / batch["input_ids"].numel()
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()

    model = tiny_model().eval()
    indices = batch.pop("question_index")
    assert sorted(indices[indices >= 0].tolist()) == sorted([*range(10), 0])
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(model(**packed).loss.item(), rel=1e-5)


def test_a_mixture_follows_its_weights_and_depends_only_on_seed_and_epoch():
    rows = [
        Dataset.from_dict({"name": [f"{source}{i}" for i in range(size)]}) for source, size in (("a", 5), ("b", 50))
    ]
    mixture = Mixture(rows, [3, 1], images_per_epoch=2000, seed=1)
    names = [mixture[i]["name"] for i in range(2000)]
    assert 0.72 < sum(name[0] == "a" for name in names) / 2000 < 0.78
    assert names == [Mixture(rows, [3, 1], 2000, seed=1)[i]["name"] for i in range(2000)]
    mixture.set_epoch(1)
    assert names != [mixture[i]["name"] for i in range(2000)]
    assert len(Mixture(rows)) == 55


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1]])
def test_a_mixture_refuses_invalid_weights_and_empty_datasets(weights):
    rows = [Dataset.from_dict({"name": ["a"]})] * 2
    with pytest.raises(ValueError, match="2 datasets need as many positive weights"):
        Mixture(rows, weights)
    with pytest.raises(ValueError, match=r"must have rows, these have \[1, 0\]"):
        Mixture([rows[0], Dataset.from_dict({"name": []})])


def test_synthetic_rows_are_the_rendered_scenes():
    image, scene = render(12)
    row = SyntheticRows(first_seed=10, num_images=5)[2]
    assert Scene.from_json(row["scene"]) == scene
    assert np.array_equal(np.asarray(row["image"]), np.asarray(image))

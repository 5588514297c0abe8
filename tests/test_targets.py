"""What cells show and where words look: coverage by hand, unknown stays unknown, and both losses in closed form."""

import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers.modeling_outputs import BaseModelOutput

from tiny import tiny_model
from traffic_vlm.data.dataset import Mixture, SyntheticRows
from traffic_vlm.data.questions import Question
from traffic_vlm.data.scene import CLASSES, Scene, SceneObject
from traffic_vlm.data.synthetic import render
from traffic_vlm.data.targets import TARGETS, cell_targets, class_words, coverage, resample, word_cells
from traffic_vlm.data.truths import View
from traffic_vlm.training import annotated
from traffic_vlm.training.auxiliary import (
    CellHead,
    attention_loss,
    cell_loss,
    image_loss,
    image_targets,
    recording,
    value_loss,
    wording_loss,
)
from traffic_vlm.training.collator import SupervisedCollator, fold


GRID = (4, 4)


def channel(targets: np.ndarray, name: str) -> np.ndarray:
    return targets[:, TARGETS.index(name)].reshape(GRID)


def test_coverage_is_the_share_of_each_cell():
    parts = coverage((10, 0, 30, 20), (40, 40), GRID)  # cells of 10 × 10
    assert parts[:2, 1:3].tolist() == [[1, 1], [1, 1]]
    assert parts.sum() == 4
    assert coverage((5, 5, 10, 15), (40, 40), GRID)[:2, 0].tolist() == [0.25, 0.25]


def test_resampled_cells_keep_their_area():
    cells = np.random.default_rng(0).random((14, 14))
    for grid in ((7, 7), (10, 10), (14, 14), (28, 20)):
        assert resample(cells, grid).shape == grid
        assert resample(cells, grid).mean() == pytest.approx(cells.mean())


def test_cells_hold_what_is_labelled_and_know_what_is_not():
    objects = (SceneObject("car", (0, 0, 20, 14)), SceneObject("bus", (22, 20, 24, 22)))
    scene = Scene(40, 40, objects, exhaustive=frozenset({"car", "person"}))
    targets = cell_targets(scene, GRID)
    assert channel(targets, "car").tolist() == [[1, 1, 0, 0], [-1, -1, 0, 0], [0] * 4, [0] * 4]
    assert channel(targets, "bus")[2].tolist() == [-1, -1, 1, -1]  # small, but there; elsewhere nobody knows
    assert (channel(targets, "person") == 0).all()
    assert (channel(targets, "vehicle")[0] == [1, 1, -1, -1]).all()  # the wider class, not said to be exhaustive
    assert (channel(targets, "dog") == -1).all()


def test_hidden_objects_make_cells_unknown():
    scene = Scene(40, 40, (SceneObject("car", (0, 0, 20, 20), visible=0.2),), exhaustive=frozenset({"car"}))
    assert channel(cell_targets(scene, GRID), "car")[0].tolist() == [-1, -1, 0, 0]


def test_states_and_colors_are_known_on_their_objects_only():
    light = SceneObject("traffic light", (0, 0, 10, 20), attributes={"state": "red"})
    targets = cell_targets(Scene(40, 40, (light,), exhaustive=frozenset({"traffic light"})), GRID)
    assert channel(targets, "state red")[:, 0].tolist() == [1, 1, -1, -1]
    assert channel(targets, "state green")[:, 0].tolist() == [0, 0, -1, -1]


def test_what_holds_of_the_whole_image_is_shown_by_every_cell():
    targets = cell_targets(Scene(40, 40, facts={"weather": "foggy"}), GRID)
    assert (channel(targets, "weather foggy") == 1).all() and (channel(targets, "weather rainy") == 0).all()
    assert (channel(targets, "time of day night") == -1).all()


def test_a_word_looks_at_its_objects_whatever_the_answer():
    red, far = SceneObject("car", (20, 20, 40, 40)), SceneObject("car", (0, 0, 10, 10))
    hidden = SceneObject("car", (0, 30, 10, 40), visible=0.1)
    scene = Scene(40, 40, (red, far, hidden))
    both, one = [0, 10, 11, 14, 15], [10, 11, 14, 15]
    expected = {
        Question("Is there a car?", "yes", "presence", "car", "presence/car", (red.box, far.box)): both,
        Question("Is there a car ahead?", "no", "place", "car", "place/car/center"): both,
        Question("Is there a car on the right?", "yes", "place", "car", "place/car/right", (red.box,)): both,
        Question("How many cars are there?", "2", "count", "car", "count/car/what"): both,
        # What limits a word stands after it, but for a color.
        Question("Is there a red car?", "yes", "color", "car", "color/car/any/red", (red.box,)): one,
        Question("Is there a blue car?", "no", "color", "car", "color/car/any/blue"): both,
        Question("Is there a bus?", "no", "presence", "bus", "presence/bus"): None,
        Question("Is it raining?", "no", "weather", "weather", "weather/weather/is/rainy"): None,
    }
    found = [(number, label, [*cells.nonzero()[0]]) for number, label, cells in word_cells([*expected], scene, GRID)]
    assert found == [(number, "car", cells) for number, cells in enumerate(expected.values()) if cells]


def test_a_word_looks_at_the_mask_not_at_its_whole_box():
    cells = tuple(tuple(float(i == j) for j in range(4)) for i in range(4))  # a diagonal, whose box is everything
    scene = Scene(40, 40, (SceneObject("road", (0, 0, 40, 40), cells=cells, is_instance=False),))
    question = Question("Is there a road?", "yes", "presence", "road", "presence/road", ((0, 0, 40, 40),))
    [(_, _, found)] = word_cells([question], scene, GRID)
    assert (found.reshape(GRID) == np.eye(4, dtype=bool)).all()


def test_batches_point_at_the_right_word(processor):
    rows = [dict(SyntheticRows(first_seed=seed)[0]) for seed in (3, 4, 5)]
    batch = SupervisedCollator(processor, 8, grid=(14, 14))(rows)
    assert batch["cell_targets"].shape == (3, 196, len(TARGETS))
    looked = batch["attention_targets"].any(-1).nonzero()
    assert len(looked) > 0
    nouns = {word for label in CLASSES for word in class_words(label)}
    for row, column in looked.tolist():
        assert processor.tokenizer.convert_ids_to_tokens(int(batch["input_ids"][row, column])) in nouns
        assert batch["labels"][row, column] == -100  # a word of the question, not of the answer


def test_a_question_that_compares_knows_with_what(processor):
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
        "side/bus/is/left": None,  # there is none
    }
    assert {fact: View(scene).compared(tuple(fact.split("/"))) for fact in compared} == compared

    image = Image.new("RGB", (40, 40))
    row = {"image": image, "scene": scene.to_json(), "questions": None, "answers": None, "source": "x"}
    batch = SupervisedCollator(processor, 16, grid=(14, 14))([row])
    found = {}
    for row, column in batch["value_targets"].nonzero().tolist():
        assert batch["labels"][row, column + 1] in (4, 5)  # the next word is the yes or no
        segment = batch["segment_ids"][row]
        text = processor.decode(batch["input_ids"][row, : column + 1][segment[: column + 1] == segment[column]])
        found[text] = processor.decode(batch["value_targets"][row, column])
    assert found and set(found.values()) <= {"green", "left", "right", "center", "blue", "2", "1", "0", "foggy"}
    assert all(value == "foggy" for text, value in found.items() if "weather" in text)


def test_some_questions_are_asked_again_in_other_words(processor):
    rows = [{"image": image, "scene": scene.to_json()} for image, scene in map(render, range(4))]
    batch = SupervisedCollator(processor, 16, rewordings=3)(rows)
    pairs = batch["wording_pairs"]
    assert 8 <= pairs.max() <= 4 * 3
    for number in range(1, int(pairs.max()) + 1):
        texts, answers = set(), set()
        for line, end in (pairs == number).nonzero().tolist():
            answers.add(int(batch["labels"][line, end + 1]))
            question = batch["segment_ids"][line, : end + 1] == batch["segment_ids"][line, end]
            texts.add(processor.decode(batch["input_ids"][line, : end + 1][question]))
        assert len(texts) == 2 and len(answers) == 1 and answers <= {4, 5}
    asked = batch["segment_ids"].amax(1)  # numbers of the questions about an image, which stand in some of the rows
    assert all(asked[batch["image_index"] == image].max() <= 16 for image in range(4))  # not more than before
    with pytest.raises(ValueError, match="rewordings must be fewer than questions_per_image=2, got 2"):
        SupervisedCollator(processor, 2, rewordings=2)
    without = SupervisedCollator(processor, 16)(rows)
    assert not without["wording_pairs"].any()


def test_questions_of_people_are_not_asked_in_other_words(processor):
    texts = ["Is there a car?", "Is there a bus?", "Is there a car?"]
    row = {"image": Image.new("RGB", (40, 40)), "scene": None, "questions": texts, "answers": ["yes", "no", "yes"]}
    batch = SupervisedCollator(processor, 16, rewordings=3)([row])
    assert not batch["wording_pairs"].any() and int(batch["segment_ids"].max()) == 3


def test_all_questions_of_people_come_up_in_time(processor):
    texts = [f"Is there a {name}?" for name in ("car", "bus", "truck", "person", "dog", "bicycle")]
    row = {"image": Image.new("RGB", (40, 40)), "scene": None, "questions": texts, "answers": ["no"] * 6}
    collate = SupervisedCollator(processor, 2, rewordings=1)
    seen = set()
    for _ in range(30):
        batch = collate([row])
        assert int(batch["segment_ids"].max()) == 2
        seen |= set(batch["input_ids"].flatten().tolist())
    assert seen >= set(processor.tokenizer.convert_tokens_to_ids([text.split()[-1][:-1] for text in texts]))


def test_of_a_hidden_object_no_cell_shows_the_color():
    cars = (("red", 1.0), ("blue", 0.1))
    cars = tuple(SceneObject("car", (0, 0, 20, 20), visible=part, attributes={"color": name}) for name, part in cars)
    targets = cell_targets(Scene(40, 40, cars), GRID)
    assert channel(targets, "color red")[0, 0] == 1 and channel(targets, "color blue")[0, 0] == 0


def test_wording_loss_is_the_divergence_both_ways():
    log_odds = torch.tensor([2.0, 0.5, -1.0, 0.5], requires_grad=True)
    pairs = torch.tensor([2, 1, 2, 1])  # 2.0 with -1.0; 0.5 with 0.5
    yes = log_odds.detach().sigmoid()
    one, other = (torch.stack([1 - yes[i], yes[i]]) for i in (0, 2))
    both = (one * (one / other).log()).sum() + (other * (other / one).log()).sum()
    loss = wording_loss(log_odds, pairs)
    assert loss.item() == pytest.approx(both.item() / 2)
    loss.backward()
    assert log_odds.grad[0] > 0 > log_odds.grad[2] and not log_odds.grad[1::2].any()
    assert wording_loss(log_odds[:0], pairs[:0]).item() == 0


def test_value_loss_is_that_of_the_models_own_words():
    model = tiny_model()
    torch.nn.init.zeros_(model.get_decoder().norm.weight)  # says nothing
    values = torch.tensor([7, 8, 9])
    states = torch.randn(3, model.config.text_config.hidden_size)
    vocabulary = model.config.text_config.vocab_size
    assert value_loss(model, states, values).item() == pytest.approx(math.log(vocabulary - 1))  # without [PAD]
    assert value_loss(model, states[:0], values[:0]).item() == 0
    model.get_decoder().norm.weight.data.fill_(1)
    value_loss(model, states, values).backward()
    gradient = model.lm_head.weight.grad
    assert not gradient[0].any() and gradient[1:].any(1).all()
    with recording(model) as recorded:
        model.get_decoder()(torch.tensor([[2, 9, 3]]))
    assert recorded.halfway.shape[:2] == (1, 3) and recorded.halfway.requires_grad


def test_folded_rows_hold_the_same_questions_in_fewer_tokens(processor):
    """Of one image much is asked, of the other little; what a model computes of each question stays as it was."""
    texts = [
        [f"Is there a {label}?" for label in list(CLASSES)[:9]] + ["What color is the traffic light?"],
        ["Is it dark?"],
    ]
    answers = [["no"] * 9 + ["red"], ["yes"]]
    images = np.random.default_rng(0).integers(0, 255, (2, 224, 224, 3), np.uint8)
    packed = dict(processor(images=list(images), text=texts, suffix=answers, packed=True, return_tensors="pt"))
    packed["attention_targets"] = packed["input_ids"][..., None] % torch.arange(2, 5) == 0
    batch = fold(packed)
    assert torch.equal(batch["pixel_values"], packed["pixel_values"])

    def questions(batch, images):
        """Of each image: ids, labels, positions and targets of its questions, in any order."""
        found = [[] for _ in texts]
        for row, image in enumerate(images):
            for number in batch["segment_ids"][row].unique():
                mask = batch["segment_ids"][row] == number
                if number:
                    names = ("input_ids", "labels", "position_ids", "attention_mask", "attention_targets")
                    found[image].append([batch[name][row, mask].tolist() for name in names])
        return [sorted(image) for image in found]

    assert questions(batch, batch["image_index"].tolist()) == questions(packed, range(2))
    used = packed["attention_mask"].sum()
    assert batch["attention_mask"].sum() == used
    assert used / packed["input_ids"].numel() < 0.6 < 0.8 < used / batch["input_ids"].numel()
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()

    model = tiny_model().eval()
    for one in (packed, batch):
        del one["attention_targets"]
    with torch.no_grad():
        assert model(**batch).loss.item() == pytest.approx(model(**packed).loss.item(), rel=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_where_words_look_is_recorded_with_gradients(processor, checkpointing):
    """As `attention_maps` tells it; with gradient checkpointing, too, and then with the same gradients."""
    texts = [["Is there a car?", "What color is the traffic light?"], ["Is it dark?"]]
    images = list(np.random.default_rng(0).integers(0, 255, (2, 224, 224, 3), np.uint8))
    batch = processor(images=images, text=texts, packed=True, return_tensors="pt")
    rows, columns = torch.tensor([0, 0, 1]), torch.tensor([3, 7, -2])

    def gradients(model):
        with recording(model) as recorded:
            outputs = model(**batch, use_cache=False)
        maps = recorded.mean_map((rows, columns))
        (maps.square().sum() + outputs.logits[..., 1:].square().mean()).backward()
        return maps, [weight.grad for weight in model.parameters()]

    expected = tiny_model().train()
    maps, wanted = gradients(expected)
    torch.testing.assert_close(maps, expected.attention_maps(**batch)[rows, columns].flatten(1), rtol=1e-4, atol=1e-6)
    if checkpointing:
        model = tiny_model().train()
        model.gradient_checkpointing_enable()
        torch.testing.assert_close(gradients(model), (maps, wanted))


def test_without_questions_there_are_cells_only(processor):
    rows = [SyntheticRows()[seed] for seed in range(2)]
    batch = SupervisedCollator(processor, 0, grid=(14, 14))(rows)
    assert set(batch) == {"pixel_values", "input_ids", "cell_targets"}
    assert batch["input_ids"].tolist() == [[2], [2]]


def focal(probability: float) -> float:
    """Of a cell whose true answer has this probability."""
    return -((1 - probability) ** 2) * math.log(probability)


def test_cell_loss_weighs_what_is_rare_as_what_is_common():
    """Two targets, in 1 and in 2 of 4 cells, each cell at P = 0.75 of holding them; and one that nobody knows."""
    targets = torch.tensor([[[1, 1, -1], [0, 1, -1], [0, 0, -1], [0, 0, -1]]], dtype=torch.int8)
    logits = torch.full(targets.shape, math.log(3.0))
    expected = ((focal(0.75) + 3 * focal(0.25)) / 1 + (2 * focal(0.75) + 2 * focal(0.25)) / 2) / 2
    assert cell_loss(logits, targets).item() == pytest.approx(expected)
    assert cell_loss(logits, torch.full_like(targets, -1)).item() == 0


def test_the_cell_loss_leaves_facts_of_the_whole_image_to_the_image_loss():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9, len(TARGETS), generator=draw)
    targets = torch.randint(-1, 2, logits.shape, generator=draw)
    changed = targets.clone()
    changed[..., TARGETS.index("time of day night")] = 1 - targets[..., TARGETS.index("time of day night")].abs()
    assert cell_loss(logits, targets) == cell_loss(logits, changed)
    changed[..., TARGETS.index("value 130")] = 1 - targets[..., TARGETS.index("value 130")].abs()
    assert cell_loss(logits, targets) != cell_loss(logits, changed)


def test_image_targets_are_no_only_where_every_cell_is_known():
    cells = torch.tensor([[[1, 0, 0], [0, 0, -1]], [[-1, -1, 0], [1, 0, 0]]], dtype=torch.int8)
    assert image_targets(cells).tolist() == [[1, 0, -1], [1, -1, 0]]


def test_image_loss_weighs_yes_as_no():
    targets = torch.tensor([[1, -1], [0, -1], [0, -1], [0, -1]])
    logits = torch.full(targets.shape, math.log(3.0))
    assert image_loss(logits, targets).item() == pytest.approx(-(math.log(0.75) + math.log(0.25)) / 2)
    assert image_loss(logits, torch.full_like(targets, -1)).item() == 0


def test_the_cell_head_finds_one_cell_among_many():
    head = CellHead(2)
    logits = torch.full((2, 9, len(TARGETS)), -20.0)
    logits[1, 4] = 5.0
    assert (head.image_logits(logits)[0] < -15).all()
    torch.testing.assert_close(head.image_logits(logits)[1], torch.full((len(TARGETS),), 5.0))
    head.image_bias.data.fill_(2.0)
    torch.testing.assert_close(head.image_logits(logits)[1], torch.full((len(TARGETS),), 7.0))


def test_annotated_tokens_are_what_a_tower_makes_of_its_cells_on_average():
    """A tower whose tokens are a linear map of the cells, and noise of no mean: the map is found."""
    draw = torch.Generator().manual_seed(0)
    cells = (torch.rand(200, 16, len(TARGETS), generator=draw) < 0.3).to(torch.int8)
    truth = torch.randn(len(TARGETS), 6, generator=draw)
    noisy = cells.float() @ truth + torch.randn(200, 16, 6, generator=draw)

    class Tower(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, numbers):
            assert not self.training
            return BaseModelOutput(last_hidden_state=noisy[numbers])

    tower = Tower().train()
    batches = [{"pixel_values": part, "cell_targets": cells[part]} for part in torch.arange(200).split(50)]
    tokens = annotated.fit(tower, batches, GRID)
    assert tower.training
    shown = cells[:2].clone()
    shown[0, 0, 0] = -1  # unknown counts as not there
    expected = shown.clamp(min=0).float() @ truth
    assert (tokens(shown) - expected).abs().mean() < 0.15


def test_annotations_give_way_step_by_step():
    shares = [annotated.share_of_annotations(step, (2, 6)) for step in range(8)]
    assert shares == [1, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    assert [annotated.share_of_annotations(step, (0, 0)) for step in (0, 5)] == [0, 0]


def test_attention_loss_is_the_attention_that_misses():
    maps = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.9, 0.0]])
    cells = torch.tensor([[True, True, False], [False, True, True]])
    assert attention_loss(maps, cells).item() == pytest.approx(-(math.log(0.75) + math.log(0.9)) / 2)
    assert attention_loss(maps[:0], cells[:0]).item() == 0


def test_a_mixture_keeps_its_shares_and_changes_with_the_epoch_only():
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
def test_a_mixture_refuses_weights_that_do_not_fit(weights):
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

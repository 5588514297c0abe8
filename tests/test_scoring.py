"""Encoded images, yes/no scores and attention maps."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tiny import (
    TINY_TOWER,
    close,
    count_calls,
    each_attention,
    new_process,
    pack,
    random_ids,
    random_pixels,
    save_folder,
    tiny_model,
)
from traffic_vlm import scoring_traffic_vlm
from traffic_vlm.checks_traffic_vlm import packed_mask
from traffic_vlm.scoring_traffic_vlm import EncodedImages


def ask_alone(model, question, pixels):
    [probability] = model.score_yes_no(question[None], pixels)
    return probability


# P(yes)


@torch.no_grad()
def test_yes_probability_is_a_softmax_of_two_logits_at_the_last_token():
    model = tiny_model(yes_no_temperature=2.5)
    ids, pixels = random_ids(1, 6), random_pixels(1)
    logits = model(ids, pixels).logits[0, -1]
    yes, no = logits[4].exp() ** (1 / 2.5), logits[5].exp() ** (1 / 2.5)
    [scores] = model.score_yes_no(ids, pixels)
    assert scores.dtype == torch.float32
    close(scores, (yes / (yes + no))[None])
    model.lm_head.weight.data[[4, 5]] = model.lm_head.weight.data[[5, 4]]  # swap [YES] and [NO]
    close(model.score_yes_no(ids, pixels)[0], 1 - scores, 1e-5)


@torch.no_grad()
def test_scores_use_the_last_real_token(model):
    question, pixels = random_ids(5), random_pixels(1)
    expected = ask_alone(model, question, pixels)
    for columns in ((3, 0), (0, 3)):
        row = nn.functional.pad(question, columns)[None]
        close(model.score_yes_no(row, pixels)[0], expected)
        close(model.score_yes_no(row, pixels, attention_mask=(row != 0).long())[0], expected)


def test_answers_after_questions_are_ignored(model, processor):
    texts, options = ["Is there a car?", "Is there a bus on the left?"], {"return_tensors": "pt"}
    pixels = random_pixels(2)
    expected = model.score_yes_no(**processor(text=texts, **options), pixel_values=pixels)
    for packed in (False, True):
        text, answers = ([[one] for one in texts], [["yes"], ["no"]]) if packed else (texts, ["yes", "no"])
        inputs = processor(text=text, suffix=answers, packed=packed, **options)
        for scores, alone in zip(model.score_yes_no(**inputs, pixel_values=pixels), expected):
            close(scores, alone)


@given(lengths=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=5), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
@torch.no_grad()
def test_packed_scores_equal_separate_questions(lengths):
    model, pixels = tiny_model(), random_pixels(len(lengths))
    questions = [[random_ids(n, seed=10 * i + j) for j, n in enumerate(row)] for i, row in enumerate(lengths)]
    width = max(sum(row) for row in lengths)
    rows = [pack(row, width - sum(map(len, row))) for row in questions]
    max_questions = max(map(len, lengths))
    for row in rows:
        missing = max_questions - row["question_ends"].shape[1]
        row["question_ends"] = nn.functional.pad(row["question_ends"], (0, missing), value=-1)
    scores = model.score_yes_no(
        **{name: torch.cat([row[name] for row in rows]) for name in rows[0]}, pixel_values=pixels
    )
    assert len(scores) == len(lengths)
    for i, row in enumerate(questions):
        close(scores[i], torch.cat([ask_alone(model, question, pixels[i : i + 1]) for question in row]), 1e-5)


@torch.no_grad()
def test_unpacked_rows_are_grouped_by_image(model):
    ids, pixels, index = random_ids(4, 5), random_pixels(3), torch.tensor([2, 0, 2, 0])
    scores = model.score_yes_no(ids, pixels, image_index=index)
    assert [len(row) for row in scores] == [2, 0, 2]
    close(scores[2][1], ask_alone(model, ids[2], pixels[2:])[0])
    close(scores[0][1], ask_alone(model, ids[3], pixels[:1])[0])


@torch.no_grad()
def test_many_questions_fill_several_rows(model, processor):
    words = ("a car", "a bus on the left", "a truck", "any pedestrian on the road", "a traffic light")
    texts = [[f"Is there {words[i % 5]}?" for i in range(150)], [f"Is there {words[i % 5]}?" for i in range(20)]]
    inputs = processor(text=texts, packed=True, return_tensors="pt")
    assert inputs["input_ids"].shape[1] <= 512
    assert inputs["image_index"].tolist() == [0, 0, 0, 1]
    pixels = random_pixels(2)
    scores = model.score_yes_no(**inputs, pixel_values=pixels)
    assert [len(row) for row in scores] == [150, 20]
    for image, index in ((0, 0), (0, 77), (0, 149), (1, 19)):
        ids = processor(text=texts[image][index], return_tensors="pt")["input_ids"][0]
        close(scores[image][index], ask_alone(model, ids, pixels[image : image + 1])[0])


@pytest.mark.parametrize("shift", [-1, 7])
def test_segment_ids_may_be_any_different_numbers(model, shift):
    row, pixels = pack([random_ids(5, seed=i) for i in range(120)]), random_pixels(1)
    [expected] = model.score_yes_no(**row, pixel_values=pixels)
    [scores] = model.score_yes_no(**(row | {"segment_ids": row["segment_ids"] + shift}), pixel_values=pixels)
    assert torch.equal(scores, expected)


@torch.no_grad()
def test_packed_rows_can_share_and_skip_images(model):
    questions, pixels = [random_ids(4, seed=i) for i in range(4)], random_pixels(3)
    rows = [pack(questions[:2]), pack(questions[2:])]
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    scores = model.score_yes_no(**batch, pixel_values=pixels, image_index=torch.tensor([2, 0]))
    assert [len(row) for row in scores] == [2, 0, 2]
    close(scores[2], torch.cat([ask_alone(model, question, pixels[2:]) for question in questions[:2]]))
    scores = model.score_yes_no(**batch, pixel_values=pixels, image_index=torch.tensor([1, 1]))
    close(scores[1], torch.cat([ask_alone(model, question, pixels[1:2]) for question in questions]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"question_ends": torch.tensor([[3]])}, r"questions start at \[0, 4\], got \[3\]"),
        ({"question_ends": torch.tensor([[3, 9]])}, r"\[3, 9\]"),
        ({"question_ends": torch.tensor([[2, 3]])}, r"\[2, 3\]"),
    ],
)
def test_invalid_question_ends_raise(model, change, named):
    row = pack([random_ids(4), random_ids(3)]) | change
    with pytest.raises(ValueError, match=named):
        model.score_yes_no(**row, pixel_values=random_pixels(1))


def test_too_long_packed_question_raises(model):
    with pytest.raises(ValueError, match=r"129 tokens.*128"):
        model.score_yes_no(**pack([random_ids(4), random_ids(129)]), pixel_values=random_pixels(1))


@torch.no_grad()
def test_probabilities_and_maps_are_float32_in_a_bfloat16_model(model):
    half = copy.deepcopy(model).bfloat16()
    ids, pixels = random_ids(2, 5), random_pixels(2)
    logits = half(ids, pixels).logits[:, -1]
    expected = (logits[:, 4].double() - logits[:, 5].double()).sigmoid()
    close(torch.cat(half.score_yes_no(ids, pixels)).double(), expected, 1e-6)
    maps = half.attention_maps(ids, pixels)
    assert maps.dtype == torch.float32
    close(maps.sum((-1, -2)), torch.ones(2, 5), 1e-5)


def test_threads_can_share_one_model(model):
    """Maps are recorded by hooks, which run in the forward passes of all threads."""
    ids, pixels = random_ids(2, 6), random_pixels(2)
    expected_maps, expected_scores = model.attention_maps(ids, pixels), model.score_yes_no(ids, pixels)
    with ThreadPoolExecutor(4) as pool:
        maps = [pool.submit(model.attention_maps, ids, pixels) for _ in range(12)]
        scores = [pool.submit(model.score_yes_no, ids, pixels) for _ in range(12)]
    assert all(torch.equal(future.result(), expected_maps) for future in maps)
    assert all(torch.equal(torch.cat(future.result()), torch.cat(expected_scores)) for future in scores)


def test_many_questions_encode_the_image_once():
    model = tiny_model()
    projections = [layer.cross_attn.k_proj for layer in model.model.text_model.layers]
    calls = [count_calls(module) for module in (model.model.vision_tower, *projections)]
    row = pack([random_ids(6, seed=i) for i in range(256)])
    assert len(model.score_yes_no(**row, pixel_values=random_pixels(1))[0]) == 256
    assert [len(each) for each in calls] == [1, 1, 1]  # the tower, and the keys of two layers


def test_logits_are_computed_at_question_ends_only(model):
    seen = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    model.score_yes_no(**pack([random_ids(6), random_ids(5), random_ids(9)]), pixel_values=random_pixels(1))
    hook.remove()
    assert seen == [(3, 32)]


@pytest.mark.parametrize("missing", ["question_ends", "position_ids"])
def test_packed_rows_without_question_ends_or_positions_raise(model, missing):
    row = pack([random_ids(4), random_ids(3)])
    del row[missing]
    with pytest.raises(ValueError, match=missing):
        model.score_yes_no(**row, pixel_values=random_pixels(1))


def test_scores_without_an_image_raise(model):
    with pytest.raises(ValueError, match="pixel_values"):
        model.score_yes_no(random_ids(1, 4))


@pytest.mark.parametrize("packed", [False, True])
def test_questions_that_end_in_eos_raise(model, processor, packed):
    pixels, ids = random_pixels(1), processor.tokenizer("Is it night?", return_tensors="pt")["input_ids"]
    assert ids[0, -1] == 3
    row = pack([random_ids(4), ids[0]]) if packed else {"input_ids": ids}
    with pytest.raises(ValueError, match=r"ends in \[EOS\] \(3\)"):
        model.score_yes_no(**row, pixel_values=pixels)
    padded = nn.functional.pad(ids, (2, 0))
    with pytest.raises(ValueError, match=r"ends in \[EOS\]"):
        model.generate(padded, pixel_values=pixels, max_new_tokens=2)
    assert len(model.score_yes_no(ids[:, :-1], pixels)) == 1


# Encoded images


@torch.no_grad()
def test_encoded_images_replace_pixels(model):
    pixels, ids = random_pixels(3), random_ids(3, 5)
    encoded = model.encode_images(pixels)
    assert len(encoded) == 3
    assert [tuple(key.shape) for key, _ in encoded.key_values] == [(3, 2, 256, 8)] * 2
    assert torch.equal(model(ids, encoded_images=encoded).logits, model(ids, pixels).logits)
    assert torch.equal(model.score_yes_no(ids, encoded_images=encoded)[1], model.score_yes_no(ids, pixels)[1])
    for index in (1, slice(1, 2), [1], torch.tensor([1])):
        close(model(ids[1:2], encoded_images=encoded[index]).logits, model(ids[1:2], pixels[1:2]).logits)
    for index in (np.int64(1), torch.tensor(1), np.array([1]), [np.int64(-2)]):
        assert len(encoded[index]) == 1
        close(encoded[index].pixel_values, pixels[1:2])
    assert len(encoded[-1]) == 1
    assert len(encoded[[]]) == len(encoded[np.array([])]) == len(encoded[:0]) == 0
    assert [len(image) for image in encoded] == [1, 1, 1]
    for index in (3, [0, 3], torch.tensor([3])):
        with pytest.raises(IndexError, match="index 3 is out of range for 3 images"):
            encoded[index]
    for index in (1.0, [True, False, True], torch.tensor([[1]])):
        with pytest.raises(TypeError, match="an integer, a slice or a list of integers, got"):
            encoded[index]


@torch.no_grad()
def test_joined_encoded_images(model):
    pixels, ids = random_pixels(3), random_ids(3, 5)
    parts = [model.encode_images(pixels[2:]), model.encode_images(pixels[:2])]
    joined = EncodedImages.join(parts)
    order = torch.tensor([2, 0, 1])
    assert len(joined) == 3 and torch.equal(joined.pixel_values, pixels[order])
    close(model(ids, encoded_images=joined).logits, model(ids, pixels[order]).logits)
    mask = torch.ones(1, 256)
    mask[:, :50] = 0
    hidden = [model.encode_images(pixels[i : i + 1], mask) for i in range(2)]
    together, separate = model.encode_images(pixels[:2], mask.expand(2, -1)), EncodedImages.join(hidden)
    close(model(ids[:2], encoded_images=separate).logits, model(ids[:2], encoded_images=together).logits)
    with pytest.raises(ValueError, match="no encoded images"):
        EncodedImages.join([])
    with pytest.raises(ValueError, match="with and without an attention mask"):
        EncodedImages.join([parts[0], hidden[0]])
    other = tiny_model(seed=1).encode_images(pixels[:1])
    for wrong in (other, replace(parts[0], weights_version=None)):
        with pytest.raises(ValueError, match="different models"):
            EncodedImages.join([parts[0], wrong])
    assert EncodedImages.join([replace(part, pixel_values=None) for part in parts]).pixel_values is None


@each_attention
@torch.no_grad()
def test_encoded_images_of_changed_weights_raise(attention):
    model, pixels, ids = tiny_model(text=attention), random_pixels(1), random_ids(1, 4)
    cross_attention = model.get_decoder().layers[0].cross_attn
    for part in (model.model.vision_tower, model.model.projector, *cross_attention.image_projections):
        encoded = model.encode_images(pixels)
        for parameter in part.parameters():
            parameter.mul_(1.5).add_(1e-3)
        with pytest.raises(ValueError, match="changed"):
            model(ids, encoded_images=encoded)


@torch.no_grad()
def test_encoded_images_of_moved_batch_norm_statistics_raise(monkeypatch):
    said = []
    monkeypatch.setattr(scoring_traffic_vlm.logger, "warning_once", said.append)
    model, pixels = tiny_model(vision=TINY_TOWER | {"model_type": "traffic_vlm_vision"}), random_pixels(2)
    encoded, ids = model.encode_images(pixels), random_ids(2, 4)
    assert model.score_yes_no(ids, encoded_images=encoded) and not said
    model.train().encode_images(pixels)
    assert len(said) == 1 and "Call model.eval() first" in said[0]
    with pytest.raises(ValueError, match="changed"):
        model.eval().score_yes_no(ids, encoded_images=encoded)


def test_encoded_images_serve_other_processes_with_the_same_weights(tmp_path):
    model, pixels, ids = tiny_model(), random_pixels(1), random_ids(1, 4)
    save_folder(model, tmp_path / "model")
    torch.save((pixels, ids), tmp_path / "inputs.pt")
    load = f"""
        from transformers import AutoModel
        model = AutoModel.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True)
        pixels, ids = torch.load({str(tmp_path / "inputs.pt")!r})
        images = {str(tmp_path / "images.pt")!r}
    """
    save = """
        torch.save(model.encode_images(pixels), images)
    """
    new_process(load + save, tmp_path)
    use = """
        images = torch.load(images)
        print(float(model.score_yes_no(ids, encoded_images=images)[0]))
        torch.nn.init.ones_(model.model.projector.bias)
        try:
            model.score_yes_no(ids, encoded_images=images)
        except ValueError as error:
            print(error)
    """
    score, error = new_process(load + use, tmp_path).splitlines()[-2:]
    assert float(score) == pytest.approx(float(model.score_yes_no(ids, pixels)[0]), abs=1e-6)
    assert "from another model, or from weights that have changed" in error


def test_encoded_images_of_other_offloaded_weights_raise():
    """Offloaded weights cannot be read between passes, so the digest is of one model only."""
    accelerate = pytest.importorskip("accelerate")
    models, ids = [tiny_model(seed) for seed in (0, 1)], random_ids(1, 4)
    for model in models:
        accelerate.cpu_offload(model, torch.device("cpu"))
    encoded = models[0].encode_images(random_pixels(1))
    assert len(models[0].score_yes_no(ids, encoded_images=encoded)) == 1
    with pytest.raises(ValueError, match="another model"):
        models[1].score_yes_no(ids, encoded_images=encoded)


def test_a_digest_is_of_all_weights_that_encode_images():
    version = tiny_model().model.weights_version()
    assert tiny_model().model.weights_version() == version  # by content, not by object
    model = copy.deepcopy(tiny_model().double()).model
    assert model.weights_version() != version
    assert model.float().weights_version() == version  # moved there and back
    with torch.no_grad():
        model.text_model.layers[0].self_attn.q_proj.weight.add_(1.0)  # reads no image
        assert model.weights_version() == version
        next(model.vision_tower.parameters()).add_(1.0)
    assert model.weights_version() != version
    model.load_state_dict(tiny_model().model.state_dict())
    assert model.weights_version() == version


def test_encoded_images_of_another_adapter_raise():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["k_proj", "v_proj", "q_proj"], init_lora_weights=False)
    model, ids = peft.get_peft_model(tiny_model(), config).eval(), random_ids(1, 4)
    model.add_adapter("other", config)
    layer = model.base_model.model.model.text_model.layers[0].cross_attn.k_proj

    def is_refused():
        try:
            model.score_yes_no(ids, encoded_images=encoded)
        except ValueError as error:
            assert "changed" in str(error)
            return True
        return False

    encoded = model.encode_images(random_pixels(1))
    with model.disable_adapter():
        assert is_refused()
    assert not is_refused()
    model.set_adapter("other")
    assert is_refused()
    model.set_adapter("default")
    layer.scale_layer(0.5)
    assert is_refused()
    layer.unscale_layer(0.5)
    assert not is_refused()
    model.merge_adapter()
    assert is_refused()


@torch.no_grad()
def test_images_encoded_under_autocast_work_without_it(model):
    pixels, ids = random_pixels(1), random_ids(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        encoded = model.encode_images(pixels)
        half = model(ids, encoded_images=encoded).logits
    assert encoded.key_values[0][0].dtype == torch.bfloat16
    assert model(ids, encoded_images=encoded).logits.dtype == torch.float32
    assert half.isfinite().all()


def test_encoded_images_keep_no_graph_and_are_not_copied(model):
    encoded = model.encode_images(random_pixels(1))
    assert not encoded.key_values[0][0].requires_grad
    assert copy.deepcopy(encoded) is encoded
    loaded = pickle.loads(pickle.dumps(encoded.to("cpu")))
    ids = random_ids(1, 4)
    assert torch.equal(model(ids, encoded_images=loaded).logits, model(ids, encoded_images=encoded).logits)


@torch.no_grad()
def test_hidden_image_tokens_stay_hidden(model):
    pixels, ids, mask = random_pixels(2), random_ids(3, 5), torch.ones(2, 256, dtype=torch.long)
    mask[1, 50:] = 0
    index = torch.tensor([1, 0, 1])
    expected = model(ids, pixels, image_index=index, encoder_attention_mask=mask).logits
    encoded = model.encode_images(pixels, mask)
    close(model(ids, encoded_images=encoded, image_index=index).logits, expected)
    bare = model.encode_images(pixels)
    close(model(ids, encoded_images=bare, image_index=index, encoder_attention_mask=mask).logits, expected)
    assert not torch.allclose(model(ids, pixels, image_index=index).logits, expected, atol=1e-3)
    row = pack([ids[0], ids[2]])
    scores = model.score_yes_no(**row, encoded_images=encoded[1])
    close(scores[0], model.score_yes_no(ids, encoded_images=encoded, image_index=index)[1], 1e-5)


@torch.no_grad()
def test_image_features_are_the_projected_tokens(model):
    pixels = random_pixels(2)
    tokens = model.get_image_features(pixels).pooler_output
    assert tokens.shape == (2, 256, 32)
    tower = model.model.vision_tower(pixels).last_hidden_state
    close(tokens, tower @ model.model.projector.weight.T + model.model.projector.bias, 1e-4)


# Attention maps


@each_attention
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_maps_equal_the_attention_of_the_model(attention, implementation):
    model = tiny_model(text=attention)
    ids, pixels = random_ids(2, 5), random_pixels(2)
    mask = torch.ones(2, 256, dtype=torch.long)
    mask[0, 100:] = 0
    model.set_attn_implementation("eager")
    output = model(ids, pixels, output_attentions=True, encoder_attention_mask=mask)
    model.set_attn_implementation(implementation)
    encoded = model.encode_images(pixels, mask)
    maps = model.attention_maps(ids, encoded_images=encoded, layers=[1], heads=[0, 3])
    assert maps.shape == (2, 5, 16, 16)
    close(maps.flatten(2), output.cross_attentions[1][:, [0, 3]].mean(1))
    all_hidden = torch.zeros(2, 256, dtype=torch.long)
    assert (model.attention_maps(ids, pixels, encoder_attention_mask=all_hidden) == 0).all()
    swapped = model.attention_maps(
        ids[[1, 0]], encoded_images=encoded, image_index=torch.tensor([1, 0]), layers=[1], heads=[0, 3]
    )
    close(swapped[[1, 0]], maps)
    every = torch.stack(output.cross_attentions).mean((0, 2))
    close(model.attention_maps(ids, pixels, encoder_attention_mask=mask).flatten(2), every)
    close(every.sum(-1), torch.ones(2, 5))


def test_maps_remove_their_hooks():
    model = tiny_model()
    with pytest.raises(ValueError, match="vocabulary"):
        model.attention_maps(torch.tensor([[600]]), random_pixels(1))
    assert [len(layer.cross_attn._forward_hooks) for layer in model.model.text_model.layers] == [0, 0]


@torch.no_grad()
def test_maps_of_packed_and_padded_rows(model):
    questions, pixels = [random_ids(4, seed=1), random_ids(3, seed=2)], random_pixels(1)
    maps = model.attention_maps(**pack(questions, padding=2), pixel_values=pixels)
    assert (maps[0, :2] == 0).all()
    close(maps[0, 2:6], model.attention_maps(questions[0][None], pixels)[0])
    close(maps[0, 6:], model.attention_maps(questions[1][None], pixels)[0])
    index = torch.tensor([1, 0])
    both = model.attention_maps(random_ids(2, 4), random_pixels(2), image_index=index)
    close(both[:1], model.attention_maps(random_ids(2, 4)[:1], random_pixels(2)[1:]))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "pixel_values"),
        ({"pixel_values": random_pixels(1), "layers": [2]}, r"layers.*\[0, 2\).*\[2\]"),
        ({"pixel_values": random_pixels(1), "heads": [-1]}, r"heads.*\[0, 4\).*\[-1\]"),
        ({"pixel_values": random_pixels(1), "heads": []}, "at least one"),
    ],
)
def test_maps_with_bad_input_raise(model, arguments, named):
    with pytest.raises(ValueError, match=named):
        model.attention_maps(random_ids(1, 4), **arguments)


def test_packed_mask_of_an_example():
    segments = torch.tensor([[1, 1, 1, 2, 2]])
    real = torch.tensor([[0, 1, 1, 1, 1]])  # padding within question 1
    seen = packed_mask(segments, real, 6)  # with one column of a static cache beyond the row
    rows = ["000000", "010000", "011000", "000100", "000110"]
    assert ["".join(map(str, row)) for row in seen[0, 0].int().tolist()] == rows
    assert packed_mask(segments, None, 5)[0, 0, 1].int().tolist() == [1, 1, 0, 0, 0]

"""The processor: prompts, packing, labels, pixels, templates, and errors for bad input."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from traffic_vlm.processing_traffic_vlm import fill_rows


CAR, BUS, RED = "Is there a car?", "Is there a bus ahead?", "What color is the traffic light?"
BLANK = Image.new("RGB", (40, 30), (200, 100, 50))
SOS, EOS, YES, NO = 2, 3, 4, 5


def ids_of(processor, text):
    return processor.tokenizer(text, add_special_tokens=False)["input_ids"]


# --- prompts ---


def test_every_ending_gives_the_same_prompt(processor):
    expected = [[SOS, *ids_of(processor, "is there a car ?")]]
    for ending in ("", "?", "!", " ? ? ", "…", "\n", "？", "?\u00a0"):
        assert processor(text="Is there a car" + ending)["input_ids"] == expected, ending
    assert processor(text="[SOS] " + CAR)["input_ids"] == expected  # as chat templates write it


def test_signs_are_unknown_words_but_not_brackets(processor):
    assert processor.unknown_words("Are there > 3 cars, or \u2264 3?") == [">", "\u2264"]
    assert processor.unknown_words("Is <obj> a traffic-light (red)?") == []


def test_the_length_limit_applies_to_each_question(processor):
    fits = "car " * 126  # with [SOS] and "?"
    assert len(processor(text=fits)["input_ids"][0]) == 128
    assert processor(text=[[fits, fits]], packed=True)["input_ids"].shape == (1, 256)
    for call, message in (
        ({"text": fits + "car"}, r"question 0 has 129 tokens and 0 of its answer, at most 128.*car car"),
        ({"text": fits, "suffix": "yes"}, r"128 tokens and 2 of its answer.*128"),
        ({"text": ["a car", CAR], "suffix": ["yes", "car " * 128]}, "question 1 has 6 tokens and 129 of its"),
    ):
        with pytest.raises(ValueError, match=message):
            processor(**call)


def test_truncation_keeps_the_question_mark_and_the_answer(processor):
    for suffix, end in ((None, "?"), ("a bus", "? a bus")):
        end = processor.tokenizer.convert_tokens_to_ids(end.split()) + ([EOS] if suffix else [])
        [ids] = processor(text="car " * 300, suffix=suffix, truncation=True)["input_ids"]
        assert len(ids) == 128 and ids[0] == SOS and ids[-len(end) :] == end
    with pytest.raises(ValueError, match="128"):
        processor(text=CAR, suffix="car " * 128, truncation=True)


def test_unknown_words_are_named_once_as_typed(processor):
    text = ["Is there a Zyxgarf, or a QUUXO?", "Is the zyxgarf red?"]
    assert processor.unknown_words(text) == ["Zyxgarf", "QUUXO", "zyxgarf"]
    assert processor.unknown_words(CAR) == processor.unknown_words([]) == processor.untaught_words([]) == []
    with pytest.warns(UserWarning, match="'Zyxgarf', 'QUUXO', 'zyxgarf'") as caught:
        ids = processor(text=text, return_tensors="pt")["input_ids"]
    assert len(caught) == 1 and caught[0].filename == __file__
    assert (ids == processor.tokenizer.unk_token_id).sum() == 3
    for call in ({"text": text}, {"text": CAR, "suffix": "a Zyxgarf"}):
        with pytest.raises(ValueError, match="words that are not in the vocabulary: 'Zyxgarf'"):
            processor(**call, on_unknown="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        processor(text=text, on_unknown="ignore")
        processor(text=[CAR, BUS, RED])


# --- what a call returns ---


def test_one_question_per_row(processor):
    out = processor(images=[BLANK, BLANK], text=[[CAR, BUS], [RED]], return_tensors="pt")
    assert set(out) == {"input_ids", "attention_mask", "pixel_values", "image_index"}
    assert out["input_ids"].shape == out["attention_mask"].shape == (3, 8)
    assert out["pixel_values"].shape == (2, 3, 256, 256) and out["pixel_values"].dtype == torch.float32
    assert out["image_index"].tolist() == [0, 0, 1] and out["image_index"].dtype == torch.int64
    for question, ids, mask in zip([CAR, BUS, RED], out["input_ids"], out["attention_mask"]):
        assert ids[mask == 1].tolist() == processor(text=question)["input_ids"][0]
        assert not ids[mask == 0].any()
    later = processor(text=[[CAR, BUS], [RED]], return_tensors="pt")  # for images encoded earlier
    assert later["image_index"].tolist() == [0, 0, 1] and "pixel_values" not in later
    assert set(processor(images=BLANK, return_tensors="pt")) == {"pixel_values"}


@pytest.mark.parametrize(("count", "text"), [(1, CAR), (1, [CAR]), (1, [[CAR]]), (2, [CAR, BUS]), (2, [[CAR], [BUS]])])
def test_one_question_per_image_needs_no_index(processor, count, text):
    for images in ([BLANK] * count, [[BLANK]] * count):  # chat templates nest images
        out = processor(images=images, text=text, return_tensors="pt")
        assert set(out) == set(processor.model_input_names) == {"input_ids", "attention_mask", "pixel_values"}


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({"padding": "max_length", "max_length": 50}, 50),
        ({"padding": "max_length", "padding_side": "right"}, 128),
    ],
)
def test_padding(processor, options, width):
    out = processor(text=[CAR, BUS], return_tensors="pt", **options)
    real = out["attention_mask"].bool()
    assert out["input_ids"].shape == (2, width) and real.sum(1).tolist() == [6, 7]
    assert real[:, 0 if "padding_side" in options else -1].all()


def test_labels_of_an_example(processor):
    out = processor(text=["a car", "bus"], suffix=[" Yes ", "a bus"], return_tensors="pt")
    a, car, bus, mark = ids_of(processor, "a car bus ?")
    assert out["input_ids"].tolist() == [[SOS, a, car, mark, YES, EOS], [SOS, bus, mark, a, bus, EOS]]
    assert out["labels"].tolist() == [[-100] * 4 + [YES, EOS], [-100] * 3 + [a, bus, EOS]]
    out = processor(text=["a car", "bus"], suffix=["a bus", "no"], return_tensors="pt")
    assert out["labels"].tolist()[1] == [-100] * 5 + [NO, EOS]  # those of padding are ignored


SENTENCE = st.lists(st.sampled_from("is there a car bus red light ahead the two".split()), min_size=1, max_size=6)
ROWS = st.lists(st.lists(SENTENCE.map(" ".join), min_size=1, max_size=4), min_size=1, max_size=4)


@given(rows=ROWS, side=st.sampled_from(["left", "right"]), answered=st.booleans(), limit=st.sampled_from([4, 12, 512]))
@settings(max_examples=30, deadline=None)
def test_packed_segments_equal_unpacked_rows(processor, rows, side, answered, limit):
    suffix = [["yes" if "car" in question else question for question in row] for row in rows] if answered else None
    alone = processor(text=rows, suffix=suffix)
    options = {"packed": True, "padding_side": side, "row_tokens": limit}
    packed = processor(text=rows, suffix=suffix, **options)
    image_index = packed.get("image_index", torch.arange(len(rows))).tolist()
    found = {name: [] for name in ("input_ids", "labels") if name in packed}
    images, texts = [], iter([question for row in rows for question in row])
    for index, segments in enumerate(packed["segment_ids"]):
        assert (segments == 0).equal(packed["attention_mask"][index] == 0)
        count = int(segments.max())
        assert count == 1 or int((segments > 0).sum()) <= limit
        images += [image_index[index]] * count
        for question in range(count):
            columns = (segments == question + 1).nonzero().flatten()
            assert columns.diff().eq(1).all()
            assert packed["position_ids"][index, columns].tolist() == list(range(len(columns)))
            [prompt] = processor(text=next(texts))["input_ids"]
            assert packed["question_ends"][index, question] == columns[0] + len(prompt) - 1
            for name in found:
                found[name].append(packed[name][index, columns].tolist())
        assert (packed["question_ends"][index, count:] == -1).all()
    assert all(found[name] == alone[name] for name in found)
    assert images == [index for index, row in enumerate(rows) for _ in row]


def test_questions_fill_a_row_up_to_its_width():
    assert fill_rows([(0, 4), (0, 8), (0, 1), (1, 1)], 12) == [[0, 1], [2], [3]]


# --- pixels ---


def test_pixels_are_those_of_pillow(processor):
    """Resized to 256 x 256 without cropping, bicubic, scaled to -1..1; also images of 1 or 3 rows."""
    generator = np.random.default_rng(2)
    for height, width in [(480, 640), (256, 256), (3, 5), (1, 1), (1, 300)]:
        picture = Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
        pixels = processor(images=picture, return_tensors="pt")["pixel_values"]
        expected = np.asarray(picture.resize((256, 256), Image.Resampling.BICUBIC), dtype=np.float64) / 127.5 - 1
        np.testing.assert_allclose(pixels[0].permute(1, 2, 0), expected, atol=1e-6)
        batch = np.asarray(picture)[None]
        assert torch.equal(processor(images=batch, return_tensors="pt")["pixel_values"], pixels)


# --- bad input ---


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"images": BLANK, "text": [CAR, BUS]}, ValueError, r"`text` is about 2 images, but `images` holds 1.*nested"),
        ({"images": [[BLANK, BLANK]], "text": [CAR]}, ValueError, r"row 0 of `images` holds 2 images"),
        ({"text": "[SOS] ?"}, ValueError, r"`text` has an empty string: '\[SOS\] \?'"),
        ({"text": b"car" * 10_000}, TypeError, r"`text` must hold strings, got bytes: b'carcar"),
        ({"text": "x" * 10**7}, ValueError, r"`text` has 10,000,000 characters, at most 6,400"),
        ({"text": [[CAR, BUS]], "suffix": [["yes"]]}, ValueError, r"`suffix` must have the shape of `text`"),
        ({"text": CAR, "on_unknown": "shout"}, ValueError, r"'shout'"),
        ({"text": CAR, "text_kwargs": {"pading": True}}, TypeError, r"`pading`"),
    ],
)
def test_bad_arguments_are_errors_that_name_the_value(processor, call, error, message):
    with pytest.raises(error, match=message) as caught:
        processor(**call)
    assert len(str(caught.value)) <= 250


# --- chat templates and pipelines of the library ---


def messages(image, question=CAR):
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]


def test_chat_template(processor, tmp_path):
    BLANK.save(tmp_path / "scene.png")
    plain = processor(images=BLANK, text=CAR, return_tensors="pt")
    assert processor.apply_chat_template(messages(BLANK, "Is there a car")) == "[SOS] Is there a car ?"
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    for content in (BLANK, str(tmp_path / "scene.png")):
        out = processor.apply_chat_template(messages(content), **options)
        assert set(out) == set(plain) and all(torch.equal(out[key], plain[key]) for key in plain)
    batch = processor.apply_chat_template([messages(BLANK), messages(BLANK, BUS)], **options)
    both = processor(images=[BLANK] * 2, text=[CAR, BUS], return_tensors="pt")
    assert all(torch.equal(batch[key], both[key]) for key in both)


def test_chat_template_reads_the_last_question(processor):
    chat = [{"role": role, "content": BUS} for role in ("system", "user", "assistant")]
    chat.append({"role": "user", "content": CAR})
    assert processor.apply_chat_template([chat, chat]) == ["[SOS] Is there a car ?"] * 2
    assert processor.apply_chat_template(chat, tokenize=True)[0] == processor(text=CAR)["input_ids"][0]


def test_removing_the_prompt_leaves_the_answer(processor):
    """As the image-text-to-text pipeline does for a left-padded batch, in which an answer may be missing."""
    prompts = processor(text=[CAR, RED], return_tensors="pt")["input_ids"]
    [red] = ids_of(processor, "red")
    asked = processor.post_process_image_text_to_text(prompts)
    for answers, expected in (([[YES, EOS], [red, EOS]], ["yes", "red"]), ([[EOS, 0], [NO, EOS]], ["", "no"])):
        texts = processor.post_process_image_text_to_text(torch.cat([prompts, torch.tensor(answers)], dim=1))
        assert [text.removeprefix(start) for start, text in zip(asked, texts)] == expected

"""The processor: prompts, packing, labels, images, templates, and errors for bad input."""

import base64
import sys
import warnings

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from tiny import ROOT
from traffic_vlm.images_traffic_vlm import to_rgb
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor


CAR, BUS, RED = "Is there a car?", "Is there a bus ahead?", "What color is the traffic light?"
RGB = (200, 100, 50)
SOS, EOS, YES, NO = 2, 3, 4, 5


@pytest.fixture
def image():
    return Image.new("RGB", (40, 30), RGB)


def words(processor, text):
    return processor.tokenizer(text, add_special_tokens=False)["input_ids"]


def pixel(image, position=(0, 0)):
    return image.getpixel(position)


# --- prompts ---


@pytest.mark.parametrize("ending", ["", "?", "!", " ? ? ", "…", "\n", "？", "?\u00a0"])
def test_every_ending_gives_the_same_prompt(processor, ending):
    prompt = processor(text="Is there a car" + ending)["input_ids"]
    assert prompt == [[SOS, *words(processor, "is there a car ?")]]
    assert EOS not in prompt[0]


def test_start_token_is_not_added_twice(processor):
    plain = processor(text=CAR)["input_ids"]
    assert processor(text="[SOS] " + CAR)["input_ids"] == plain
    assert processor(text="[SOS] [SOS] " + CAR, on_unknown="ignore")["input_ids"] != plain


@pytest.mark.parametrize("token", ["[PAD]", "[EOS]", "[SOS]", "[UNK]"])
def test_control_tokens_in_user_text_are_words(processor, token):
    ids = processor(text=f"is there {token} a car", on_unknown="ignore")["input_ids"][0]
    assert processor.tokenizer.unk_token_id in ids
    control = processor.tokenizer.convert_tokens_to_ids(token)
    assert token == "[UNK]" or control not in ids[1:]


def test_one_question_per_row(processor, image):
    out = processor(images=[image, image], text=[[CAR, BUS], [RED]], return_tensors="pt")
    assert set(out) == {"input_ids", "attention_mask", "pixel_values", "image_index"}
    assert out["input_ids"].shape == out["attention_mask"].shape == (3, 8)
    assert out["pixel_values"].shape == (2, 3, 256, 256) and out["pixel_values"].dtype == torch.float32
    assert out["image_index"].tolist() == [0, 0, 1] and out["image_index"].dtype == torch.int64
    for question, ids, mask in zip([CAR, BUS, RED], out["input_ids"], out["attention_mask"]):
        assert ids[mask == 1].tolist() == processor(text=question)["input_ids"][0]
        assert (ids[mask == 0] == processor.tokenizer.pad_token_id).all()


@pytest.mark.parametrize(("count", "text"), [(1, CAR), (1, [CAR]), (1, [[CAR]]), (2, [CAR, BUS]), (2, [[CAR], [BUS]])])
def test_no_image_index_with_one_question_per_image(processor, image, count, text):
    for given_images in ([image] * count, [[image]] * count):
        out = processor(images=given_images, text=text, return_tensors="pt")
        assert set(out) == set(processor.model_input_names) == {"input_ids", "attention_mask", "pixel_values"}


def test_text_only_and_images_only(processor, image):
    assert set(processor(text=[CAR, BUS], return_tensors="pt")) == {"input_ids", "attention_mask"}
    assert set(processor(images=image, return_tensors="pt")) == {"pixel_values"}
    later = processor(text=[[CAR, BUS], [RED]], return_tensors="pt")  # for images encoded earlier
    assert later["image_index"].tolist() == [0, 0, 1]


def test_return_types(processor, image):
    lists = processor(images=image, text=[[CAR, BUS]])
    assert [len(row) for row in lists["input_ids"]] == [6, 7]  # unpadded, as the library gives lists
    assert lists["image_index"] == [0, 0] and lists["pixel_values"][0].shape == (3, 256, 256)
    arrays = processor(images=image, text=[[CAR, BUS]], return_tensors="np")
    assert arrays["input_ids"].shape == (2, 7) and arrays["input_ids"].dtype == np.int64
    assert arrays["pixel_values"].dtype == np.float32
    packed = processor(images=image, text=[[CAR, BUS]], packed=True)  # for score_yes_no(**packed)
    expected = processor(images=image, text=[[CAR, BUS]], packed=True, return_tensors="pt")
    assert set(packed) == set(expected) and all(torch.equal(packed[name], expected[name]) for name in packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({}, 7),
        ({"padding": "longest"}, 7),
        ({"padding": "max_length", "max_length": 50}, 50),
        ({"padding": "max_length"}, 128),
        ({"pad_to_multiple_of": 8}, 8),
        ({"text_kwargs": {"padding": "max_length", "max_length": 76}}, 76),
        ({"padding": transformers.utils.PaddingStrategy.MAX_LENGTH, "max_length": 60}, 60),
    ],
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(processor, packed, options, width, side):
    out = processor(text=[CAR, BUS], packed=packed, padding_side=side, return_tensors="pt", **options)
    assert out["input_ids"].shape == (2, width)
    real = out["attention_mask"].bool()
    assert real.sum(1).tolist() == [6, 7]
    assert (real[:, -1] if side == "left" else real[:, 0]).all()
    if packed:
        assert out["question_ends"].tolist() == ([[width - 1]] * 2 if side == "left" else [[5], [6]])


def test_length_limit_applies_to_each_question(processor):
    fits = "car " * 126  # with [SOS] and "?"
    assert len(processor(text=fits)["input_ids"][0]) == 128
    assert processor(text=[[fits, fits]], packed=True)["input_ids"].shape == (1, 256)
    with pytest.raises(ValueError, match=r"129 tokens.*128.*car car"):
        processor(text="car " * 127)
    with pytest.raises(ValueError, match=r"question 1 has 6 tokens.*at most 5"):
        processor(text=["a car", CAR], max_length=5)
    with pytest.raises(ValueError, match=r"130 tokens \(prompt and answer\).*128"):
        processor(text=fits, suffix="yes")


def test_truncation_keeps_the_question_mark_and_the_answer(processor):
    mark = processor.tokenizer.convert_tokens_to_ids("?")
    long = processor(text="car " * 300, truncation=True)["input_ids"][0]
    assert len(long) == 128 and long[0] == SOS and long[-1] == mark
    short = processor(text=CAR, truncation=True, max_length=4)["input_ids"][0]
    assert short == [SOS, *words(processor, "is there ?")]
    answered = processor(text="car " * 300, suffix="a bus", truncation=True)
    assert len(answered["input_ids"][0]) == 128
    assert answered["input_ids"][0][-4:] == [mark, *words(processor, "a bus"), EOS]
    with pytest.raises(ValueError, match="128"):
        processor(text=CAR, suffix="car " * 128, truncation=True)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("Are there > 3 cars?", "Are there more than 3 cars?"),
        ("Are there <3 cars?", "Are there less than 3 cars?"),
        ("Are there >= 3 cars?", "Are there at least 3 cars?"),
        ("Are there \u2264 3 cars?", "Are there at most 3 cars?"),
        ("cars > trucks?", "cars more than trucks?"),
        ("Is the limit -50?", "Is the limit minus 50?"),
        ("Is the limit \u221250?", "Is the limit minus 50?"),
        ("Is the limit >-5?", "Is the limit more than minus 5?"),
        ("Are there ＜＝３ cars?", "Are there at most 3 cars?"),
    ],
)
@pytest.mark.filterwarnings("ignore:words that are not in the vocabulary")
def test_signs_are_spelled_out(processor, text, same):
    def ids(text, **options):
        return processor(text=text, **options)["input_ids"]

    assert ids(text) == ids(same)
    assert ids(text) != ids("".join(c for c in text if c not in "<>-\u2212\u2264=＜＞＝－"))
    chat = [{"role": "user", "content": text}]
    assert processor.apply_chat_template(chat, tokenize=True) == ids(same)
    assert ids("a", suffix=text) == ids("a", suffix=same)
    assert processor.unknown_words(text) == (["minus"] if "minus" in same else [])


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("30-50 km/h", "30 50 km/h"),
        ("30 - 50 km/h", "30 50 km/h"),
        ("a T-junction", "a T junction"),
        ("<b>car</b>", "b car b"),
        ("a -> b", "a b"),
    ],
)
def test_hyphens_brackets_and_arrows_are_no_signs(processor, text, same):
    assert (
        processor(text=text, on_unknown="ignore")["input_ids"]
        == processor(text=same, on_unknown="ignore")["input_ids"]
    )


# --- packing and labels ---


def test_packed_rows_of_an_example(processor, image):
    out = processor(images=[image] * 2, text=[["a car", "bus"], ["red"]], packed=True, return_tensors="pt")
    a, car, bus, red, mark = words(processor, "a car bus red ?")
    assert out["input_ids"].tolist() == [[SOS, a, car, mark, SOS, bus, mark], [0, 0, 0, 0, SOS, red, mark]]
    assert out["attention_mask"].tolist() == [[1] * 7, [0] * 4 + [1] * 3]
    assert out["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 0, 0, 0, 0, 1, 2]]
    assert out["segment_ids"].tolist() == [[1, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 1, 1, 1]]
    assert out["question_ends"].tolist() == [[3, 6], [6, -1]]
    assert "image_index" not in out and out["pixel_values"].shape == (2, 3, 256, 256)


@pytest.mark.parametrize(("row_tokens", "lengths"), [(6, [4, 9, 3]), (13, [13, 3]), (16, [16]), (512, [16])])
def test_rows_hold_whole_questions_in_their_order(processor, row_tokens, lengths):
    text = [["a car", "a bus on the left or right", "red"], ["red"]]  # 4, 9, 3 and 3 tokens
    rows = processor(text=text, packed=True, row_tokens=row_tokens, padding_side="left")
    assert rows["attention_mask"].sum(1).tolist() == [*lengths, 3]
    expected = processor(text=text, return_tensors="pt", padding_side="left")
    ids, alone = (batch["input_ids"][batch["attention_mask"] == 1] for batch in (rows, expected))
    assert ids.equal(alone)
    assert rows.get("image_index", torch.arange(2)).tolist() == [0] * len(lengths) + [1]


def test_labels_of_an_example(processor):
    out = processor(text=["a car", "bus"], suffix=["yes", "a bus"], return_tensors="pt")
    a, car, bus, mark = words(processor, "a car bus ?")
    assert out["input_ids"].tolist() == [[SOS, a, car, mark, YES, EOS], [SOS, bus, mark, a, bus, EOS]]
    assert out["labels"].tolist() == [[-100] * 4 + [YES, EOS], [-100] * 3 + [a, bus, EOS]]


@pytest.mark.parametrize(("answer", "token"), [("yes", YES), ("Yes", YES), (" NO ", NO), ("[YES]", YES), ("no", NO)])
def test_yes_and_no_answers_have_one_token(processor, answer, token):
    assert processor(text=CAR, suffix=answer)["input_ids"][0][-2:] == [token, EOS]


def test_labels_of_padding_are_ignored(processor):
    for packed in (False, True):
        out = processor(text=[CAR, RED], suffix=["yes", "red"], packed=packed, return_tensors="pt")
        assert out["labels"].shape == out["input_ids"].shape
        assert (out["labels"][out["attention_mask"] == 0] == -100).all()
        learned = out["labels"] != -100
        assert (out["labels"][learned] == out["input_ids"][learned]).all() and learned.sum(1).tolist() == [2, 2]


SENTENCE = st.lists(st.sampled_from("is there a car bus red light ahead the two".split()), min_size=1, max_size=6)
ROWS = st.lists(st.lists(SENTENCE.map(" ".join), min_size=1, max_size=4), min_size=1, max_size=4)


@given(rows=ROWS, side=st.sampled_from(["left", "right"]), answered=st.booleans(), width=st.sampled_from([None, 60]))
@settings(max_examples=60, deadline=None)
def test_packed_segments_equal_unpacked_rows(processor, rows, side, answered, width):
    suffix = [["yes" if "car" in question else question for question in row] for row in rows] if answered else None
    options = {"padding": "max_length", "max_length": width} if width else {}
    alone = processor(text=rows, suffix=suffix)
    packed = processor(text=rows, suffix=suffix, packed=True, padding_side=side, return_tensors="pt", **options)
    found = []
    for index, row in enumerate(rows):
        segments = packed["segment_ids"][index]
        assert (segments == 0).equal(packed["attention_mask"][index] == 0)
        for question in range(1, len(row) + 1):
            columns = (segments == question).nonzero().flatten()
            assert columns.diff().eq(1).all()
            assert packed["position_ids"][index, columns].tolist() == list(range(len(columns)))
            end = int(packed["question_ends"][index, question - 1] - columns[0])
            prompt = processor(text=row[question - 1])["input_ids"][0]
            assert end == len(prompt) - 1
            found.append(
                {key: packed[key][index, columns].tolist() for key in ("input_ids", "labels") if key in packed}
            )
        assert (packed["question_ends"][index, len(row) :] == -1).all()
    assert [segment["input_ids"] for segment in found] == alone["input_ids"]
    if answered:
        assert [segment["labels"] for segment in found] == alone["labels"]
    image_index = [index for index, row in enumerate(rows) for _ in row]
    assert alone.get("image_index", image_index) == image_index


# --- unknown words ---


def test_unknown_words_are_listed_once_as_typed(processor):
    text = ["Is there a Zyxgarf, or a QUUXO?", "Is the zyxgarf red?"]
    assert processor.unknown_words(text) == ["Zyxgarf", "QUUXO"]
    assert processor.unknown_words(text[0]) == ["Zyxgarf", "QUUXO"]
    assert processor.unknown_words(CAR) == processor.unknown_words([]) == []
    with pytest.warns(UserWarning, match="'Zyxgarf', 'QUUXO'") as caught:
        ids = processor(text=text, return_tensors="pt")["input_ids"]
    assert len(caught) == 1 and caught[0].filename == __file__
    assert (ids == processor.tokenizer.unk_token_id).sum() == 3
    with pytest.raises(ValueError, match="'Zyxgarf', 'QUUXO'"):
        processor(text=text, on_unknown="raise")
    with pytest.raises(ValueError, match="'Zyxgarf'"):
        processor(text=CAR, suffix="a Zyxgarf", on_unknown="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        processor(text=text, on_unknown="ignore")
        processor(text=[CAR, BUS, RED])


# --- bad input ---

BLANK = Image.new("RGB", (8, 8))
BAD_CALLS = [
    ({"images": BLANK, "text": [CAR, BUS]}, ValueError, r"more questions than images: 2 .* 1 .*nest them"),
    ({"images": [BLANK] * 2, "text": CAR}, ValueError, r"fewer questions than images: 1 .* 2"),
    ({"images": [BLANK], "text": [[CAR], [BUS]]}, ValueError, r"more lists of questions than images: 2 .* 1"),
    ({"images": [BLANK] * 2, "text": [[CAR, BUS]]}, ValueError, r"fewer lists of questions than images: 1 .* 2"),
    ({"images": [[BLANK, BLANK]], "text": [CAR]}, ValueError, r"row 0 of `images` holds 2 images"),
    ({"images": [], "text": [CAR]}, ValueError, r"`images` is an empty list"),
    ({"images": BLANK, "text": []}, ValueError, r"`text` has an empty list"),
    ({}, ValueError, r"`images`, `text` or both"),
    ({"text": ""}, ValueError, r"empty string: ''"),
    ({"text": [CAR, "  "]}, ValueError, r"empty string: '  '"),
    ({"text": ", ,"}, ValueError, r"empty string: ', ,'"),
    ({"text": "[SOS] ?"}, ValueError, r"`text` has an empty string: '\[SOS\] \?'"),
    ({"text": 7}, TypeError, r"`text` must be a string.* int: 7"),
    ({"text": [CAR, None]}, TypeError, r"`text` holds NoneType None"),
    ({"text": [[CAR], BUS]}, TypeError, r"`text` mixes lists with 'Is there a bus ahead\?'"),
    ({"text": CAR, "suffix": ["yes"]}, ValueError, r"`suffix` must have the shape of `text`"),
    ({"text": [[CAR, BUS]], "suffix": [["yes"]]}, ValueError, r"`suffix` must have the shape of `text`"),
    ({"text": [CAR, BUS], "suffix": ["yes", None]}, TypeError, r"`suffix` holds NoneType None"),
    ({"text": CAR, "suffix": " "}, ValueError, r"`suffix` has an empty string"),
    ({"images": BLANK, "suffix": "yes"}, ValueError, r"`text` is None"),
    ({"text": CAR, "on_unknown": "shout"}, ValueError, r"'shout'"),
    ({"text": CAR, "videos": [BLANK]}, ValueError, r"`videos`"),
    ({"text": CAR, "sufix": "yes"}, TypeError, r"`sufix`"),
    ({"text": CAR, "text_kwargs": {"pading": True}}, TypeError, r"`pading` in `text_kwargs`"),
    ({"text": CAR, "videos_kwargs": {"fps": 1}}, TypeError, r"`videos_kwargs`"),
    ({"text": CAR, "return_offsets_mapping": True}, TypeError, r"`return_offsets_mapping`"),
    ({"text": CAR, "padding": True, "text_kwargs": {"padding": False}}, ValueError, r"`padding` was passed twice"),
    ({"text": CAR, "padding": "long"}, ValueError, r"padding must be .* 'long'"),
    ({"text": CAR, "packed": True, "row_tokens": 0}, ValueError, r"row_tokens must be a positive integer .* got 0"),
    ({"text": CAR, "padding_side": "top"}, ValueError, r"padding_side must be .* 'top'"),
    ({"images": 3, "text": CAR}, TypeError, r"int: 3"),
    ({"images": [None], "text": [CAR]}, TypeError, r"NoneType: None"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_bad_arguments_raise_and_name_the_value(processor, call, error, message):
    with pytest.raises(error, match=message):
        processor(**call)


def test_options_that_the_library_passes_are_accepted(processor):
    plain = processor(text=CAR)["input_ids"]
    sent = {"add_special_tokens": False, "return_mm_token_type_ids": False, "audio_kwargs": {}, "verbose": True}
    assert processor(text=CAR, **sent)["input_ids"] == plain
    assert "attention_mask" not in processor(text=CAR, return_attention_mask=False)
    assert processor(text=CAR, common_kwargs={"return_tensors": "pt"})["input_ids"].tolist() == plain


# --- images ---


@pytest.mark.parametrize("bits", [8, 10, 12, 16])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_integers_are_judged_by_type_and_maximum(tmp_path, bits, dtype):
    top = 2**bits - 1
    shades = np.arange(256).reshape(16, 16)
    gray = np.rint(shades * (top / 255)).astype(dtype)
    sources = [gray, torch.from_numpy(gray), Image.fromarray(gray)]
    if dtype == np.uint16:
        for name in ("gray.png", "gray.tif"):
            sources[2].save(tmp_path / name)
            sources.append(tmp_path / name)
    for source in sources:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            seen = np.asarray(to_rgb(source))
        assert seen.shape == (16, 16, 3) and (seen == shades[..., None]).all()
        assert len(caught) == (bits < 16 and (bits > 8 or dtype == np.uint16))
        assert all(f"are read as 0..{top}" in str(one.message) for one in caught)
    black = np.zeros((4, 4), dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is a guess
        assert pixel(to_rgb(black)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("mode", "fill", "seen"),
    [
        ("RGB", RGB, RGB),
        ("1", 0, (0, 0, 0)),
        ("RGBA", (0, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (0, 0, 0, 102), (153, 153, 153)),
        ("LA", (0, 0), (255, 255, 255)),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
        ("F", 0.5, (128, 128, 128)),
        ("F", 90.0, (90, 90, 90)),
        ("HSV", (0, 255, 255), (255, 0, 0)),
    ],
)
def test_pillow_modes(mode, fill, seen):
    picture = to_rgb(Image.new(mode, (4, 3), fill))
    assert picture.mode == "RGB" and picture.size == (4, 3) and pixel(picture) == seen


@pytest.mark.parametrize(
    "name", ["palette.png", "palette.gif", "one_bit.png", "cmyk.jpg", "rgb_key.png", "gray_key.png"]
)
def test_file_formats_and_transparency(tmp_path, name):
    path = tmp_path / name
    left, right, close = (255, 255, 255), (0, 0, 255), 0
    if name.startswith("palette"):  # the left half is transparent, its hidden color green
        picture = Image.new("P", (8, 4), 1)
        picture.putpalette([0, 255, 0, 0, 0, 255])
        picture.paste(0, (0, 0, 4, 4))
        picture.save(path, transparency=0)
    elif name == "one_bit.png":
        picture = Image.new("1", (8, 4), 0)
        picture.paste(1, (0, 0, 4, 4))
        picture.save(path)
        right = (0, 0, 0)
    elif name == "cmyk.jpg":
        Image.new("CMYK", (8, 4), (0, 255, 255, 0)).save(path, quality=100)
        left = right = (255, 0, 0)
        close = 4
    else:  # one color means "transparent"
        gray = name.startswith("gray")
        picture = Image.new("L" if gray else "RGB", (8, 4), 7 if gray else (0, 0, 255))
        picture.paste(90 if gray else (0, 255, 0), (0, 0, 4, 4))
        picture.save(path, transparency=90 if gray else (0, 255, 0))
        right = (7, 7, 7) if gray else right
    for source in (path, str(path), Image.open(path)):
        seen = to_rgb(source)
        assert np.abs(np.subtract(pixel(seen), left)).max() <= close
        assert np.abs(np.subtract(pixel(seen, (7, 0)), right)).max() <= close


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path, orientation):
    upright = Image.new("RGB", (32, 16), (0, 0, 255))
    upright.paste((255, 0, 0), (0, 0, 16, 8))  # red at the top left
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the inverse transposition
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(back[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "photo.jpg", exif=exif, quality=100, subsampling=0)
    seen = to_rgb(tmp_path / "photo.jpg")
    assert seen.size == (32, 16)
    assert np.abs(np.asarray(seen, dtype=int) - np.asarray(upright, dtype=int)).max() <= 4


def test_damaged_exif_is_ignored(tmp_path):
    Image.new("RGB", (8, 8), RGB).save(tmp_path / "photo.png", exif=b"Exif\x00\x00not a tiff header")
    assert pixel(to_rgb(tmp_path / "photo.png")) == RGB


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize(("low", "high"), [(29_800, 30_310), (7_000, 8_500), (64_000, 65_535)])
def test_a_narrow_band_of_16_bits_is_stretched_with_a_warning(tmp_path, dtype, low, high):
    """Thermal cameras: at full range the picture would be one gray."""
    gray = np.linspace(low, high, 256).round().reshape(16, 16).astype(dtype)
    Image.fromarray(gray).save(tmp_path / "thermal.tif")
    for source in (gray, tmp_path / "thermal.tif"):
        with pytest.warns(UserWarning, match="span less than 1/32 of 0..65535.* stretched from black to white"):
            seen = np.asarray(to_rgb(source))[..., 0]
        assert np.abs(seen - np.arange(256).reshape(16, 16).astype(int)).max() <= 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one value has no band
        assert pixel(to_rgb(np.full((4, 4), low, dtype))) == (round(low / 257),) * 3


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
# Red and green have changed places; the description is not that of sRGB.
SWAPPED = (
    SRGB.replace(b"\0s\0R\0G\0B", b"\0w\0i\0d\0e")
    .replace(b"rXYZ", b"?")
    .replace(b"gXYZ", b"rXYZ")
    .replace(b"?", b"gXYZ")
)
PURE_RED, PURE_GREEN = (255, 0, 0), (0, 255, 0)


@pytest.mark.parametrize(
    ("mode", "fill", "profile", "seen"),
    [
        ("RGB", PURE_GREEN, SWAPPED, PURE_RED),
        ("RGBA", (*PURE_GREEN, 128), SWAPPED, (255, 127, 127)),
        ("RGBA", (*PURE_GREEN, 0), SWAPPED, (255, 255, 255)),
        ("P", 1, SWAPPED, PURE_RED),
        ("L", 90, SWAPPED, (90, 90, 90)),
        ("LA", (90, 0), SWAPPED, (255, 255, 255)),
        ("RGB", PURE_GREEN, SRGB, PURE_GREEN),
        ("RGB", PURE_GREEN, SWAPPED[:200], PURE_GREEN),  # damaged
        ("RGB", PURE_GREEN, b"no profile", PURE_GREEN),
        ("RGB", PURE_GREEN, SWAPPED.replace(b"RGB ", b"GRAY", 1), PURE_GREEN),  # of another kind of image
    ],
)
def test_colors_are_those_of_the_icc_profile(tmp_path, mode, fill, profile, seen):
    picture = Image.new(mode, (4, 3), fill)
    if mode == "P":
        picture.putpalette([*PURE_RED, *PURE_GREEN])
    path = tmp_path / "a.png"
    picture.save(path, icc_profile=profile)
    once = to_rgb(path)
    for image in (once, to_rgb(once), to_rgb(Image.open(path))):  # applied once, however often it is read
        assert image.mode == "RGB" and np.abs(np.subtract(pixel(image), seen)).max() <= 1, pixel(image)


@pytest.mark.parametrize("orientation", [1, 6])
def test_exif_after_the_pixels_of_a_png_is_applied(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (32, 16)).save(tmp_path / "a.png", exif=exif)
    png = (tmp_path / "a.png").read_bytes()
    start = png.index(b"eXIf") - 4
    stop = start + 12 + int.from_bytes(png[start : start + 4])
    (tmp_path / "a.png").write_bytes(png[:start] + png[stop:-12] + png[start:stop] + png[-12:])
    assert to_rgb(tmp_path / "a.png").size == ((32, 16) if orientation == 1 else (16, 32))


HWC = np.broadcast_to(np.array(RGB, dtype=np.uint8), (6, 5, 3))
ARRAYS = {
    "HWC": (HWC, RGB),
    "CHW": (HWC.transpose(2, 0, 1), RGB),
    "tensor CHW": (torch.tensor(HWC.transpose(2, 0, 1).copy()), RGB),
    "tensor 3x3x3 is CHW": (torch.tensor(HWC[:3, :3].transpose(2, 0, 1).copy()), RGB),
    "array 3x3x3 is HWC": (HWC[:3, :3], RGB),
    "unit floats": (HWC / 255, RGB),
    "byte floats": (HWC.astype(np.float32), RGB),
    "overshooting unit floats": (np.where(HWC == 200, 1.004, -0.003), (255, 0, 0)),
    "bfloat16": (torch.ones(3, 6, 5, dtype=torch.bfloat16, requires_grad=True), (255,) * 3),
    "uint16 RGB": (HWC.astype(np.uint16) * 257, RGB),
    "bool HW": (np.ones((6, 5), dtype=bool), (255,) * 3),
    "gray HW": (np.full((6, 5), 90, dtype=np.uint8), (90,) * 3),
    "gray 1HW": (np.full((1, 6, 5), 90, dtype=np.uint8), (90,) * 3),
    "transparent RGBA": (np.zeros((6, 5, 4), dtype=np.uint8), (255,) * 3),
    "transparent CHW": (torch.zeros(4, 6, 5), (255,) * 3),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_and_tensors(name):
    array, seen = ARRAYS[name]
    picture = to_rgb(array)
    assert pixel(picture) == seen and picture.size == ((3, 3) if "3x3" in name else (5, 6))


def test_input_data_format_sets_the_layout(processor):
    array = np.zeros((3, 4, 3), dtype=np.uint8)
    array[0] = 255  # a red image, channels first
    pixels = processor(images=array, input_data_format="channels_first", return_tensors="pt")["pixel_values"]
    assert pixels[0].flatten(1).mean(1).tolist() == [1, -1, -1]


NAN, INFINITE = np.zeros((4, 4, 3)), np.zeros((4, 4, 3), dtype=np.float32)
NAN[1, 1, 1], INFINITE[1, 1, 1] = np.nan, np.inf
OVER = np.linspace(0, 1.1, 16, dtype=np.float32).reshape(4, 4)  # an image times 1.1


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (NAN, ValueError, r"ndarray of shape \(4, 4, 3\).*NaN or infinite"),
        (torch.tensor(INFINITE), ValueError, r"Tensor of shape \(4, 4, 3\).*NaN or infinite"),
        (np.zeros((7, 5, 2)), ValueError, r"shape \(7, 5, 2\).*channels"),
        (np.zeros(4), ValueError, r"shape \(4,\).*expected \[H,W\]"),
        (np.zeros((0, 4, 3)), ValueError, r"shape \(0, 4, 3\)"),
        (Image.new("RGB", (0, 5)), ValueError, r"no pixels.*0 x 5"),
        (np.full((4, 4), 65536), ValueError, r"int64 pixels must be in 0\.\.255 or 0\.\.65535, got 65536\.\.65536"),
        (Image.new("I", (4, 4), -1), ValueError, r"int32 pixels .* got -1\.\.-1"),
        (np.full((4, 4), -1.0), ValueError, r"0\.\.1 .*or 0\.\.255 .*got -1\.\.-1"),
        (np.linspace(-2, 2.5, 16).reshape(4, 4), ValueError, r"not normalized, got -2\.\.2\.5"),
        *[
            (image, ValueError, r"0\.\.1 \(up to 1\.05\) or 0\.\.255 \(the maximum above 16\), .* got 0\.\.1\.1")
            for image in (OVER, torch.tensor(OVER), Image.fromarray(OVER))
        ],
        (np.linspace(0, 256, 16).reshape(4, 4), ValueError, r"got 0\.\.256"),
        (np.full((4, 4), 1j), TypeError, r"complex128"),
        (np.full((4, 4), "car"), TypeError, r"<U3"),
        ("no/such/file.png", ValueError, r"'no/such/file\.png'.*no such file"),
        ({"path": "x.png"}, TypeError, r"dict"),
    ],
)
def test_bad_images_raise_and_name_the_value(processor, image, error, message):
    with pytest.raises(error, match=message):
        processor(images=[image], text=[CAR])


def test_damaged_files_raise_and_name_the_file(processor, tmp_path, image):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for name in ("cut.png", "cut.jpg"):
        Image.fromarray(noise).save(tmp_path / name)
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:2000])
    (tmp_path / "text.png").write_text("this is no image")
    (tmp_path / "empty.jpg").write_bytes(b"")
    for name in ("cut.png", "cut.jpg", "text.png", "empty.jpg", "missing.jpg", "."):
        for source in (tmp_path / name, str(tmp_path / name)):
            with pytest.raises(ValueError, match=str(tmp_path / name)):
                processor(images=[image, source], text=[CAR, BUS])
    with pytest.raises(ValueError, match=r"cut\.png"):
        processor(images=Image.open(tmp_path / "cut.png"), text=CAR)


def test_decompression_bomb_raises_and_names_the_file(processor, tmp_path, monkeypatch):
    Image.new("RGB", (64, 64)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"bomb\.png.*decompression bomb"):
        processor(images=tmp_path / "bomb.png", text=CAR)


def test_all_image_types_give_the_same_pixels(processor, tmp_path):
    array = np.random.default_rng(1).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    picture = Image.fromarray(array)
    picture.save(tmp_path / "scene.png")
    encoded = base64.b64encode((tmp_path / "scene.png").read_bytes()).decode()
    expected = processor(images=picture, return_tensors="pt")["pixel_values"]
    tensor = torch.tensor(array.transpose(2, 0, 1).copy())
    path = tmp_path / "scene.png"
    values = [array, array[None], tensor, tensor[None], path, str(path), [[picture]]]
    for value in [*values, encoded, "data:image/png;base64," + encoded, array / 255.0]:
        assert torch.equal(processor(images=value, return_tensors="pt")["pixel_values"], expected)
    batch = processor(images=[picture, array, tmp_path / "scene.png"], return_tensors="pt")["pixel_values"]
    assert torch.equal(batch, expected.expand(3, -1, -1, -1))


def test_urls_are_loaded_by_the_library(monkeypatch, image):
    monkeypatch.setattr(
        "transformers.image_utils.load_image", lambda url: image if url == "https://a.test/b.png" else None
    )
    assert pixel(to_rgb("https://a.test/b.png")) == RGB


def test_pixels_equal_pillow_resizing(processor):
    """Resized to 256 x 256 without cropping, bicubic, scaled to -1..1; also images of 1 or 3 rows."""
    generator = np.random.default_rng(2)
    for height, width in [(480, 640), (256, 256), (3, 5), (1, 1), (1, 300)]:
        picture = Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
        pixels = processor(images=picture, return_tensors="pt")["pixel_values"]
        expected = np.asarray(picture.resize((256, 256), Image.Resampling.BICUBIC), dtype=np.float64) / 127.5 - 1
        np.testing.assert_allclose(pixels[0].permute(1, 2, 0), expected, atol=1e-6)


def test_the_library_gets_arrays_with_channels_last(processor, image, monkeypatch):
    # With torchvision, transformers 5.17 moves the channels of a PIL image twice, and fails.
    seen, library = [], type(processor.image_processor)
    monkeypatch.setattr(library, "__call__", lambda self, images, **_: seen.extend(images) or {"pixel_values": 0})
    processor(images=image)
    assert [type(picture) for picture in seen] == [np.ndarray] and seen[0].shape == (256, 256, 3)


def test_options_of_the_image_processor(processor, image):
    for options in ({"do_normalize": False}, {"images_kwargs": {"do_normalize": False}}):
        assert processor(images=image, return_tensors="pt", **options)["pixel_values"].min() >= 0
    size = {"height": 32, "width": 48}
    assert processor(images=image, size=size, return_tensors="pt")["pixel_values"].shape == (1, 3, 32, 48)
    for square in (32, {"height": 32, "width": 32}):
        assert processor(images=image, size=square, return_tensors="pt")["pixel_values"].shape == (1, 3, 32, 32)
    dark = processor(images=image, rescale_factor=-1.0, do_rescale=True, return_tensors="pt")["pixel_values"]
    assert dark.max() < 0
    raw = processor(images=image, do_resize=False, return_tensors="pt")["pixel_values"]
    assert raw.shape == (1, 3, 30, 40)


# --- chat templates and pipelines ---


def messages(image, question=CAR):
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_chat_template(processor, image, tmp_path, add_generation_prompt):
    image.save(tmp_path / "scene.png")
    plain = processor(images=image, text=CAR, return_tensors="pt")
    options = {"add_generation_prompt": add_generation_prompt}
    assert processor.apply_chat_template(messages(image, "Is there a car"), **options) == "[SOS] Is there a car ?"
    options |= {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    for content in (image, str(tmp_path / "scene.png")):
        out = processor.apply_chat_template(messages(content), **options)
        assert set(out) == set(plain) and all(torch.equal(out[key], plain[key]) for key in plain)
    batch = processor.apply_chat_template([messages(image), messages(image, BUS)], **options)
    both = processor(images=[image] * 2, text=[CAR, BUS], return_tensors="pt")
    assert all(torch.equal(batch[key], both[key]) for key in both)


def test_chat_template_uses_the_last_question(processor):
    chat = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": BUS},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": CAR},
    ]
    assert processor.apply_chat_template(chat) == "[SOS] Is there a car ?"
    assert processor.apply_chat_template(chat, tokenize=True)[0] == processor(text=CAR)["input_ids"][0]
    assert isinstance(chat[3]["content"], str)  # the caller's messages are unchanged
    split = [{"role": "user", "content": [{"type": "text", "text": "Is there"}, {"type": "text", "text": "a car."}]}]
    assert processor.apply_chat_template(split) == "[SOS] Is there a car ?"
    ids = processor.tokenizer.apply_chat_template(chat, chat_template=processor.chat_template, tokenize=True)
    assert ids["input_ids"] == processor(text=CAR)["input_ids"][0]  # the tokenizer alone gives the same prompt
    with pytest.raises(ValueError, match="empty string"):
        processor.apply_chat_template([{"role": "assistant", "content": "no"}], tokenize=True)


@pytest.mark.parametrize(
    ("roles", "is_told"), [(["user"], False), (["user", "assistant", "user"], True), (["system", "user"], True)]
)
def test_messages_that_are_not_read_are_told(processor, monkeypatch, roles, is_told):
    told = []
    monkeypatch.setattr(sys.modules[type(processor).__module__].logger, "warning_once", told.append)
    chat = [{"role": role, "content": CAR} for role in roles]
    for conversation in (chat, [chat, chat]):
        told.clear()
        processor.apply_chat_template(conversation)
        assert len(told) == is_told and all("Only the last user message is read" in text for text in told)


def test_removing_the_prompt_leaves_the_answer(processor):
    """As the image-text-to-text pipeline does for a left-padded batch, in which an answer may be missing."""
    prompts = processor(text=[CAR, RED], return_tensors="pt")["input_ids"]
    (red,) = words(processor, "red")
    for answers, expected in (([[YES, EOS], [red, EOS]], ["yes", "red"]), ([[EOS, 0], [NO, EOS]], ["", "no"])):
        whole = torch.cat([prompts, torch.tensor(answers)], dim=1)
        asked = processor.post_process_image_text_to_text(prompts)
        texts = processor.post_process_image_text_to_text(whole, skip_special_tokens=True)
        assert [text[len(start) :] for start, text in zip(asked, texts)] == expected
        assert all(text.startswith(start) for start, text in zip(asked, texts))
        assert processor.post_process_image_text_to_text(torch.tensor(answers)) == expected
    assert processor.post_process_image_text_to_text([YES, EOS]) == ["yes"]
    assert processor.post_process_image_text_to_text(torch.tensor([YES, EOS])) == ["yes"]


def test_decision_prompt_equals_the_processor_prompt(processor, image):
    decision = pytest.importorskip("transformers.decision")
    own = TrafficVLMProcessor.from_pretrained(ROOT)  # a copy, because the library adds tokens to it
    config = decision.DecisionConfig.from_pretrained(ROOT)
    assert config.labels == {"noul": ["[YES]", "[NO]"]} and config.noul_options == ["true", "false"]
    assert decision.label_token_ids(own.tokenizer, ("[YES]", "[NO]")) == [YES, NO]
    hostile = "Is <|mark|> [EOS] there a car?"
    asked = {"a": CAR, "b": "is it wet", "c": hostile}
    questions = {name: {"type": "noul", "instructions": text} for name, text in asked.items()}
    request = {"state": "<image>", "questions": questions, "assets": {"<image>": image}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prompts = config.prepare_inputs(request, own)
    for (inputs, (question,)), text in zip(prompts, asked.values()):
        plain = processor(images=image, text=text, on_unknown="ignore", return_tensors="pt")
        assert torch.equal(inputs["input_ids"], plain["input_ids"])
        assert torch.equal(inputs["pixel_values"], plain["pixel_values"])
        assert inputs["marks"].tolist() == [plain["input_ids"].shape[1]]
        assert (question.options, question.labels) == (["true", "false"], ["[YES]", "[NO]"])
    choice = {"type": "choice", "instructions": CAR, "criteria": {"a": None, "b": None}}
    with pytest.raises(Exception, match="yes/no questions"):
        config.prepare_inputs({"state": "", "questions": {"q": choice}}, own)
    words = {"type": "noul", "instructions": "What color is the light?"}
    with pytest.raises(Exception, match="visual-question-answering"):
        config.prepare_inputs({"state": "", "questions": {"q": words}}, own)


# --- answers ---


def test_post_process_yes_no(processor):
    sign = "Is there a sign?"
    scores = [torch.tensor([0.9, 0.1]), torch.tensor([0.5])]
    assert processor.post_process_yes_no(scores, [[CAR, BUS], [sign]]) == [
        [
            {"question": CAR, "answer": "yes", "score": pytest.approx(0.9), "p_yes": pytest.approx(0.9)},
            {"question": BUS, "answer": "no", "score": pytest.approx(0.9), "p_yes": pytest.approx(0.1)},
        ],
        [{"question": sign, "answer": "yes", "score": 0.5, "p_yes": 0.5}],
    ]
    assert processor.post_process_yes_no([torch.tensor([0.6])], CAR, threshold=0.7)[0][0]["answer"] == "no"
    assert [row[0]["answer"] for row in processor.post_process_yes_no([[0.6], [0.4]], [CAR, BUS])] == ["yes", "no"]
    with pytest.raises(ValueError, match=r"2 images.*is for 1"):
        processor.post_process_yes_no(scores[:1], [[CAR, BUS], [sign]])
    with pytest.raises(ValueError, match=r"image 0 has 1 questions, but 2"):
        processor.post_process_yes_no(scores, [[CAR], [sign]])
    with pytest.raises(ValueError, match=r"P\(yes\) of 3"):
        processor.post_process_yes_no([torch.tensor([3.0])], CAR)


# --- saving and loading ---


def test_init_rejects_unknown_arguments(processor):
    with pytest.raises(TypeError, match="extra"):
        TrafficVLMProcessor(processor.image_processor, processor.tokenizer, extra=1)
    bare = TrafficVLMProcessor(processor.image_processor, processor.tokenizer)
    assert bare.chat_template == processor.chat_template
    assert not hasattr(bare, "image_token")


def test_padding_of_the_tokenizer_is_the_default(processor):
    tokenizer = type(processor.tokenizer).from_pretrained(
        ROOT, max_length=117, padding="max_length", padding_side="right"
    )
    made = TrafficVLMProcessor(processor.image_processor, tokenizer)
    assert made(text=CAR, return_tensors="pt")["attention_mask"].tolist() == [[1] * 6 + [0] * 111]

"""Bad and strange input gives a result or one of the documented errors. `make fuzz` tries many more examples."""

import base64
import copy
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from PIL import Image

from traffic_vlm.common.files import DataError
from traffic_vlm.data.formats import Problems, read_source
from traffic_vlm.data.formats.mapping import load_mapping
from traffic_vlm.data.formats.reading import Folder
from traffic_vlm.data.questions import ask
from traffic_vlm.data.truth import GroundTruth


pytestmark = pytest.mark.filterwarnings("ignore")
# `make test` repeats the same examples; `make fuzz` draws new ones.
fuzz = settings(
    deadline=None,
    derandomize=settings().max_examples < 1000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def result_of(function: Callable[..., Any], *args: Any, errors: Any = (ValueError, TypeError), **kwargs: Any) -> Any:
    """Return the result, or None after one of the documented errors. `--hypothesis-show-statistics` counts both."""
    try:
        result = function(*args, **kwargs)
    except errors as error:
        assert str(error), f"{type(error).__name__} without a message"
        event("refused")
        return None
    event("accepted")
    return result


WORDS = "is there a car traffic light red ? [PAD] [YES] [EOS] 🚗 ﬁ İ ǅ isn't \x00 \n \ud800 \u202e".split(" ")
texts = st.text(max_size=12) | st.lists(st.sampled_from(WORDS), max_size=150).map(" ".join)
numbers = st.integers() | st.floats() | st.sampled_from([2**31, 2**63, -(2**70), 0.5, -1])
scalars = st.none() | st.booleans() | numbers | texts
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3), max_leaves=5)
batches = texts | st.lists(texts, max_size=3) | st.lists(st.lists(texts, max_size=3), max_size=3)


def containers(data: Any) -> Iterator[Any]:
    if isinstance(data, dict | list):
        yield data
        for value in data.values() if isinstance(data, dict) else data:
            yield from containers(value)


@st.composite
def damaged_json(draw: Any, data: Any) -> Any:
    """A copy in which one to three values are replaced, removed or added."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, 3))):
        container = draw(st.sampled_from(list(containers(data))))
        if isinstance(container, list):
            index = draw(st.integers(0, len(container)))
            container[index : index + 1] = draw(st.lists(values, max_size=1))
        elif container and draw(st.booleans()):
            del container[draw(st.sampled_from(list(container)))]
        else:
            container[draw(st.sampled_from([*container, "other"]))] = draw(values)
    return data


@st.composite
def damaged_bytes(draw: Any, data: bytes) -> bytes:
    """Bytes with one slice replaced by others; often as they were."""
    start = draw(st.integers(0, len(data)))
    return data[:start] + draw(st.binary(max_size=16)) + data[start + draw(st.integers(0, 64)) :]


def encode(image_format: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (20, 12), "orange").save(stream, image_format)
    return stream.getvalue()


FILES = [encode(name) for name in ("png", "jpeg", "gif", "bmp", "webp", "tiff", "ppm")]
MODES = ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "I;16"]
sides = st.integers(0, 5) | st.sampled_from([64, 224, 300])
dtypes = st.sampled_from(["uint8", "int16", "uint16", "int64", "float16", "float32", "float64", "bool", "complex64"])
arrays = st_numpy.arrays(dtypes, st_numpy.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
files = st.sampled_from(FILES).flatmap(lambda data: st.just(data) | damaged_bytes(data))
urls = st.tuples(st.sampled_from(["data:image/png;base64,", ""]), files.map(base64.b64encode).map(bytes.decode))
pictures = st.builds(Image.new, st.sampled_from(MODES), st.tuples(sides, sides))
images = arrays | arrays.map(torch.from_numpy) | pictures | files | files.map(io.BytesIO) | urls.map("".join) | values


@fuzz
@given(st.lists(images, max_size=2) | images)
def test_images(processor, given_images):
    inputs = result_of(processor, images=given_images, return_tensors="pt")
    if inputs is not None:
        assert inputs["pixel_values"].shape[1:] == (3, 256, 256)
        assert torch.isfinite(inputs["pixel_values"]).all()


SETTINGS = {"packed": st.booleans(), "on_unknown": st.sampled_from(["ignore", "raise"]), "suffix": batches}
OTHER = ("padding_side", "max_length", "pad_to_multiple_of", "padding", "truncation", "other")


@fuzz
@given(
    batches | values,
    st.fixed_dictionaries({}, optional=SETTINGS)
    | st.fixed_dictionaries({}, optional=SETTINGS | dict.fromkeys(OTHER, scalars)),
)
def test_texts(processor, text, options):
    inputs = result_of(processor, text=text, return_tensors="pt", **options)
    if inputs is not None:
        ids = inputs["input_ids"]
        assert ids.dtype == torch.int64 and bool(((ids >= 0) & (ids < 500)).all())
        processor.batch_decode(ids)


@st.composite
def tensors(draw: Any, shape: tuple[int, ...], high: int) -> torch.Tensor:
    """Mostly integers in [0, high) of this shape; sometimes another shape, range or dtype."""
    if draw(st.integers(0, 4)) == 0:
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    low, high = draw(st.sampled_from([(0, high)] * 5 + [(-2, high + 5)]))
    dtype = draw(st.sampled_from([torch.int64] * 6 + [torch.int32, torch.float32, torch.bool, torch.uint8]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    return torch.randint(low, high, shape, generator=generator).to(dtype)


@st.composite
def model_inputs(draw: Any) -> dict[str, torch.Tensor]:
    rows, images, length = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5, 9, 130]))
    value = draw(st.just(0.5) | st.floats(width=32))
    shape = draw(st.sampled_from([(rows, 3, 256, 256), (images, 3, 256, 256), (rows, 1, 256, 256), (rows, 3, 0, 0)]))
    strange: dict[str, st.SearchStrategy[torch.Tensor]] = {
        "pixel_values": st.just(torch.full(shape, value)),
        "attention_mask": tensors((rows, length), 2),
        "position_ids": tensors((rows, length), 128),
        "segment_ids": tensors((rows, length), 3),
        "labels": tensors((rows, length), 500),
        "image_index": tensors((rows,), images),
        "encoder_attention_mask": tensors((images, 256), 2),
    }
    names = draw(st.lists(st.sampled_from(list(strange)), max_size=3, unique=True))
    inputs = {"input_ids": draw(tensors((rows, length), 500)), "pixel_values": torch.zeros(rows, 3, 256, 256)}
    return inputs | {name: draw(strange[name]) for name in names}


@fuzz
@given(model_inputs(), st.sampled_from(["forward", "score_yes_no", "generate"]), st.data())
@torch.no_grad()
def test_model_inputs(model, inputs, method, data):
    if method == "forward":
        output = result_of(model, **inputs, use_cache=data.draw(st.booleans()))
        logits = [] if output is None else [output.logits[..., 1:]]  # [PAD] has the lowest number of the dtype
    elif method == "score_yes_no":
        logits = result_of(model.score_yes_no, **inputs) or []
    else:
        options = {"do_sample": st.booleans(), "num_beams": st.just(2)}
        options |= dict.fromkeys(("max_length", "min_new_tokens", "other"), scalars)
        arguments = data.draw(st.fixed_dictionaries({}, optional=options))
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        result_of(model.generate, **inputs, max_new_tokens=2, **arguments)
        logits = []
    assert all(torch.isfinite(row).all() for row in logits)


# Annotations: a folder of one image with a label file of some format


COCO = {
    "images": [{"id": 1, "file_name": "a.png", "width": 20, "height": 12}],
    "categories": [{"id": 1, "name": "Car"}, {"id": 2, "name": "light"}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 8, 6], "iscrowd": 0},
        {"id": 2, "image_id": 1, "category_id": 2, "bbox": [12, 1, 3, 6]},
    ],
}
CAR = {"category": "Car", "box2d": {"x1": 1, "y1": 2, "x2": 9, "y2": 8}, "attributes": {}}
FRAMES = [{"name": "a.png", "attributes": {"weather": "overcast"}, "labels": [CAR]}]
XML = (
    b"<annotation><size><width>20</width></size><object><name>Car</name><difficult>1</difficult><bndbox><xmin>1</xmin>"
    b"<ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object></annotation>"
)
MAPPING = {
    "name": "fuzz",
    "classes": {"Car": "car", "light": {"class": "traffic light", "state": "red"}},
    "exhaustive": ["car", "traffic light"],
    "values": {"weather": {"from": "weather", "values": {"overcast": "cloudy"}}},
}
WORDS_OF_LINES = st.sampled_from("0 1 2 0.5 .25 -1 7 0,5 nan inf 1e400 0.0 140 Car light x \ufeff".split(" "))
LINES = st.lists(st.lists(WORDS_OF_LINES, max_size=16).map(" ".join), max_size=4).map("\n".join).map(str.encode)
DATA_YAML = st.sampled_from([b"names: [Car]\nkpt_shape: [1, 3]", b"names: {0: Car, 2: x}"])


def json_files(data: Any) -> st.SearchStrategy[bytes]:
    """The bytes of a JSON file: valid, with damaged values, or with damaged syntax."""
    valid, damaged = st.just(json.dumps(data).encode()), damaged_json(data).map(json.dumps).map(str.encode)
    return valid | damaged | valid.flatmap(damaged_bytes)


def source_of(format: str, label_file: str, labels: st.SearchStrategy[bytes]) -> st.SearchStrategy[dict[str, bytes]]:
    """The files of a source, {name: bytes}."""
    layout = {"images": "images", "labels": ".", "annotations": label_file if "json" in label_file else "."}
    mapping = MAPPING | {"format": format, "splits": {"train": layout}}
    files = {label_file: labels, "images/a.png": st.just(FILES[0]) | damaged_bytes(FILES[0])}
    files["mapping.json"] = st.just(json.dumps(mapping).encode()) | json_files(mapping)
    return st.fixed_dictionaries(files | {"data.yaml": st.binary(max_size=30) | DATA_YAML})


@fuzz
@given(
    source_of("coco", "labels.json", json_files(COCO))
    | source_of("bdd100k", "labels.json", json_files(FRAMES))
    | source_of("voc", "a.xml", st.just(XML) | damaged_bytes(XML))
    | source_of("yolo", "a.txt", LINES | st.binary(max_size=40))
    | source_of("kitti", "a.txt", LINES | st.binary(max_size=40)),
    st.randoms(use_true_random=False),
)
def test_annotations(files, random):
    """What is read can be asked about, and nothing is lost without a word."""
    with tempfile.TemporaryDirectory() as name:
        folder, problems = Path(name), Problems()
        (folder / "images").mkdir()
        for file, content in files.items():
            (folder / file).write_bytes(content)
        mapping = result_of(load_mapping, folder / "mapping.json", errors=DataError)
        if mapping is not None and "train" in mapping.splits:
            records = result_of(read_source, Folder(folder), mapping, "train", problems, errors=DataError)
            assert records is None or records or problems.counts
            for record in records or []:
                ask(GroundTruth(record.scene), random, 8)

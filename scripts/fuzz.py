"""Throw bad and strange input at everything that reads input; anything but an answer or a promised error is a bug.

    make fuzz                                              # 10,000 cases, some minutes
    python scripts/fuzz.py --number 100000 --seed 7        # others
    python scripts/fuzz.py --seed 1234 --number 1 --only images   # the one that failed, again

Case i has the seed `--seed` + i, and its kind follows from it; a failure prints both. The kinds, and what is promised:

    images   arrays, pictures and broken files for the processor: pixels, or ValueError or TypeError
    texts    questions and answers for the processor: ids, or ValueError or TypeError
    model    ids, masks, positions, pixels of any shape and dtype: finite logits, or ValueError or TypeError
    configs  fields of configurations: a model that answers, or ValueError or TypeError
    readers  annotations with damage: records, or DataError
    server   bodies over HTTP (with the extra "scale"): a status below 500

It works on tiny models with random weights. The exit status is 1 if there was a bug.
"""

import argparse
import base64
import copy
import io
import json
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from PIL import Image

from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig
from traffic_vlm.data.formats import Problems, load_mapping, read_source
from traffic_vlm.data.questions import ask
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.utils import DataError


ROOT = Path(__file__).resolve().parent.parent
SHARES = {"images": 25, "texts": 25, "model": 20, "configs": 10, "readers": 10, "server": 10}
FORM = "multipart/form-data; boundary=a"
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
VISION = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"conv_widths": [4, 4, 4, 8, 8, 16], "conv_depths": [1, 1, 1, 1], "conv_kernel_sizes": [3, 3, 3, 3]}
VISION |= {"conv_strides": [2, 2, 2, 2]}


class Dice(random.Random):
    """Random numbers, and strange values made of them."""

    def size(self) -> int:
        return self.choice([0, 1, 1, 2, 3, 4, 7, 16, 31, 64, 224, 300])

    def number(self) -> Any:
        odd = [0, 1, -1, 2, 3, 0.5, -0.0, 1e9, -1e9, 2**31, 2**63, 2**70, 1e-300, 1e300]
        return self.choice([*odd, float("nan"), float("inf"), float("-inf"), self.randint(-5, 600), self.random()])

    def value(self, depth: int = 2) -> Any:
        """Anything that JSON or Python may hand over."""
        simple: list[Callable[[], Any]] = [self.number, self.text, lambda: None, lambda: True, lambda: False]
        if depth:
            simple += [lambda: [self.value(depth - 1) for _ in range(self.randint(0, 3))]]
            simple += [lambda: {self.text(): self.value(depth - 1) for _ in range(self.randint(0, 3))}]
        return self.choice(simple)()

    def text(self) -> str:
        words = ["is", "there", "a", "car", "traffic", "light", "red", "?", "[PAD]", "[YES]", "[EOS]", "", " ", "\n"]
        words += [
            "🚗",
            "\x00",
            "\ud800",
            "ﬁ",
            "İ",
            "e\u0301" * 30,
            "ǅ",
            "\u202e",
            "'",
            "isn't",
            "?" * 300,
            "car " * 200,
        ]
        words += ["".join(chr(self.choice([self.randint(0, 127), self.randint(0, 0xFFFF)])) for _ in range(8))]
        return self.choice(["", " "]).join(self.choice(words) for _ in range(self.randint(0, 8)))

    def damage(self, data: bytes) -> bytes:
        """Bytes that are cut, changed, doubled or exchanged somewhere."""
        changed = bytearray(data)
        for _ in range(self.randint(1, 8)):
            if not changed:
                break
            place, how = self.randrange(len(changed)), self.randrange(4)
            if how == 0:
                changed[place] = self.randrange(256)
            elif how == 1:
                del changed[place : place + self.randint(1, 64)]
            elif how == 2:
                changed[place:place] = self.randbytes(self.randint(1, 16))
            else:
                del changed[self.randrange(place + 1) + place // 2 :]
        return bytes(changed)

    def damage_json(self, data: Any) -> Any:
        """Plain values, one of which is exchanged, taken away, or joined by another."""
        data = copy.deepcopy(data)
        places = list(_containers(data))
        for _ in range(self.randint(1, 3)):
            holder = self.choice(places)
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                continue
            key, how = self.choice(keys), self.randrange(3)
            if how == 0:
                holder[key] = self.value()
            elif how == 1:
                del holder[key]
            elif isinstance(holder, dict):
                holder[self.text()] = self.value()
            else:
                holder.insert(key, self.value())
        return data


def _containers(data: Any) -> Iterator[Any]:
    if isinstance(data, dict | list):
        yield data
        for inner in data.values() if isinstance(data, dict) else data:
            yield from _containers(inner)


@cache
def processor() -> Any:
    return TrafficVLMProcessor.from_pretrained(ROOT)


@cache
def model() -> Any:
    torch.manual_seed(0)
    return TrafficVLMForConditionalGeneration(TrafficVLMConfig(VISION, TEXT)).eval()


@cache
def picture_files() -> dict[str, bytes]:
    """The same picture in several formats."""
    image = Image.new("RGB", (20, 12), "orange")
    files = {}
    for name in ("png", "jpeg", "gif", "bmp", "webp", "tiff", "ppm"):
        stream = io.BytesIO()
        image.save(stream, name)
        files[name] = stream.getvalue()
    return files


def strange_image(dice: Dice, folder: Path) -> Any:
    kind = dice.randrange(6)
    if kind == 0:  # an array of some dtype, shape and values
        shape = [dice.choice([dice.size(), 1, 3, 4]) for _ in range(dice.choice([0, 1, 2, 3, 3, 3, 4]))]
        while np.prod(shape) > 300_000:
            shape[int(np.argmax(shape))] //= 4
        dtype = dice.choice(
            ["uint8", "int16", "uint16", "int64", "float16", "float32", "float64", "bool", "complex64"]
        )
        array = np.full(shape, dice.choice([0, 1, 255, 256, 0.5, -1, 1e4]), "float64")
        if array.size and dice.random() < 0.3:
            array.flat[0] = dice.choice([np.nan, np.inf, -np.inf, 1e30, -5.0])
        with np.errstate(all="ignore"):
            array = array.astype(dtype)
        return torch.from_numpy(array) if dtype != "uint16" and dice.random() < 0.3 else array
    if kind == 1:  # a picture of some mode and size
        mode = dice.choice(["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "LA", "PA", "I;16"])
        return Image.new(mode, (dice.size(), dice.size()))
    data = dice.choice(list(picture_files().values()))
    data = dice.damage(data) if dice.random() < 0.8 else data
    if kind == 2:  # a file
        path = folder / "strange"
        path.write_bytes(data)
        return dice.choice([path, str(path), folder, folder / "missing"])
    if kind == 3:
        return dice.choice(["data:image/png;base64,", ""]) + base64.b64encode(data).decode()
    if kind == 4:
        try:
            return Image.open(io.BytesIO(data))  # which is read only later
        except Exception:
            return data
    return dice.value()


def fuzz_images(dice: Dice, folder: Path) -> None:
    images = [strange_image(dice, folder) for _ in range(dice.choice([1, 1, 1, 2, 0]))]
    given = images[0] if len(images) == 1 and dice.random() < 0.5 else images
    if isinstance(given, str) and given.startswith("http"):
        return
    pixels = processor()(images=given, return_tensors="pt")["pixel_values"]
    assert pixels.shape[1:] == (3, 224, 224) and bool(torch.isfinite(pixels).all()), pixels.shape


def fuzz_texts(dice: Dice, folder: Path) -> None:
    def some(depth: int) -> Any:
        return [some(depth - 1) for _ in range(dice.randint(0, 3))] if depth else dice.text()

    text: Any = dice.value() if dice.random() < 0.15 else some(dice.choice([0, 1, 2, 2]))
    options: dict[str, Any] = {"packed": dice.random() < 0.6, "on_unknown": dice.choice(["ignore", "raise", "ignore"])}
    if dice.random() < 0.3:
        options["suffix"] = some(dice.choice([0, 1, 2]))
    if dice.random() < 0.2:
        options["truncation"] = True
    if dice.random() < 0.2:
        options[dice.choice(["padding_side", "max_length", "pad_to_multiple_of", "padding", "other"])] = dice.value(0)
    inputs = processor()(text=text, return_tensors="pt", **options)
    ids = inputs["input_ids"]
    assert (ids.dtype == torch.int64 and ids.numel() == 0) or 0 <= int(ids.min()) <= int(ids.max()) < 500
    if len(ids) and not options["packed"] and "suffix" not in options:
        processor().batch_decode(ids)


def strange_tensor(dice: Dice, shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
    """Numbers of about this shape, mostly in this range."""
    if dice.random() < 0.2:
        shape = tuple(max(0, size + dice.choice([-1, 0, 1])) for size in shape)
    if dice.random() < 0.1:
        shape = (*shape, dice.randint(0, 2)) if dice.random() < 0.5 else shape[1:]
    if dice.random() < 0.1:
        low, high = low - 2, high + 5
    values = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(dice.randrange(2**31)))
    dtypes = [torch.int64] * 12 + [torch.int32, torch.float32, torch.bool, torch.uint8, torch.float16]
    return values.to(dice.choice(dtypes))


def fuzz_model(dice: Dice, folder: Path) -> None:
    rows, length, images = dice.randint(1, 3), dice.choice([1, 2, 5, 9, 130]), dice.randint(1, 3)
    inputs: dict[str, Any] = {"input_ids": strange_tensor(dice, (rows, length), 0, 500)}
    if dice.random() < 0.6:
        size = 224 if dice.random() < 0.9 else dice.size()
        inputs["pixel_values"] = torch.randn(dice.choice([rows, images]), dice.choice([3, 3, 3, 1]), size, size)
        if inputs["pixel_values"].numel() and dice.random() < 0.1:
            inputs["pixel_values"].flatten()[0] = float("nan")
    for name, high, shape in (
        ("attention_mask", 2, (rows, length)),
        ("position_ids", 128, (rows, length)),
        ("segment_ids", 3, (rows, length)),
        ("image_index", images, (rows,)),
        ("encoder_attention_mask", 2, (images, 196)),
        ("question_ends", length, (rows, 2)),
        ("labels", 500, (rows, length)),
    ):
        if dice.random() < 0.25:
            inputs[name] = strange_tensor(dice, shape, 0, high)
    how = dice.randrange(4)
    with torch.no_grad():
        if how < 2:
            found = model()(**inputs, use_cache=dice.random() < 0.5).logits
            finite = found[..., 1:]  # that of [PAD] is the lowest number
        elif how == 2:
            finite = torch.cat([torch.zeros(0), *model().score_yes_no(**inputs)])
        else:
            inputs = {name: value for name, value in inputs.items() if name not in ("labels", "question_ends")}
            finite = model().generate(**inputs, max_new_tokens=dice.choice([1, 3]), do_sample=False)
    assert bool(torch.isfinite(finite.float()).all()), "not finite"


def fuzz_configs(dice: Dice, folder: Path) -> None:
    text, vision, whole = dict(TEXT), dict(VISION), {}
    small: list[Any] = [0, 1, 2, 3, 4, 7, 8, 32, 33, -1, 0.5, None, "a", True, [], [1, 2]]
    for _ in range(dice.randint(1, 3)):
        part = dice.choice([text, vision, whole])
        names = {
            id(text): [*TEXT, "vocab_size", "rms_norm_eps", "pad_token_id", "eos_token_id", "max_position_embeddings"],
            id(vision): [*VISION, "image_size", "patch_size", "num_channels", "layer_norm_eps", "model_type"],
            id(whole): ["yes_no_temperature", "tie_word_embeddings", "use_cache", "image_token_id"],
        }[id(part)]
        part[dice.choice(names)] = dice.choice(small)
    config = TrafficVLMConfig(vision, text, **whole)
    built = TrafficVLMForConditionalGeneration(config).eval()
    channels, size = config.vision_config.num_channels, config.vision_config.image_size
    if isinstance(size, int) and size <= 256:
        with torch.no_grad():
            built(torch.tensor([[config.get_text_config().vocab_size - 1]]), torch.zeros(1, channels, size, size))


LABELS = {
    "images": [{"id": 1, "file_name": "a.png", "width": 20, "height": 12}],
    "categories": [{"id": 1, "name": "Car"}, {"id": 2, "name": "light"}],
    "annotations": [
        {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 8, 6], "iscrowd": 0},
        {"id": 2, "image_id": 1, "category_id": 2, "bbox": [12, 1, 3, 6]},
    ],
}
MAPPING = {
    "name": "fuzz",
    "format": "coco",
    "splits": {"train": {"images": "images", "annotations": "labels.json"}},
    "classes": {"Car": "car", "light": {"class": "traffic light", "state": "red"}},
    "exhaustive": ["car", "traffic light"],
}


def fuzz_readers(dice: Dice, folder: Path) -> None:
    (folder / "images").mkdir(exist_ok=True)
    png = picture_files()["png"]
    (folder / "images/a.png").write_bytes(dice.damage(png) if dice.random() < 0.2 else png)
    labels = dice.damage_json(LABELS) if dice.random() < 0.7 else LABELS
    written = json.dumps(labels).encode()
    (folder / "labels.json").write_bytes(dice.damage(written) if dice.random() < 0.3 else written)
    mapping = dice.damage_json(MAPPING) if dice.random() < 0.3 else MAPPING
    (folder / "mapping.json").write_text(json.dumps(mapping))
    for record in read_source(folder, load_mapping(folder / "mapping.json"), "train", Problems()):
        ask(record.scene, dice, 8)


def fuzz_server(dice: Dice, folder: Path) -> None:
    text = quote(dice.text().encode("utf-8", "replace"))  # what a client can put into a path or a header
    path = dice.choice(["/v1/answer", "/v1/answer", "/v1/generate", "/healthz", "/metrics", f"/{text[:40]}"])
    image = dice.choice(list(picture_files().values()))
    image = dice.damage(image) if dice.random() < 0.3 else image
    body: Any = {"image": base64.b64encode(image).decode(), "questions": ["Is there a car?"], "question": "Is it wet?"}
    body.pop("question" if path == "/v1/answer" else "questions")
    kind = dice.choice(["application/json"] * 3 + [FORM] * 3 + ["multipart/form-data", text])
    if kind == FORM:
        asked = [(name, dice.text().encode("utf-8", "replace")) for name in body if name != "image"]
        parts = [b'image"; filename="a.jpg"\r\n\r\n' + image]
        parts += [name.encode() + b'"\r\n\r\n' + value for name, value in asked for _ in range(dice.randint(0, 2))]
        sent = b"".join(b'--a\r\nContent-Disposition: form-data; name="' + part + b"\r\n" for part in parts) + b"--a--"
    else:
        sent = json.dumps(dice.damage_json(body) if dice.random() < 0.7 else body).encode()
    sent = dice.damage(sent) if dice.random() < 0.4 else sent
    method = dice.choice(["POST", "POST", "GET", "PUT"])
    answer = client().request(method, path, content=sent, headers={"content-type": kind})
    assert answer.status_code < 500, f"{path}: {answer.status_code} {answer.text[:200]}"


@cache
def client() -> Any:
    """The service around a tiny model, without a network."""
    from starlette.testclient import TestClient

    from traffic_vlm.serving.api import build_app
    from traffic_vlm.serving.service import Settings

    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:  # read here, and not again
        model().save_pretrained(folder)
        processor().save_pretrained(folder)
        return TestClient(build_app(Settings(folder, "cpu")), raise_server_exceptions=False)


KINDS: dict[str, tuple[Callable[[Dice, Path], None], tuple[type[Exception], ...]]] = {
    "images": (fuzz_images, (ValueError, TypeError)),
    "texts": (fuzz_texts, (ValueError, TypeError)),
    "model": (fuzz_model, (ValueError, TypeError)),
    "configs": (fuzz_configs, (ValueError, TypeError)),
    "readers": (fuzz_readers, (DataError,)),
    "server": (fuzz_server, ()),
}


def fuzz(number: int, seed: int, kinds: list[str]) -> int:
    """Do the cases; how many of them found a bug."""
    outcomes: Counter[tuple[str, str]] = Counter()
    weights = [SHARES[kind] for kind in kinds]
    for case in range(number):
        dice = Dice(seed + case)
        kind = dice.choices(kinds, weights)[0]
        run, promised = KINDS[kind]
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            try:
                run(dice, Path(folder))
                outcomes[kind, "answered"] += 1
            except promised:
                outcomes[kind, "refused"] += 1
            except Exception:
                outcomes[kind, "bugs"] += 1
                again = f"--seed {seed + case} --number 1" + f" --only {' '.join(kinds)}" * (len(kinds) < len(KINDS))
                print(f"bug in {kind}: python scripts/fuzz.py {again}\n{traceback.format_exc()}", flush=True)
        if (case + 1) % 1000 == 0:
            print(f"{case + 1:,} of {number:,}", flush=True)
    for kind in kinds:
        print(kind, ", ".join(f"{outcomes[kind, what]:,} {what}" for what in ("answered", "refused", "bugs")))
    return sum(count for (_, what), count in outcomes.items() if what == "bugs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    bugs = fuzz(arguments.number, arguments.seed, arguments.only)
    print(f"seeds {arguments.seed} to {arguments.seed + arguments.number - 1}: {bugs} bugs")
    return 1 if bugs else 0


if __name__ == "__main__":
    sys.exit(main())

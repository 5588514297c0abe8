"""Exported graphs give what the model gives, for any number of images, questions and tokens."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny import ROOT, random_ids, random_pixels


for name in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(name)

import onnxruntime  # noqa: E402

from traffic_vlm.export.onnx import NAMES, load, store_in_less  # noqa: E402
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline  # noqa: E402
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor  # noqa: E402


QUESTIONS = ["Is there a car?", "Is the traffic light red?", "Is it raining?", "Is there a bus on the left?"]


@pytest.fixture(scope="module")
def run(exported):
    """A function that runs a graph by its name."""
    sessions = {name: onnxruntime.InferenceSession(exported[1] / f"{name}.onnx") for name in NAMES}

    def run_onnx(name, **inputs):
        outputs = sessions[name].run(None, {key: value.numpy() for key, value in inputs.items()})
        return tuple(map(torch.from_numpy, outputs))

    return run_onnx


def assert_near(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("images", "questions"), [(1, 1), (3, 2), (2, 4)])
def test_score_equals_the_model(exported, run, images, questions):
    model, processor = load(exported[0])
    pixels = random_pixels(images, seed=images)
    text = [QUESTIONS[i % 2 :][:questions] for i in range(images)]  # rows of different lengths need padding
    inputs = processor(text=text, packed=True, return_tensors="pt")
    keys, values = run("vision", pixel_values=pixels)
    for (key, value), *actual in zip(model.encode_images(pixels).key_values, keys, values, strict=True):
        assert_near(actual[0], key)
        assert_near(actual[1], value)
    names = ("input_ids", "position_ids", "segment_ids", "question_ends")
    [scores] = run("score", **{name: inputs[name] for name in names}, image_keys=keys, image_values=values)
    expected, _ = model.question_logits(**inputs, pixel_values=pixels)
    assert_near(scores[inputs["question_ends"] >= 0], model.yes_probability(expected))


@torch.no_grad()
@pytest.mark.parametrize(("rows", "length", "steps"), [(1, 2, 6), (3, 9, 3)])
def test_decode_equals_the_model(exported, run, rows, length, steps):
    model, _ = load(exported[0])
    pixels, ids = random_pixels(rows, seed=3), random_ids(rows, length, seed=4)
    options = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, pixel_values=pixels, **options)
    keys, values = run("vision", pixel_values=pixels)
    text = model.config.get_text_config()
    cache = [torch.zeros(text.num_hidden_layers, rows, text.num_key_value_heads, 0, text.head_dim) for _ in range(2)]
    for step in range(steps):
        inputs = {"input_ids": ids, "past_keys": cache[0], "past_values": cache[1]}
        p_yes, log_probs, *cache, maps = run("decode", **inputs, image_keys=keys, image_values=values)
        logits = expected.logits[step]
        assert_near(p_yes, model.yes_probability(logits))
        assert_near(log_probs[:, 1:], logits[:, 1:].log_softmax(-1))  # without [PAD]
        if not step:
            assert_near(maps, model.attention_maps(ids, pixels).flatten(2))
        assert cache[0].shape[3] == length + step
        ids = expected.sequences[:, length + step][:, None]


def test_weights_in_fewer_bits_are_close_and_smaller(exported, tmp_path):
    pixels, outputs = {"pixel_values": random_pixels(2).numpy()}, []
    whole = exported[1] / "vision.onnx"
    path = Path(shutil.copy(whole, tmp_path))
    store_in_less(path)
    for one in (whole, path):
        outputs.append(onnxruntime.InferenceSession(one).run(["image_keys"], pixels)[0])
    exact, stored = outputs
    assert 0 < np.abs(exact - stored).mean() < 0.1 * np.abs(exact).mean()
    assert path.stat().st_size < whole.stat().st_size


ASKED = (ROOT / "tests/data/asked.txt").read_text("utf-8").splitlines()
ASKED += ["Is  there a car…", "Is there a \U000f0000bus\U000f0001?", "yes?", "Isn't there a bus?", "car " * 130]


@pytest.mark.parametrize("own_questions", [False, True])
def test_the_program_in_the_docs_answers_as_the_pipeline_does_without_torch(exported, tmp_path, own_questions):
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/serving.md").read_text(), re.DOTALL)
    assert len(program.splitlines()) <= 80
    folder, image = exported[0], ROOT / "docs/example.jpg"
    graphs = shutil.copytree(exported[1], tmp_path / "graphs")
    about = json.loads((graphs / "export.json").read_text()) | {"own_questions": own_questions}
    (graphs / "export.json").write_text(json.dumps(about))
    for name in ("torch", "transformers"):  # the packages exist but cannot be imported
        (tmp_path / f"{name}.py").write_text("raise ImportError(__name__)")
    command = [sys.executable, "-c", program, str(graphs), str(image), *ASKED]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    processor = TrafficVLMProcessor.from_pretrained(folder, own_questions=own_questions)
    expected = TrafficVLMPipeline(model=load(folder)[0], processor=processor, device="cpu")(image, ASKED)
    items = list(map(json.loads, done.stdout.splitlines()))
    for item, other in zip(items, expected, strict=True):
        numbers = {name: pytest.approx(number, abs=1e-3) for name, number in other.items() if type(number) is float}
        assert item == other | numbers
    assert any(len((item["answer"] or "").split()) > 1 for item in items) == own_questions

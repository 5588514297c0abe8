"""Exported graphs give what the model gives, for any number of images, questions and tokens."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tiny import ROOT, TINY_TOWER, random_ids, random_pixels, save_folder, tiny_model


for name in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(name)

import onnxruntime  # noqa: E402

from traffic_vlm.data.dataset import synthetic_rows  # noqa: E402
from traffic_vlm.evaluation.predict import predict  # noqa: E402
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor  # noqa: E402
from traffic_vlm.publishing.export import NAMES, load  # noqa: E402
from traffic_vlm.publishing.exported import ExportedModel  # noqa: E402
from traffic_vlm.scoring_traffic_vlm import height_and_width  # noqa: E402
from traffic_vlm.serving.answerer import Answerer  # noqa: E402


QUESTIONS = ["Is there a car?", "Is the traffic light red?", "Is it raining?", "Is there a bus on the left?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    vision = {"model_type": "traffic_vlm_vision"} | TINY_TOWER
    torch.manual_seed(0)
    config = tiny_model().config.to_dict()
    model = type(tiny_model())(type(tiny_model().config)(vision, config["text_config"], yes_no_temperature=1.7))
    return save_folder(model.eval(), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("export") / "all"
    script(folder, output, "onnx", "int8", "torch")
    return output


def script(folder, output, *formats) -> str:
    command = [sys.executable, ROOT / "scripts/export.py", "--model", folder, "--output", output, "--format", *formats]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=["onnx", "torch"])
def run(request, exported):
    """A function that runs a graph by its name."""
    if request.param == "torch":
        programs = {name: torch.export.load(exported / f"{name}.pt2").module() for name in NAMES}
        return lambda name, **inputs: programs[name](**inputs)
    sessions = {name: onnxruntime.InferenceSession(exported / f"{name}.onnx") for name in NAMES}

    def with_onnx(name, **inputs):
        found = sessions[name].run(None, {key: value.numpy() for key, value in inputs.items()})
        return torch.from_numpy(found[0]) if len(found) == 1 else tuple(map(torch.from_numpy, found))

    return with_onnx


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("images, questions", [(1, 1), (1, 4), (3, 2), (2, 4)])
def test_questions(folder, run, images, questions):
    model, processor = load(folder), TrafficVLMProcessor.from_pretrained(folder)
    pixels = random_pixels(images, seed=images)
    text = [QUESTIONS[number % 2 :][:questions] for number in range(images)]  # rows of other lengths: padding
    inputs = processor(text=text, packed=True, return_tensors="pt")
    keys, values = run("vision", pixel_values=pixels)
    for (key, value), one, other in zip(model.encode_images(pixels).key_values, keys, values, strict=True):
        close(one, key)
        close(other, value)
    wanted = ("input_ids", "position_ids", "segment_ids", "question_ends")
    found = run("score", **{name: inputs[name] for name in wanted}, image_keys=keys, image_values=values)
    exact = model.score_yes_no(**inputs, pixel_values=pixels), model.question_logits(**inputs, pixel_values=pixels)
    for scores, logits, ends, *expected in zip(*found, inputs["question_ends"], *exact):
        close(scores[ends >= 0], expected[0])
        close(logits[ends >= 0][:, 1:], expected[1][:, 1:])  # [PAD] is the caller's to leave out


@torch.no_grad()
@pytest.mark.parametrize("rows, length, steps", [(1, 2, 6), (3, 9, 3)])
def test_words(folder, run, rows, length, steps):
    model = load(folder)
    pixels, ids = random_pixels(rows, seed=3), random_ids(rows, length, seed=4)
    expected = model.generate(
        ids, pixel_values=pixels, max_new_tokens=steps, min_new_tokens=steps, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    keys, values = run("vision", pixel_values=pixels)
    text = model.config.get_text_config()
    cache = [torch.zeros(text.num_hidden_layers, rows, text.num_key_value_heads, 0, text.head_dim) for _ in range(2)]
    read = ids
    for step in range(steps):
        logits, *cache = run(
            "decode", input_ids=read, past_keys=cache[0], past_values=cache[1], image_keys=keys, image_values=values
        )
        close(logits[:, 1:], expected.logits[step][:, 1:])  # [PAD] is the caller's to leave out
        assert cache[0].shape[3] == length + step
        read = expected.sequences[:, length + step][:, None]


@torch.no_grad()
def test_the_shipped_weights_on_the_example_scenes(tmp_path):
    script(ROOT, tmp_path / "onnx", "onnx")
    answerer = Answerer(ROOT, "cpu")
    graphs = ExportedModel(tmp_path / "onnx", answerer.model.config)
    pixels = answerer.read(sorted((ROOT / "docs").glob("example*.jpg")))
    assert len(pixels) == 4
    inputs = answerer.processor(text=[QUESTIONS] * 4, packed=True, return_tensors="pt")
    exact = answerer.model.question_logits(**inputs, pixel_values=pixels)
    for logits, expected in zip(graphs.question_logits(**inputs, encoded_images=graphs.encode_images(pixels)), exact):
        close(logits[:, 1:], expected[:, 1:])


def test_graphs_are_evaluated_as_the_model_is(folder, exported, tmp_path):
    rows = synthetic_rows(first_seed=5, num_images=6)
    model, processor = load(folder), TrafficVLMProcessor.from_pretrained(folder)
    graphs = ExportedModel(exported, model.config)
    found = [predict(asked, processor, rows, progress=False) for asked in (model, graphs)]
    for one, other in zip(*found, strict=True):
        assert one.text == other.text
        assert one.probability == pytest.approx(other.probability, abs=1e-4)
        assert one.logit_margin == pytest.approx(other.logit_margin, abs=1e-3)
    make = [sys.executable, ROOT / "scripts/make_dataset.py", "--num_images", "8", "--output_dir", tmp_path / "data"]
    subprocess.run([str(part) for part in make], check=True, capture_output=True, timeout=120)
    evaluate = [sys.executable, ROOT / "scripts/evaluate.py", "--model", folder, "--dataset", tmp_path / "data"]
    evaluate += ["--output_dir", tmp_path / "report", "--exported", exported, "--int8"]
    done = subprocess.run([str(part) for part in evaluate], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report/report.json").read_text())
    assert report["yes_no"]["all"]["questions"] > 0 and report["words"]["all"]["questions"] > 0
    assert not report["perplexity"] and not report["pointing"]
    with pytest.raises(ValueError, match=r"vision.onnx: there is no such graph; scripts/export.py writes them"):
        ExportedModel(tmp_path, model.config)


def test_int8_is_near(folder, exported):
    config, processor = load(folder).config, TrafficVLMProcessor.from_pretrained(folder)
    pixels, inputs = random_pixels(2), processor(text=[QUESTIONS] * 2, packed=True, return_tensors="pt")
    ids = random_ids(2, 6).numpy()
    found = []
    for kind in ("", "_int8"):
        graphs = ExportedModel(exported, config, kind)
        seen = graphs.encode_images(pixels)
        scores = torch.cat(graphs.question_logits(**inputs, encoded_images=seen)).numpy()
        text = config.get_text_config()
        empty = np.zeros((text.num_hidden_layers, 2, text.num_key_value_heads, 0, text.head_dim), np.float32)
        read = {"input_ids": ids, "past_keys": empty, "past_values": empty} | seen.rows([0, 1])
        found.append((seen.keys, scores, graphs.sessions["decode"].run(["logits"], read)[0]))
    for exact, near in zip(*found):
        assert 0 < np.abs(exact - near).mean() < 0.1 * np.abs(exact).mean()
    for name in NAMES:
        assert (exported / f"{name}_int8.onnx").stat().st_size < (exported / f"{name}.onnx").stat().st_size


def test_the_example_answers_without_torch(folder, exported, tmp_path):
    picture = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 120, 4), dtype=np.uint8)).save(
        picture
    )  # with alpha
    asked = [*QUESTIONS, "Is  there a car…", "Is there a bus？"]
    code = "import runpy, sys; sys.modules['torch'] = sys.modules['transformers'] = None; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, ROOT / "scripts/ask_onnx.py", exported, picture, *asked]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answerer = Answerer(folder, "cpu")
    inputs = answerer.processor(images=[Image.open(picture)], text=[asked], packed=True, return_tensors="pt")
    [scores] = answerer.model.score_yes_no(**inputs)
    printed = [line.rsplit("  ", 2) for line in done.stdout.splitlines()]
    assert [line[0] for line in printed] == asked
    assert [float(line[2]) for line in printed] == pytest.approx(scores.tolist(), abs=2e-3)
    example = (ROOT / "scripts/ask_onnx.py").read_text().splitlines()
    assert len([line for line in example if line.strip()]) <= 40


def test_the_example_refuses_a_question_that_is_too_long(exported):
    command = [sys.executable, ROOT / "scripts/ask_onnx.py", exported, ROOT / "docs/example.jpg", "car " * 130]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "a question has 132 tokens, at most 128 are allowed" in done.stderr


def test_the_example_names_questions_with_unknown_words(exported):
    command = [sys.executable, ROOT / "scripts/ask_onnx.py", exported, ROOT / "docs/example.jpg"]
    asked = [*command, "Is there a zebra?", "Is there a car?"]
    done = subprocess.run([str(part) for part in asked], capture_output=True, text=True, timeout=60)
    assert ["unknown words" in line for line in done.stdout.splitlines()] == [True, False], done.stderr
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "ask_onnx.py runs/onnx docs/example.jpg" in done.stderr


def test_sizes_are_told(exported):
    assert height_and_width(64) == (64, 64) and height_and_width([64, 128]) == (64, 128)
    about = json.loads((exported / "export.json").read_text())
    assert about["layers"] == 2 and about["image_size"] == [224, 224] and about["start"] == 2


def test_what_cannot_be_exported_is_said(folder, exported, tmp_path):
    lacking = shutil.copytree(folder, tmp_path / "lacking")
    tensors = load_file(lacking / "model.safetensors")
    del tensors["model.projector.bias"]
    save_file(tensors, lacking / "model.safetensors", {"format": "pt"})
    for options, message in {
        ("--output", str(exported)): "exists; choose another folder",
        ("--output", str(tmp_path / "new"), "--format", "int8"): "ask for both",
        ("--output", str(tmp_path / "new"), "--model", str(tmp_path)): "model.safetensors",
        ("--output", str(tmp_path / "new"), "--model", str(lacking)): "the weights have no model.projector.bias",
    }.items():
        command = [sys.executable, str(ROOT / "scripts/export.py"), "--model", str(folder), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not (tmp_path / "new").exists()

"""Exported graphs give what the model gives, for any number of images, questions and tokens."""

import contextlib
import io
import json
import os
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tiny import ROOT, TINY_TEXT, TINY_TOWER, new_process, random_ids, random_pixels, save_folder


for name in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(name)

import onnxruntime  # noqa: E402

from traffic_vlm.configuration_traffic_vlm import TrafficVLMConfig  # noqa: E402
from traffic_vlm.data.dataset import synthetic_rows  # noqa: E402
from traffic_vlm.evaluation.predict import predict  # noqa: E402
from traffic_vlm.export.asking import as_typed  # noqa: E402
from traffic_vlm.export.onnx import NAMES, export, load  # noqa: E402
from traffic_vlm.export.runtime import ExportedModel  # noqa: E402
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration  # noqa: E402
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline, answer_notes, answer_text  # noqa: E402
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor  # noqa: E402


QUESTIONS = ["Is there a car?", "Is the traffic light red?", "Is it raining?", "Is there a bus on the left?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = TrafficVLMConfig({"model_type": "traffic_vlm_vision"} | TINY_TOWER, TINY_TEXT, yes_no_temperature=1.7)
    model = TrafficVLMForConditionalGeneration(config).eval()
    return save_folder(model, tmp_path_factory.mktemp("model"))


def make_pipeline(folder, graphs=None, own_questions=False):
    """A pipeline that asks the model of a folder, or its graphs."""
    processor = TrafficVLMProcessor.from_pretrained(folder, own_questions=own_questions)
    return TrafficVLMPipeline(model=graphs or load(folder), processor=processor, device="cpu", min_score=0)


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    """The folder of all graphs, and printed.txt, what `export` printed."""
    output, said = tmp_path_factory.mktemp("export") / "all", io.StringIO()
    with contextlib.redirect_stdout(said):
        export(folder, output, ["onnx", "int8", "torch"])
    (output / "printed.txt").write_text(said.getvalue())
    return output


def test_each_graph_has_a_line_with_its_seconds(exported):
    lines = re.findall(r"^(\S+): .* \.\.\. \d+ s$", (exported / "printed.txt").read_text(), re.MULTILINE)
    assert lines == [f"{name}{end}" for end in (".pt2", ".onnx", "_int8.onnx") for name in NAMES]


@pytest.fixture(scope="module", params=["onnx", "torch"])
def run(request, exported):
    """A function that runs a graph by its name."""
    if request.param == "torch":
        programs = {name: torch.export.load(exported / f"{name}.pt2").module() for name in NAMES}
        return lambda name, **inputs: programs[name](**inputs)
    sessions = {name: onnxruntime.InferenceSession(exported / f"{name}.onnx") for name in NAMES}

    def run_onnx(name, **inputs):
        outputs = sessions[name].run(None, {key: value.numpy() for key, value in inputs.items()})
        return tuple(map(torch.from_numpy, outputs))

    return run_onnx


def assert_near(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(("images", "questions"), [(1, 1), (3, 2), (2, 4)])
def test_score_equals_the_model(folder, run, images, questions):
    model, processor = load(folder), TrafficVLMProcessor.from_pretrained(folder)
    pixels = random_pixels(images, seed=images)
    text = [QUESTIONS[i % 2 :][:questions] for i in range(images)]  # rows of different lengths need padding
    inputs = processor(text=text, packed=True, return_tensors="pt")
    keys, values = run("vision", pixel_values=pixels)
    for (key, value), *actual in zip(model.encode_images(pixels).key_values, keys, values, strict=True):
        assert_near(actual[0], key)
        assert_near(actual[1], value)
    names = ("input_ids", "position_ids", "segment_ids", "question_ends")
    outputs = run("score", **{name: inputs[name] for name in names}, image_keys=keys, image_values=values)
    expected = model.score_yes_no(**inputs, pixel_values=pixels), model.question_logits(**inputs, pixel_values=pixels)
    for scores, logits, ends, expected_scores, expected_logits in zip(*outputs, inputs["question_ends"], *expected):
        assert_near(scores[ends >= 0], expected_scores)
        assert_near(logits[ends >= 0][:, 1:], expected_logits[:, 1:])  # the logit of [PAD] is meaningless


@torch.no_grad()
@pytest.mark.parametrize(("rows", "length", "steps"), [(1, 2, 6), (3, 9, 3)])
def test_decode_equals_the_model(folder, run, rows, length, steps):
    model = load(folder)
    pixels, ids = random_pixels(rows, seed=3), random_ids(rows, length, seed=4)
    options = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, pixel_values=pixels, **options)
    keys, values = run("vision", pixel_values=pixels)
    text = model.config.get_text_config()
    cache = [torch.zeros(text.num_hidden_layers, rows, text.num_key_value_heads, 0, text.head_dim) for _ in range(2)]
    for step in range(steps):
        inputs = {"input_ids": ids, "past_keys": cache[0], "past_values": cache[1]}
        logits, *cache = run("decode", **inputs, image_keys=keys, image_values=values)
        assert_near(logits[:, 1:], expected.logits[step][:, 1:])
        assert cache[0].shape[3] == length + step
        ids = expected.sequences[:, length + step][:, None]


@pytest.mark.parametrize("own_questions", [False, True])
def test_graphs_answer_in_the_pipeline_as_the_model_does(folder, exported, tmp_path, own_questions):
    vqa = make_pipeline(folder, own_questions=own_questions)
    graphs = make_pipeline(folder, ExportedModel(exported, vqa.model.config), own_questions)
    paths = write_pictures(tmp_path)
    first = graphs.encode(paths[0])
    rows, expected = graphs([first, *paths[1:]], ASKED, batch_size=3), vqa(paths, ASKED, batch_size=3)
    for items, expected_items in zip([*rows, graphs(first, ASKED)], [*expected, expected[0]], strict=True):
        assert_same_items(items, expected_items)
    assert any(len((item["answer"] or "").split()) > 1 for row in rows for item in row) == own_questions
    with pytest.raises(IndexError):
        first[1]


def test_predictions_equal_those_of_the_model(folder, exported, tmp_path):
    rows = synthetic_rows(first_seed=5, num_images=6)
    model, processor = load(folder), TrafficVLMProcessor.from_pretrained(folder)
    found, expected = (predict(one, processor, rows) for one in (ExportedModel(exported, model.config), model))
    pd.testing.assert_frame_equal(found, expected, rtol=0, atol=1e-3)
    with pytest.raises(ValueError, match=r"vision.onnx does not exist; scripts/export.py writes it"):
        ExportedModel(tmp_path, model.config)


def test_int8_graphs_are_close_and_smaller(folder, exported):
    config, processor = load(folder).config, TrafficVLMProcessor.from_pretrained(folder)
    pixels, inputs = random_pixels(2), processor(text=[QUESTIONS] * 2, packed=True, return_tensors="pt")
    outputs = []
    for suffix in ("", "_int8"):
        graphs = ExportedModel(exported, config, suffix)
        images = graphs.encode_images(pixels)
        scores = torch.cat(graphs.question_logits(**inputs, encoded_images=images)).numpy()
        text = config.get_text_config()
        empty = np.zeros((text.num_hidden_layers, 2, text.num_key_value_heads, 0, text.head_dim), np.float32)
        prompt = {"input_ids": random_ids(2, 6).numpy(), "past_keys": empty, "past_values": empty}
        logits = graphs.sessions["decode"].run(["logits"], prompt | images.rows([0, 1]))[0]
        outputs.append((images.key_values[0], scores, logits))
    for exact, quantized in zip(*outputs):
        assert 0 < np.abs(exact - quantized).mean() < 0.1 * np.abs(exact).mean()
    for name in NAMES:
        assert (exported / f"{name}_int8.onnx").stat().st_size < (exported / f"{name}.onnx").stat().st_size


def write_pictures(folder):
    """Images that a simple reader shows white, black, on a wrong background or turned."""
    random = np.random.default_rng(0)
    scene = Image.open(ROOT / "docs/example.jpg").convert("L")
    paths = [folder / name for name in ("transparent.png", "16 bit.png", "float.tiff", "turned.jpg")]
    Image.fromarray(random.integers(0, 256, (90, 120, 4), dtype=np.uint8)).save(paths[0])
    Image.fromarray(np.asarray(scene, np.uint16) * 257).save(paths[1])
    Image.fromarray(np.asarray(scene, np.float32) / 255).save(paths[2])
    turned = Image.Exif()
    turned[0x0112] = 6
    scene.save(paths[3], exif=turned)
    return paths


ASKED = [
    *QUESTIONS,
    "Is  there a car…",
    "Is there a bus？",
    "What is [EOS] ahead",
    "What color is the car?",
    "Is there a zebra, a Zebra or an okapi?",
    "Is there a \U000f0000bus\U000f0001?",
    "Is there no bus?",
    "Is there a bus? Answer yes or no.",
    "yes?",
    # problems
    "Who is driving?",
    "Isn't there a bus?",
    "Is there a bus? Is it red?",
    "zebra qux?",
    "(...)",
    "car " * 130,
]


def assert_same_items(items, expected, tolerance=1e-3):
    """Items are equal, their numbers but for rounding."""
    for item, other in zip(items, expected, strict=True):
        numbers = {
            name: pytest.approx(other[name], abs=tolerance) for name in ("score", "p_yes") if other[name] is not None
        }
        assert item == other | numbers


@pytest.mark.parametrize("int8", [False, True])
def test_ask_onnx_gives_the_items_and_lines_of_ask(folder, exported, tmp_path, run_script, capsys, int8):
    pipe = make_pipeline(folder, ExportedModel(exported, load(folder).config, "_int8") if int8 else None)
    options = ["--int8"] * int8
    for path in write_pictures(tmp_path):
        run_script("ask_onnx.py", exported, path, *ASKED, "--json", *options, status=1)  # some have a problem
        line = json.loads(capsys.readouterr().out)
        assert line["image"] == str(path)
        # int8 scales are those of a pass, whose questions the pipeline packs in another way.
        assert_same_items(line["answers"], pipe(path, ASKED), 0.05 if int8 else 1e-3)
    run_script("ask_onnx.py", exported, path, *ASKED, *options, status=1)
    name, *lines = capsys.readouterr().out.splitlines()
    assert name == str(path)
    width = max(map(len, ASKED))
    for text, item in zip(lines, line["answers"], strict=True):
        notes = "".join(f"   ({note})" for note in answer_notes(item))
        assert text == f"  {item['question']:<{width}}  {answer_text(item)}{notes}"


@pytest.mark.slow
def test_ask_onnx_answers_without_torch(folder, exported, tmp_path, monkeypatch):
    """It is started as people do; the packages exist but cannot be imported."""
    image = ROOT / "docs/example.jpg"
    monkeypatch.setattr("traffic_vlm.question_traffic_vlm.MIN_SCORE", 0.05)  # as in the process
    for name in ("torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError(__name__)")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    arguments = [exported, image, *ASKED, "--json"]
    output = new_process("ask_onnx.py", tmp_path, *arguments, status=1, env={"PYTHONPATH": path})
    assert_same_items(json.loads(output)["answers"], make_pipeline(folder)(image, ASKED))


def test_ask_onnx_refuses_bad_input(exported, tmp_path, run_script, capsys):
    image = str(ROOT / "docs/example.jpg")
    old, lacking = tmp_path / "old", tmp_path / "lacking"
    for copy in (old, lacking):
        shutil.copytree(exported, copy, ignore=shutil.ignore_patterns("*_int8.onnx", "*.pt2"))
    (old / "export.json").write_text("{}")
    for arguments, message in (
        ([exported, image, "Is there a car?", image], "example.jpg: is a file, and not a question"),
        ([exported, "nowhere.jpg", "Is there a car?"], "nowhere.jpg: no such image"),
        ([exported, exported / "export.json", "Is there a car?"], "cannot read the image"),
        ([old, image, "Is there a car?"], "old: written by an earlier version"),
        ([lacking, image, "Is there a car?", "--int8"], "vision_int8.onnx does not exist: run scripts/export.py with"),
    ):
        run_script("ask_onnx.py", *arguments, status=2)
        assert message in capsys.readouterr().err


def test_export_refuses_what_it_cannot_do(folder, tmp_path):
    incomplete = shutil.copytree(folder, tmp_path / "incomplete")
    tensors = load_file(incomplete / "model.safetensors")
    del tensors["model.projector.bias"]
    save_file(tensors, incomplete / "model.safetensors", {"format": "pt"})
    for model, output, formats, message in (
        (tmp_path, tmp_path / "new", ["onnx"], "model.safetensors"),
        (incomplete, tmp_path / "new", ["onnx"], "the weights have no model.projector.bias"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            export(model, output, formats)
    assert not (tmp_path / "new").exists()


def test_the_page_names_words_as_typed_also_after_a_letter_that_is_two_in_lower_case():
    text = "Is an İİİİ or a Zorbel or a Quuxo here"
    assert list(as_typed(text, ["i̇i̇i̇i̇", "zorbel", "1/2", "quuxo"])) == ["İİİİ", "Zorbel", "1/2", "Quuxo"]

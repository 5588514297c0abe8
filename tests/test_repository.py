"""The folder as users meet it: saved by the package, loaded by auto classes in a fresh process, used by pipelines."""

import json
import os
import runpy
import subprocess
import sys
import textwrap
import venv

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tiny import ROOT, random_ids, random_pixels, tiny_config, tiny_model
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForCausalLM, TrafficVLMForSequenceClassification


HAS_DECISIONS = hasattr(transformers, "AutoModelForDecision")
QUESTIONS = ["Is there a car?", "Is the traffic light red?", "How many trucks are on the left?"]


def picture(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (60, 90, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, processor):
    """A tiny model with its processor, saved from the imported classes, and an image."""
    path = tmp_path_factory.mktemp("model")
    tiny_model(yes_no_temperature=1.6).save_pretrained(path)
    processor.save_pretrained(path)
    picture().save(path / "scene.png")
    return path


def fresh_process(code: str, cwd) -> str:
    """Run code in a new Python without this package, with an empty cache of remote code; its standard output."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(cwd / "modules"), "HF_HOME": str(cwd / "home")}
    block = "import sys; sys.modules['traffic_vlm'] = None  # not to be found: the folder must do alone\n"
    code = block + "import torch; torch.set_num_threads(1)\n" + textwrap.dedent(code)
    run = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def test_saved_folder_is_complete(folder):
    names = {path.name for path in folder.iterdir()}
    modules = {path.name for path in ROOT.glob("*_traffic_vlm.py")}
    assert modules <= names
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert {"tokenizer_config.json", "processor_config.json", "decision.json", "decision_template.jinja"} <= names
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert auto_map == json.loads((ROOT / "config.json").read_text())["auto_map"]


def test_every_auto_class_loads_it_in_a_fresh_process(folder, tmp_path):
    ids, pixels = random_ids(2, 5), random_pixels(2)
    with torch.no_grad():
        expected = tiny_model(yes_no_temperature=1.6)(ids, pixels).logits
    torch.save({"ids": ids, "pixels": pixels, "expected": expected}, tmp_path / "case.pt")
    output = fresh_process(
        f"""
        import transformers
        from transformers import AutoConfig, AutoModel, AutoProcessor, AutoTokenizer
        folder, case = {str(folder)!r}, torch.load("case.pt")
        names = ["AutoModel", "AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModelForDecision"]
        tried = 0
        for name in names:
            auto = getattr(transformers, name, None)
            if auto is None:
                continue
            model = auto.from_pretrained(folder, trust_remote_code=True)
            assert type(model).__name__ == "TrafficVLMForConditionalGeneration", type(model)
            assert model.lm_head.weight is model.get_input_embeddings().weight
            with torch.no_grad():
                assert torch.equal(model(case["ids"], case["pixels"]).logits, case["expected"]), name
            tried += 1
        auto = transformers.AutoModelForSequenceClassification
        assert type(auto.from_pretrained(folder, trust_remote_code=True)).__name__.endswith("SequenceClassification")
        assert AutoConfig.from_pretrained(folder, trust_remote_code=True).yes_no_temperature == 1.6
        assert type(AutoTokenizer.from_pretrained(folder, trust_remote_code=True)).__name__ == "TrafficVLMTokenizer"
        assert type(AutoProcessor.from_pretrained(folder, trust_remote_code=True)).__name__ == "TrafficVLMProcessor"

        # Saved again by the classes that came with the folder, it still loads.
        model.save_pretrained("again")
        AutoProcessor.from_pretrained(folder, trust_remote_code=True).save_pretrained("again")
        model = AutoModel.from_pretrained("again", trust_remote_code=True)
        with torch.no_grad():
            assert torch.equal(model(case["ids"], case["pixels"]).logits, case["expected"])
        AutoProcessor.from_pretrained("again", trust_remote_code=True)
        print("loaded", tried)
        """,
        tmp_path,
    )
    assert output.split() == ["loaded", "4" if HAS_DECISIONS else "3"]
    assert (tmp_path / "again" / "decision_template.jinja").exists()


@pytest.mark.parametrize("head", ["classification", "decoder"])
def test_the_other_heads_save_and_load(head, tmp_path):
    torch.manual_seed(0)
    if head == "classification":
        model, auto = TrafficVLMForSequenceClassification(tiny_config(num_labels=3)).eval(), "SequenceClassification"
        inputs = (random_ids(2, 5), random_pixels(2))
    else:
        model, auto = TrafficVLMForCausalLM(tiny_config().text_config).eval(), "CausalLM"
        inputs = (random_ids(2, 5),)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        torch.save({"inputs": inputs, "expected": model(*inputs).logits}, tmp_path / "case.pt")
    fresh_process(
        f"""
        from transformers import AutoModelFor{auto} as Auto
        case = torch.load("case.pt")
        model = Auto.from_pretrained("model", trust_remote_code=True)
        with torch.no_grad():
            assert torch.equal(model(*case["inputs"]).logits, case["expected"])
        """,
        tmp_path,
    )


def test_weights_in_bfloat16_load_as_saved_or_as_asked(tmp_path):
    model = tiny_model().bfloat16()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert again.lm_head.weight[0].abs().max() == 0
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.01, weight_decay=0.1)
    again(random_ids(1, 4), random_pixels(1), labels=random_ids(1, 4)).loss.backward()
    optimizer.step()
    assert again.lm_head.weight[0].abs().max() == 0  # [PAD] stays zero after from_pretrained, too
    assert type(model).from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32
    assert again(random_ids(1, 4), random_pixels(1)).logits.dtype == torch.bfloat16  # float32 pixels are cast


def test_the_repository_itself_loads(tmp_path):
    output = fresh_process(
        f"""
        from transformers import AutoConfig, AutoModel, AutoProcessor, AutoTokenizer
        root = {str(ROOT)!r}
        config = AutoConfig.from_pretrained(root, trust_remote_code=True)
        model = AutoModel.from_config(config, trust_remote_code=True)
        print(sum(p.numel() for p in model.parameters()))
        processor = AutoProcessor.from_pretrained(root, trust_remote_code=True)
        print(len(AutoTokenizer.from_pretrained(root, trust_remote_code=True)), processor.tokenizer.padding_side)
        """,
        tmp_path,
    )
    assert output.split() == ["37272320", "500", "left"]


def test_root_files_are_what_their_script_writes(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "build_config.py"), "--output", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    config, decision = (json.loads((ROOT / name).read_text()) for name in ("config.json", "decision.json"))
    assert decision["temperature"] == {"noul": config["yes_no_temperature"]}  # pipelines answer as the model does
    for name in ("config.json", "decision.json", "generation_config.json"):
        written, root = (json.loads((path / name).read_text()) for path in (tmp_path, ROOT))
        for content in (written, root):  # these belong to the weights, or change with the release of transformers
            for key in ("transformers_version", "yes_no_temperature", "temperature", "dtype"):
                content.pop(key, None)
        assert written == root, name


def test_image_text_to_text_pipeline_answers_about_a_file(folder):
    pipe = transformers.pipeline("image-text-to-text", model=str(folder), trust_remote_code=True)
    path = str(folder / "scene.png")
    chat = [{"role": "user", "content": [{"type": "image", "path": path}, {"type": "text", "text": QUESTIONS[0]}]}]
    inputs = pipe.processor(images=path, text=QUESTIONS[0], return_tensors="pt")
    generated = pipe.model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    expected = pipe.tokenizer.decode(generated, skip_special_tokens=True)
    assert expected
    options = {"generate_kwargs": {"max_new_tokens": 4, "do_sample": False}, "return_full_text": False}
    assert pipe(images=path, text=QUESTIONS[0], **options)[0]["generated_text"].strip() == expected
    assert pipe(text=chat, **options)[0]["generated_text"].strip() == expected
    # Without a limit of the caller the pipeline would take 256, more than there are positions.
    longest = pipe(images=path, text=QUESTIONS[0], return_full_text=False)
    assert longest[0]["generated_text"].strip().startswith(expected)


@pytest.mark.skipif(not HAS_DECISIONS, reason="the decision pipeline came with transformers 5.23")
def test_decision_pipeline_agrees_with_the_scorer(folder):
    pipe = transformers.pipeline("decision", model=str(folder), trust_remote_code=True)
    path = str(folder / "scene.png")
    questions = {f"q{i}": {"type": "noul", "instructions": text} for i, text in enumerate(QUESTIONS)}
    answers = pipe({"state": "<image>", "questions": questions, "assets": {"<image>": path}})
    inputs = pipe.processor(images=[path], text=[QUESTIONS], packed=True, return_tensors="pt")
    [expected] = pipe.model.score_yes_no(**inputs)
    assert pipe.model.config.yes_no_temperature == 1.6
    assert [answers[name]["noul"] for name in questions] == pytest.approx(expected.tolist(), abs=1e-5)
    assert len(set(expected.tolist())) == 3


def test_processor_and_model_answer_together(folder, processor):
    model = tiny_model(yes_no_temperature=1.6)
    images = [picture(0), picture(1)]
    text = [QUESTIONS[:2], QUESTIONS[2:]]
    packed = model.score_yes_no(**processor(images=images, text=text, packed=True, return_tensors="pt"))
    plain = model.score_yes_no(**processor(images=images, text=text, return_tensors="pt"))
    for one, other in zip(packed, plain):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    answers = processor.post_process_yes_no(packed, text)
    assert [[answer["question"] for answer in row] for row in answers] == text
    assert answers[1][0]["probability"] == pytest.approx(packed[1][0].item())
    batch = processor(images=images, text=text, suffix=[["yes", "no"], ["2"]], packed=True, return_tensors="pt")
    alone = processor(images=images, text=text, suffix=[["yes", "no"], ["2"]], return_tensors="pt")
    torch.testing.assert_close(model(**batch).loss, model(**alone).loss, atol=1e-4, rtol=1e-4)


def test_the_package_names_everything():
    import traffic_vlm

    for name in traffic_vlm.__all__:
        assert hasattr(traffic_vlm, name), name


def test_environments_are_made_anew_where_other_packages_are_required(tmp_path, monkeypatch):
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text("transformers==5.0\n")
    made = []

    def create(folder, **_):
        made.append(folder)
        folder.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(venv, "create", create)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    environment = runpy.run_path(str(ROOT / "scripts/compat.py"))["environment"]
    monkeypatch.setitem(environment.__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(environment.__globals__, "FOLDER", tmp_path / ".compat")
    for name in (None, "pyproject.toml", "constraints.txt"):
        if name:
            (tmp_path / name).write_text("torch==2.9\n")
        before = len(made)
        environment("5.5")
        environment("5.5")
        assert len(made) == before + 1, name

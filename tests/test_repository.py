"""The repository as users meet it: saved by the package, loaded by auto classes in a new process, in pipelines."""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tiny import ROOT, load_script, new_process, random_ids, random_pixels, tiny_config, tiny_model
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForCausalLM, TrafficVLMForSequenceClassification


HAS_DECISIONS = hasattr(transformers, "AutoModelForDecision")
QUESTIONS = ["Is there a car?", "Is the road wet?", "Is it night?"]


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


def test_saved_folder_is_complete(folder):
    names = {path.name for path in folder.iterdir()}
    modules = {path.name for path in ROOT.glob("*_traffic_vlm.py")}
    assert modules <= names
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert {"tokenizer_config.json", "processor_config.json", "decision.json", "decision_template.jinja"} <= names
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert auto_map == json.loads((ROOT / "config.json").read_text())["auto_map"]


@pytest.mark.slow
def test_every_auto_class_loads_it_in_a_new_process(folder, processor, tmp_path):
    case = {"ids": random_ids(2, 5), "pixels": random_pixels(2), "text": [*QUESTIONS, "a [PAD] \U0001f642"]}
    with torch.no_grad():
        case["expected"] = tiny_model(yes_no_temperature=1.6)(case["ids"], case["pixels"]).logits
    case["prompts"] = processor(text=case["text"], on_unknown="ignore")["input_ids"]
    case["tokens"] = processor.tokenizer(case["text"], padding=True)["input_ids"]
    case["template"] = processor.chat_template
    torch.save(case, tmp_path / "case.pt")
    output = new_process(
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

        def load_processor(folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
            processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
            for one in (tokenizer, processor.tokenizer):
                assert type(one).__name__ == "TrafficVLMTokenizer"
                assert one(case["text"], padding=True)["input_ids"] == case["tokens"]
            assert type(processor).__name__ == "TrafficVLMProcessor"
            assert processor.chat_template == case["template"]
            assert processor(text=case["text"], on_unknown="ignore")["input_ids"] == case["prompts"]
            return processor

        # Saved again by the classes that came with the folder, it still loads.
        model.save_pretrained("again")
        load_processor(folder).save_pretrained("again")
        load_processor("again")
        model = AutoModel.from_pretrained("again", trust_remote_code=True)
        with torch.no_grad():
            assert torch.equal(model(case["ids"], case["pixels"]).logits, case["expected"])
        print("loaded", tried)
        """,
        tmp_path,
    )
    assert output.split() == ["loaded", "4" if HAS_DECISIONS else "3"]
    assert (tmp_path / "again" / "decision_template.jinja").exists()


@pytest.mark.slow
@pytest.mark.parametrize("head", ["classification", "decoder"])
def test_other_heads_save_and_load(head, tmp_path):
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
    new_process(
        f"""
        from transformers import AutoModelFor{auto} as Auto
        case = torch.load("case.pt")
        model = Auto.from_pretrained("model", trust_remote_code=True)
        with torch.no_grad():
            assert torch.equal(model(*case["inputs"]).logits, case["expected"])
        """,
        tmp_path,
    )


def test_bfloat16_weights_load_in_their_dtype_or_in_the_requested_one(tmp_path):
    model = tiny_model().bfloat16()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert again.lm_head.weight[0].abs().max() == 0
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.01, weight_decay=0.1)
    again(random_ids(1, 4), random_pixels(1), labels=random_ids(1, 4)).loss.backward()
    optimizer.step()
    assert again.lm_head.weight[0].abs().max() == 0  # [PAD] stays zero after from_pretrained
    assert type(model).from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32
    assert again(random_ids(1, 4), random_pixels(1)).logits.dtype == torch.bfloat16  # float32 pixels are cast


@pytest.mark.slow
def test_the_repository_itself_loads(tmp_path):
    output = new_process(
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
    assert output.split() == ["25185152", "500", "left"]


def shared_keys(one: Any, other: Any) -> Any:
    """One JSON value without the keys that the other lacks: releases of transformers write different defaults."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return one
    return {name: shared_keys(value, other[name]) for name, value in one.items() if name in other}


def test_committed_files_are_what_build_files_writes(tmp_path, run_script):
    run_script("build_files.py", "--output_dir", tmp_path)
    files = load_script("build_files").FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    committed_by = json.loads((ROOT / "config.json").read_text())["transformers_version"]
    for name in files:
        written, committed = (tmp_path / name).read_text("utf-8"), (ROOT / name).read_text("utf-8")
        if transformers.__version__ != committed_by and name.endswith(".json"):
            written, committed = (json.loads(text) | {"transformers_version": ""} for text in (written, committed))
            written, committed = shared_keys(written, committed), shared_keys(committed, written)
        assert written == committed, f"run scripts/build_files.py: {name}"
    config, decision = (json.loads((ROOT / name).read_text()) for name in ("config.json", "decision.json"))
    assert decision["temperature"] == {"noul": config["yes_no_temperature"]}  # pipelines answer as the model does


def test_build_files_writes_the_configuration_of_other_sizes(tmp_path, run_script, capsys):
    options = ["--output_dir", tmp_path, "--medium", "true", "--num_key_value_heads", "1"]
    run_script("build_files.py", *options)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    assert (text["hidden_size"], text["num_hidden_layers"], text["num_key_value_heads"]) == (768, 6, 1)
    assert config["yes_no_temperature"] == 1.0 and "dtype" not in config  # those of other weights
    (tmp_path / "model.safetensors").touch()
    run_script("build_files.py", *options, status=2)
    assert re.search(
        r"has weights, which do not fit hidden_size=768, .*num_key_value_heads=1", capsys.readouterr().err
    )


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
    # The pipeline's default limit of 256 tokens would exceed the number of positions.
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
    text = [QUESTIONS[:2], ["How many trucks are on the left?"]]
    packed = model.score_yes_no(**processor(images=images, text=text, packed=True, return_tensors="pt"))
    plain = model.score_yes_no(**processor(images=images, text=text, return_tensors="pt"))
    for one, other in zip(packed, plain):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    answers = processor.post_process_yes_no(packed, text)
    assert [[answer["question"] for answer in row] for row in answers] == text
    assert answers[0][1]["p_yes"] == pytest.approx(packed[0][1].item())
    assert answers[1][0]["problem"] == "not a yes/no question"
    batch = processor(images=images, text=text, suffix=[["yes", "no"], ["2"]], packed=True, return_tensors="pt")
    alone = processor(images=images, text=text, suffix=[["yes", "no"], ["2"]], return_tensors="pt")
    torch.testing.assert_close(model(**batch).loss, model(**alone).loss, atol=1e-4, rtol=1e-4)


def imports(name):
    """The modules that a flat module imports."""
    return set(re.findall(r"^from \.(\w+) import", (ROOT / f"{name}.py").read_text(), re.MULTILINE))


def test_files_of_auto_classes_import_all_that_their_imports_need():
    """Releases of transformers before 5.16 copy the files that such a file imports, but not those that they import."""
    config = json.loads((ROOT / "config.json").read_text())
    references = [one[0] if isinstance(one, list) else one for one in config["auto_map"].values()]
    references += [pipeline["impl"] for pipeline in config["custom_pipelines"].values()]
    for name in {reference.split(".")[0] for reference in references}:
        direct = imports(name)
        assert set().union(*map(imports, direct)) <= direct | {name}, name


def test_every_exported_name_exists():
    import traffic_vlm

    for name in traffic_vlm.__all__:
        assert hasattr(traffic_vlm, name), name

"""The repository as users meet it: saved by the package, loaded in new processes, asked by the library's pipelines."""

import json
import re
import runpy
from typing import Any

import pytest
import torch
import transformers

from tiny import ROOT, load_script, new_process, picture, random_ids, random_pixels, tiny_config, tiny_model
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForCausalLM, TrafficVLMForSequenceClassification


QUESTIONS = ["Is there a car?", "Is the road wet?", "Is it night?"]
IDS, PIXELS = random_ids(2, 5), random_pixels(2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, processor):
    """A tiny model with its processor, saved from the imported classes, and an image."""
    path = tmp_path_factory.mktemp("model")
    tiny_model(yes_no_temperature=1.6).save_pretrained(path)
    processor.save_pretrained(path)
    picture().save(path / "scene.png")
    return path


# --- loading ---


@pytest.mark.slow
@torch.no_grad()
def test_a_saved_folder_loads_in_a_new_process(folder, processor, tmp_path):
    """By every auto class, without this package; so does what the loaded classes save, such as encoded images."""
    torch.manual_seed(0)
    classifier = TrafficVLMForSequenceClassification(tiny_config(num_labels=3)).eval()
    decoder = TrafficVLMForCausalLM(tiny_config().text_config).eval()
    classifier.save_pretrained(tmp_path / "classifier")
    decoder.save_pretrained(tmp_path / "decoder")
    text = [*QUESTIONS, "a [PAD] \U0001f642"]
    case = {
        "logits": tiny_model(yes_no_temperature=1.6)(IDS, PIXELS).logits,
        "classifier": classifier(IDS, PIXELS).logits,
        "decoder": decoder(IDS).logits,
        "prompts": processor(text=text, on_unknown="ignore")["input_ids"],
        "tokens": processor.tokenizer(text, padding=True)["input_ids"],
    }
    torch.save(case | {"ids": IDS, "pixels": PIXELS, "text": text}, tmp_path / "case.pt")
    printed = new_process(
        f"""
        sys.modules["pillow_heif"] = None  # it may be missing
        import transformers
        from transformers import AutoConfig, AutoModel, AutoProcessor, AutoTokenizer, pipeline
        torch.set_grad_enabled(False)
        folder, root, case = {str(folder)!r}, {str(ROOT)!r}, torch.load("case.pt")
        ids, pixels, remote = case["ids"], case["pixels"], {{"trust_remote_code": True}}
        assert AutoConfig.from_pretrained(folder, **remote).yes_no_temperature == 1.6
        names = ["AutoModel", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"]
        found = [name for name in names if hasattr(transformers, name)]
        for name in found:
            model = getattr(transformers, name).from_pretrained(folder, **remote)
            assert torch.equal(model(ids, pixels).logits, case["logits"]), name
        classifier = transformers.AutoModelForSequenceClassification.from_pretrained("classifier", **remote)
        assert torch.equal(classifier(ids, pixels).logits, case["classifier"])
        decoder = transformers.AutoModelForCausalLM.from_pretrained("decoder", **remote)
        assert torch.equal(decoder(ids).logits, case["decoder"])

        vqa = pipeline("visual-question-answering", model=folder, **remote)
        assert type(vqa).__module__.startswith("transformers_modules")
        vqa.save_pretrained("again")
        again = pipeline("visual-question-answering", model="again", **remote)
        parts = pipeline("visual-question-answering", model=model, processor=again.processor, **remote)
        image, question = folder + "/scene.png", case["text"][0]
        assert vqa(image, question) == again(image, question) == parts(image, question)
        for saved in (folder, "again"):
            tokenizer = AutoTokenizer.from_pretrained(saved, **remote)
            processor = AutoProcessor.from_pretrained(saved, **remote)
            for one in (tokenizer, processor.tokenizer):
                assert one(case["text"], padding=True)["input_ids"] == case["tokens"]
            assert processor(text=case["text"], on_unknown="ignore")["input_ids"] == case["prompts"]

        torch.save(model.encode_images(pixels), "encoded.pt")
        encoded, model = torch.load("encoded.pt"), AutoModel.from_pretrained(folder, **remote)
        assert torch.equal(model(ids, encoded_images=encoded).logits, case["logits"])
        AutoModel.from_config(AutoConfig.from_pretrained(root, **remote), **remote)
        assert AutoProcessor.from_pretrained(root, **remote).tokenizer.padding_side == "left"
        print(len(found))
        """,
        tmp_path,
    )
    assert printed.split() == ["3"]


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


def test_the_same_releases_of_transformers_are_named_everywhere():
    pytest.importorskip("nox")
    nox = runpy.run_path(str(ROOT / ".ci" / "noxfile.py"))
    oldest, newest = nox["RELEASES"][0], nox["RELEASES"][-1]
    minors = sorted(int(release.removeprefix("5.")) for release in nox["RELEASES"] + nox["BETWEEN"])
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert f'"transformers>={oldest},<6"' in (ROOT / "pyproject.toml").read_text()
    for name in ("README.md", "CHANGELOG.md"):
        assert f"transformers {oldest} to {newest}" in (ROOT / name).read_text("utf-8").replace("\n", " ")


# --- pipelines of the library ---


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


# --- files ---


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

"""Adapters are merged; damaged and incomplete weights are refused."""

import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import ROOT, save_folder, tiny_config, tiny_model
from traffic_vlm.common.loading import has_model, load_weights
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline
from traffic_vlm.serving.options import ModelOptions


def test_unexpected_and_missing_weights_are_named(tmp_path):
    tiny_model(text={"num_hidden_layers": 4}).save_pretrained(tmp_path)
    tiny_config().save_pretrained(tmp_path)  # of 2 layers
    with pytest.raises(ValueError, match=r"unexpected tensors: model\.text_model\.layers\.2\..* do not belong"):
        load_weights(tmp_path)
    tiny_config(text={"num_hidden_layers": 5}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the weights have no model\.text_model\.layers\.4\."):
        load_weights(tmp_path)


def test_weights_that_are_not_finite_are_named(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"training_head.weight": weights["model.projector.bias"].clone()}, file, {"format": "pt"})
    load_weights(tmp_path)  # heads of training are no part of the model
    weights["model.projector.bias"][3] = float("nan")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"NaN or infinite weights in model\.projector\.bias \(1 in all\)"):
        load_weights(tmp_path)


def test_a_folder_has_a_model_by_its_config_json(tmp_path):
    config = tmp_path / "config.json"
    for text in ("{", "[]", "{}", '{"model_type": "bert"}'):
        config.write_text(text)
        assert not has_model(tmp_path)
    tiny_config().save_pretrained(tmp_path)
    assert has_model(tmp_path)
    config.unlink()
    assert not has_model(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    assert has_model(tmp_path)


@pytest.fixture
def adapter(tmp_path):
    """The folder of an adapter, and the model of PEFT that it was saved from."""
    peft = pytest.importorskip("peft")
    model = tiny_model()
    model.name_or_path = str(save_folder(model, tmp_path / "base"))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", model


@pytest.mark.parametrize("has_processor", [False, True])
def test_an_adapter_is_merged_into_its_base(adapter, processor, has_processor):
    folder, model = adapter
    if has_processor:
        processor.save_pretrained(folder)
    image, questions = ROOT / "docs/night.jpg", ["Is there a car?", "Is it night?", "What is ahead?"]
    expected = TrafficVLMPipeline(model, processor=processor, device="cpu", min_score=0)(image, questions)
    items = ModelOptions(model=str(folder), device="cpu", min_score=0).load()(image, questions)
    for item, one in zip(items, expected, strict=True):
        assert item == {name: pytest.approx(value, abs=1e-5) for name, value in one.items()}
    base = TrafficVLMPipeline(tiny_model(), processor=processor, device="cpu", min_score=0)(image, questions)
    assert abs(base[0]["p_yes"] - items[0]["p_yes"]) > 1e-3  # the adapter changes the answers


def cut(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def change_weights(change):
    def apply(folder):
        file = folder / "adapter_model.safetensors"
        save_file(change({name: tensor.clone() for name, tensor in load_file(file).items()}), file)

    return apply


@pytest.mark.parametrize(
    "damage, error, message",
    [
        (lambda folder: folder.with_name("base").rename(folder.with_name("moved")), OSError, "base .* is missing"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), OSError, "without adapter_model.safetensors"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), ValueError, "does not name the base"),
        (cut, ValueError, "cannot be merged .* header"),
        (change_weights(lambda found: dict([*found.items()][1:])), ValueError, "cannot be merged .* missing"),
        (change_weights(lambda found: {k: v[:1] for k, v in found.items()}), ValueError, "cannot be merged .* size"),
        (change_weights(lambda found: {k: v * torch.inf for k, v in found.items()}), ValueError, "NaN or infinite"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_refused(adapter, damage, error, message):
    folder, _ = adapter
    damage(folder)
    with pytest.raises(error, match=message):
        load_weights(folder)


@pytest.mark.parametrize(
    "script, options",
    [
        ("train.py", ["--model_name_or_path", "ADAPTER", "--train_dataset", "synthetic"]),
        ("evaluate.py", ["--model", "ADAPTER", "--dataset", "nowhere", "--write_temperature"]),
    ],
)
def test_what_needs_a_full_model_says_how_to_write_one(adapter, run_script, tmp_path, capsys, script, options):
    options = [adapter[0] if option == "ADAPTER" else option for option in options]
    with pytest.raises((SystemExit, ValueError)) as stopped:
        run_script(script, *options, "--output_dir", tmp_path / "out")
    assert "needs a full model. To write one: " in f"{stopped.value}{capsys.readouterr().err}"
    assert not (adapter[0] / "config.json").exists()


def test_an_adapter_without_peft_says_how_to_install_it(adapter, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(OSError, match=r"adapter of .*base\. To merge them on loading: pip install peft"):
        load_weights(adapter[0])

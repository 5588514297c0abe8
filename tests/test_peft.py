"""PEFT works as it is: a Trainer of the library trains an adapter, which a pipeline loads and merges."""

import pytest
import torch
from PIL import Image
from transformers import Trainer, TrainingArguments

from traffic_vlm.common.loading import load_weights
from traffic_vlm.pipeline_traffic_vlm import TrafficVLMPipeline
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor


peft = pytest.importorskip("peft")
IMAGE = Image.new("RGB", (64, 64), "red")
QUESTIONS = ["Is there a car?", "Is it night?"]


def p_yes(vqa):
    return [item["p_yes"] for item in vqa(IMAGE, QUESTIONS)]


def test_an_adapter_is_trained_loaded_and_merged(start, tmp_path):
    processor = TrafficVLMProcessor.from_pretrained(start)
    processor.image_processor.size = {"height": 64, "width": 64}
    rows = processor(images=[IMAGE] * 2, text=QUESTIONS, suffix=["yes", "no"], return_tensors="pt")
    config = peft.LoraConfig(r=2, target_modules=r"model\.text_model\..*_proj", init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(load_weights(start), config)
    frozen = {name: weight.clone() for name, weight in adapted.named_parameters() if "lora" not in name}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, learning_rate=0.01, report_to="none", save_strategy="no", use_cpu=True
    )
    data = [{name: values[i] for name, values in rows.items()} for i in range(2)]
    Trainer(adapted, arguments, train_dataset=data).train()
    assert all(torch.equal(weight, frozen[name]) for name, weight in adapted.named_parameters() if name in frozen)
    adapted.save_pretrained(tmp_path / "adapter")

    vqa = TrafficVLMPipeline(model=load_weights(start).eval(), processor=processor, device="cpu")
    before = p_yes(vqa)
    loaded = peft.PeftModel.from_pretrained(vqa.model, tmp_path / "adapter")
    active = p_yes(vqa)
    assert active != pytest.approx(before, abs=1e-3)
    with loaded.disable_adapter():
        assert p_yes(vqa) == pytest.approx(before, abs=1e-5)
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert p_yes(vqa) == pytest.approx(active, abs=1e-5)
    again = TrafficVLMPipeline(model=load_weights(tmp_path / "merged").eval(), processor=processor, device="cpu")
    assert p_yes(again) == pytest.approx(active, abs=1e-5)

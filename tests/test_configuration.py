"""Configurations: numbers of parameters, saving and loading, and errors for invalid fields."""

import json
import re

import pytest
import torch
from transformers import SiglipConfig, SiglipVisionConfig

from tiny import TINY_TOWER, tiny_config, tiny_text_config
from traffic_vlm.configuration_traffic_vlm import (
    AUTO_MAP,
    TrafficVLMConfig,
    TrafficVLMTextConfig,
    TrafficVLMVisionConfig,
)
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration


# --- sizes ---

ATTENTION, NORMS = 2 * 512 * 512 + 2 * 512 * 128, 3 * 512
SMALL = 500 * 512 + 4 * (2 * ATTENTION + 3 * 512 * 2048 + NORMS) + 512
MEDIUM = 500 * 768 + 6 * (2 * (2 * 768 * 768 + 2 * 768 * 192) + 3 * 768 * 3072 + 3 * 768) + 768
VIT_LAYER = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
VIT = 3 * 16 * 16 * 768 + 768 + 196 * 768 + 3 * VIT_LAYER + 2 * 768  # patches, positions, layers, last norm


@pytest.mark.parametrize(
    ("config", "tower", "decoder"),
    [
        (TrafficVLMConfig.medium(), 6_998_272, MEDIUM),
        (TrafficVLMConfig.with_patch_tower(), VIT, SMALL),
    ],
    ids=["medium", "patches"],
)
def test_numbers_of_parameters(config, tower, decoder):
    with torch.device("meta"):
        model = TrafficVLMForConditionalGeneration(config)
    parts = (model.model.vision_tower, model.model.text_model)
    assert [part.num_parameters() for part in parts] == [tower, decoder]
    width = config.text_config.hidden_size
    assert model.num_parameters() == tower + decoder + 768 * width + width  # the head is the embedding table


# --- fields of one configuration that belong to the other ---


def test_fields_of_the_full_model_and_its_decoder_agree():
    assert tiny_config(text={"encoder_hidden_size": 768}).text_config.encoder_hidden_size == 32  # the projector's
    assert not tiny_config(tie_word_embeddings=False).text_config.tie_word_embeddings
    assert not tiny_config(text={"tie_word_embeddings": False}).tie_word_embeddings
    config = tiny_config(text={"max_position_embeddings": 64})
    assert config.max_position_embeddings == 64
    assert config.id2label == {0: "no", 1: "yes"} and tiny_config(num_labels=3).num_labels == 3


def test_the_tower_can_be_any_of_transformers():
    both = SiglipConfig(vision_config={"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2})
    assert TrafficVLMConfig(vision_config=both).vision_config.num_hidden_layers == 2  # from one of text and vision
    given = SiglipVisionConfig(hidden_size=24, num_attention_heads=2)
    config = TrafficVLMConfig(vision_config=given)
    assert (config.vision_config.hidden_size, config.vision_config.num_hidden_layers) == (24, 12)
    assert not config.vision_config.vision_use_head  # its pooling head would be unused
    assert getattr(given, "vision_use_head", True)  # the caller's is unchanged
    with pytest.raises(ValueError, match="hidden_size=None, image_size=None"):
        TrafficVLMConfig(vision_config={"model_type": "resnet"})  # returns feature maps, not tokens


# --- saving ---


def test_a_saved_configuration_is_complete(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = tiny_config(text={"rope_interleaved": True, "rope_parameters": rope}, yes_no_temperature=1.5)
    config.auto_map["AutoModel"] = "somebody/repository--modeling_traffic_vlm.TrafficVLMForConditionalGeneration"
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["auto_map"] == AUTO_MAP and "auto_map" not in saved["text_config"]
    loaded = TrafficVLMConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert loaded.text_config.rope_parameters == rope
    text = TrafficVLMTextConfig.from_pretrained(tmp_path).to_dict()
    assert text.items() >= config.to_dict()["text_config"].items()
    assert "auto_map" not in text  # the full model's would be wrong


# --- invalid fields ---


def tiny_tower_config(**fields) -> TrafficVLMVisionConfig:
    return TrafficVLMVisionConfig(**(TINY_TOWER | fields))


@pytest.mark.parametrize(
    ("build", "fields", "named"),
    [
        (tiny_text_config, {"num_key_value_heads": 3}, "num_attention_heads=4, num_key_value_heads=3"),
        (tiny_text_config, {"head_dim": 7}, "head_dim=7"),
        (tiny_text_config, {"eos_token_id": 500}, "eos_token_id=500, vocab_size=500"),
        (tiny_tower_config, {"conv_depths": [2, 3]}, "conv_widths=[8, 8, 8, 12, 12, 16], conv_depths=[2, 3]"),
        (tiny_config, {"vision": {"image_size": 8}}, "image_size=8, patch_size=16"),
    ],
)
def test_invalid_fields_are_named_with_their_values(build, fields, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        build(**fields)

"""Bad input of the decoder, of `forward` and of `generate`: each error names what was expected and what came."""

import math
import re

import pytest
import torch
from transformers import DynamicCache

from tiny import pack, random_ids, random_pixels, tiny_decoder


IDS = torch.full((2, 3), 7)
PIXELS = random_pixels(2)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": IDS.float()}, "input_ids must be integers [rows,tokens], at least one token; got float32"),
        ({"input_ids": IDS + 493}, "input_ids must be in [0, 500), the vocabulary; got 500"),
        ({"attention_mask": torch.ones(2, 4)}, "attention_mask must be [2,3], rows by 0 cached and 3 new tokens; got"),
        ({"encoder_attention_mask": torch.ones(1, 256)}, "encoder_attention_mask must be [2, 256]"),
        ({"pixel_values": torch.zeros(2, 3, 200, 224)}, "must be [images,3,256,256], got [2, 3, 200, 224]"),
        ({"pixel_values": PIXELS * math.nan}, "without NaN or infinity; got nan..nan"),
        ({"pixel_values": torch.ones_like(PIXELS, dtype=torch.uint8)}, "normalized floats"),
        ({"pixel_values": random_pixels(3)}, "2 rows of text for 3 images"),
        ({"image_index": torch.tensor([0, 2])}, "image_index must be in [0, 2); got 2"),
        ({"past_key_values": DynamicCache()}, "must be a TrafficVLMCache, got DynamicCache"),
    ],
)
@torch.no_grad()
def test_bad_input_of_forward_and_generate(model, inputs, message):
    given = {"input_ids": IDS, "pixel_values": PIXELS} | inputs
    for call in (model, lambda **inputs: model.generate(**inputs, max_new_tokens=2)):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(**given)


TOKENS = torch.zeros(2, 9, 24)
ROW = {name: tensor for name, tensor in pack([IDS[0], IDS[0]]).items() if name != "question_ends"}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": None}, "exactly one of input_ids and inputs_embeds"),
        ({"input_ids": random_ids(1, 129)}, "A text of 129 tokens is longer than max_position_embeddings=128"),
        ({"output_attentions": True}, "load with attn_implementation='eager'"),
        (ROW | {"position_ids": None}, "segment_ids need position_ids that start at 0 for each question, got None"),
        (ROW | {"attention_mask": None, "past_key_values": 2}, "with 2 cached tokens"),
    ],
)
@torch.no_grad()
def test_bad_input_of_the_decoder(decoder, inputs, message):
    if length := inputs.get("past_key_values"):
        inputs = inputs | {"past_key_values": decoder(IDS[:1, :length], use_cache=True).past_key_values}
    with pytest.raises(ValueError, match=re.escape(message)):
        decoder(**{"input_ids": IDS} | inputs)


def test_labels_of_another_shape_are_refused(model):
    with pytest.raises(ValueError, match=re.escape("labels must be [2, 3] to match the logits, got [3, 2]")):
        model(IDS, PIXELS, labels=IDS.reshape(3, 2))


def test_packed_rows_need_an_attention_that_takes_masks():
    flash = tiny_decoder()
    flash.config._attn_implementation_internal = "flash_attention_2"  # as on a GPU; attention itself never runs
    with pytest.raises(ValueError, match="which flash_attention_2 does not support: use sdpa or eager"):
        flash(**ROW)

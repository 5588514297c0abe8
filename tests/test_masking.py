"""Checks of ids, masks, positions and labels: each error names what was expected and what came."""

import pytest
import torch

from tiny import random_pixels


IDS = torch.full((2, 3), 7)


@pytest.mark.parametrize(
    "inputs, message",
    [
        (
            {"input_ids": IDS.float()},
            r"input_ids must be int64 \[rows,tokens\], .*; got float32 \[2, 3\]",
        ),
        ({"input_ids": IDS.bool()}, r"got bool \[2, 3\]"),
        ({"input_ids": IDS[..., None]}, r"got int64 \[2, 3, 1\]"),
        ({"input_ids": IDS[:, :0]}, r"got int64 \[2, 0\]"),
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask must be \[2,3\] .*, got \[2, 4\]"),
        ({"attention_mask": torch.ones(2, 3, 3)}, r"attention_mask must be \[2,3\] .*, got \[2, 3, 3\]"),
        ({"attention_mask": torch.ones(3)}, r"attention_mask must be \[2,3\] .*, got \[3\]"),
        ({"position_ids": torch.arange(4)[None]}, r"position_ids must be int64 \[2,3\] .*, got int64 \[1, 4\]"),
        ({"position_ids": torch.arange(3)}, r"position_ids must be int64 \[2,3\] .*, got int64 \[3\]"),
        ({"position_ids": torch.ones(2, 3)}, r"position_ids must be .*, got float32 \[2, 3\]"),
        (
            {"encoder_attention_mask": torch.ones(1, 196)},
            r"encoder_attention_mask must be \[2,196\] .*, got \[1, 196\]",
        ),
        ({"image_index": torch.tensor([0.0, 1.0])}, r"image_index must be int64 \[2\], .*, got float32 \[2\]"),
    ],
)
@torch.no_grad()
def test_bad_inputs_raise_and_name_both_shapes(model, inputs, message):
    given = {"input_ids": IDS, "pixel_values": random_pixels(2)} | inputs
    with pytest.raises(ValueError, match=message):
        model(**given)
    with pytest.raises(ValueError, match=message):
        model.generate(**given, max_new_tokens=2)


@torch.no_grad()
def test_bad_labels_raise(model):
    with pytest.raises(ValueError, match=r"labels must be int64 \[2,3\] to match the logits, got float32 \[2, 3\]"):
        model(IDS, labels=IDS.float())
    for wrong in (500, -1):
        with pytest.raises(ValueError, match=rf"labels must be in \[0, 500\) or -100 .*, got {wrong}"):
            model(IDS, labels=IDS.masked_fill(torch.eye(2, 3).bool(), wrong))


@torch.no_grad()
def test_one_row_of_positions_applies_to_all_rows(model):
    alone = model(IDS, position_ids=torch.arange(3)[None]).logits
    torch.testing.assert_close(alone, model(IDS, position_ids=torch.arange(3).expand(2, -1)).logits)

"""The vision tower of Traffic VLM: residual convolutions to a grid of cells, then one transformer layer.

    [B,3,224,224] → conv → [B,32,112,112] → 2 blocks → [B,64,56,56] → 3 blocks → [B,128,28,28] → 3 blocks →
    [B,512,14,14] → 1×1 conv → [B,196,768] + place → transformer layer → norm → [B,196,768]

What is special here:
- convolutions know that neighbouring pixels belong together and that a car is a car wherever it stands; a transformer
  on 16×16 patches has to learn both, from more images than there are. `docs/training.md` shows by how much they win;
- it gives what a ViT with 16×16 patches gives, 196 tokens of 768, so either can stand in for the other;
- places are computed from coordinates in 0..1, so the same weights read images of any size (training starts small);
- no image statistics but those of batch normalisation, which are constants once training is over.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import is_torchdynamo_compiling

from .configuration_traffic_vlm import TrafficVLMVisionConfig


class TrafficVLMConvBlock(GradientCheckpointingLayer):
    """Two 3×3 convolutions beside a shortcut (https://arxiv.org/abs/1512.03385); the first may halve the grid."""

    def __init__(self, in_width: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_width, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if (in_width, stride) != (width, 1):
            # Averaging first: a strided 1×1 convolution would never look at three of four cells.
            pool = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
            self.shortcut = nn.Sequential(pool, nn.Conv2d(in_width, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.relu(self.norm1(self.conv1(x)))
        return nn.functional.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class TrafficVLMVisionLayer(GradientCheckpointingLayer):
    """x += attention(norm(x)); x += MLP(norm(x)), every cell reads the whole image (https://arxiv.org/abs/2010.11929)."""

    def __init__(self, config: TrafficVLMVisionConfig):
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.norm1 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.qkv_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.fc1 = nn.Linear(width, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, width)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv_proj(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))  # [B,P,3,H,D]
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B,H,P,D]
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out_proj(attended.transpose(1, 2).flatten(2))
        return x + self.fc2(self.act_fn(self.fc1(self.norm2(x))))


def cell_coordinates(rows: int, columns: int, num_waves: int, like: torch.Tensor) -> torch.Tensor:
    """Sines and cosines [rows·columns, 4·num_waves] of the cells' centres, in 0..1 whatever the size of the grid."""
    waves = math.pi * 2.0 ** (torch.arange(num_waves, device=like.device) / 2)  # from half a turn over the image on
    y = (torch.arange(rows, device=like.device) + 0.5)[:, None] / rows * waves
    x = (torch.arange(columns, device=like.device) + 0.5)[:, None] / columns * waves
    y, x = torch.cat([y.sin(), y.cos()], -1), torch.cat([x.sin(), x.cos()], -1)
    grid = torch.cat([y[:, None].expand(-1, columns, -1), x[None].expand(rows, -1, -1)], -1)
    return grid.flatten(0, 1).to(like.dtype)


class TrafficVLMVisionModel(PreTrainedModel):
    """Pixels [B,3,H,W] → tokens [B,P,hidden_size], one for each `patch_size` × `patch_size` pixels, row by row."""

    config_class = TrafficVLMVisionConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["TrafficVLMConvBlock", "TrafficVLMVisionLayer"]
    # Whichever is asked for, attention here is torch's own function, which picks the fastest kernel by itself.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    NUM_WAVES = 8

    def __init__(self, config: TrafficVLMVisionConfig):
        super().__init__(config)
        width = config.conv_widths[0]
        self.stem = nn.Sequential(
            nn.Conv2d(config.num_channels, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        blocks = []
        for next_width, depth in zip(config.conv_widths[1:], config.conv_depths):
            for number in range(depth):
                blocks.append(TrafficVLMConvBlock(width, next_width, stride=2 if number == 0 else 1))
                width = next_width
        self.blocks = nn.ModuleList(blocks)
        self.to_tokens = nn.Conv2d(width, config.hidden_size, 1)
        self.place = nn.Linear(4 * self.NUM_WAVES, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(TrafficVLMVisionLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Conv2d):  # keeps the size of the signal from block to block
            init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pixel_values: torch.Tensor, return_dict: bool = True, **kwargs: Any) -> Any:
        """`last_hidden_state` [B,P,hidden_size] of pixels [B,num_channels,H,W], H and W multiples of `patch_size`."""
        # Channels last is how the fast convolutions of CPUs and GPUs want pixels and weights to lie. Weights come from
        # files in the other order; left so, each pass would copy them all, a fifth of the time of one image.
        first = next(self.stem.parameters())
        if not is_torchdynamo_compiling() and not first.is_contiguous(memory_format=torch.channels_last):
            self.to(memory_format=torch.channels_last)
        x = self.stem(pixel_values.contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            x = block(x)
        x = self.to_tokens(x)  # [B,C,rows,columns]
        rows, columns = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)  # [B,P,C]
        x = x + self.place(cell_coordinates(rows, columns, self.NUM_WAVES, x))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return BaseModelOutput(last_hidden_state=x) if return_dict else (x,)

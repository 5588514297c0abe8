"""The vision tower of Traffic VLM: convolutions to feature maps of three sizes, then neck layers on 16 × 16 patches.

    [B,3,384,384] → convolutions ─┬→ [B,40,48,48]   2 × 2 per patch ─────┐
                                  ├→ [B,112,24,24]  1 per patch ─────────┼(+)→ [B,576,neck] → + position → layers
                                  └→ [B,1280,12,12] 1 per 2 × 2 patches ─┘     → pooled → norm → [B,144,768] + position
    [B,40,48,48] and the layers' output → center head, with [B,112,24,24] → tokens of 10 classes [B,10,768], put first

What is special here:
- convolutions are local and translation equivariant. A transformer on 16×16 patches has to learn both, which takes
  more images than this project has. `docs/log.md` compares the two;
- the convolutions are those of EfficientNet-Lite0, so training can start from weights pretrained on photographs;
- each patch combines fine details (a lamp), its own content (a wheel) and its surroundings (a bus);
- the output has the shape of a ViT's, one token of width 768 for each 16×16 patch, so a ViT can replace this tower;
- position embeddings are computed from coordinates in 0..1, so the same weights read images of any size (training
  starts with small ones). They are added twice, because the neck layers may discard positions that questions such as
  "on the left?" need;
- larger images can have one token for 2 × 2 patches (`pool_above`), so that the decoder's time hardly depends on size;
- the only running statistics are those of batch normalization. They are constant after training, and if frozen.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput

from .configuration_traffic_vlm import TrafficVLMVisionConfig, token_grid
from .locating_traffic_vlm import TrafficVLMCenterHead, TrafficVLMObjectTokens


NORM_EPS = 1e-6
EXPANSION = 6  # channels inside a block by its input channels; the first stage does not expand


class TrafficVLMDepthwiseConv2d(nn.Conv2d):
    """Depthwise convolution: one filter per channel.

    oneDNN has no fast bfloat16 backward pass for kernels of 5×5 and larger, nor for a stride of 2: that in float32 is
    up to 20 times faster. So in training on a CPU under autocast, these run in float32.
    """

    def __init__(self, width: int, kernel_size: int, stride: int = 1):
        super().__init__(width, width, kernel_size, stride, kernel_size // 2, groups=width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_slow = x.device.type == "cpu" and (self.kernel_size[0] > 3 or self.stride[0] > 1)
        if is_slow and torch.is_grad_enabled() and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                y = self._conv_forward(x.float(), self.weight.float(), None)  # weights can be bfloat16, too
                return y.to(torch.get_autocast_dtype("cpu"))
        return super().forward(x)


class TrafficVLMBatchNorm2d(nn.BatchNorm2d):
    """Batch normalization whose running statistics never change while its weight is frozen.

    Otherwise a frozen tower would change in training: LoRA saves no statistics, so a reloaded adapter would answer
    differently.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.requires_grad:
            return super().forward(x)
        statistics = (self.running_mean, self.running_var)
        return nn.functional.batch_norm(x, *statistics, self.weight, self.bias, eps=self.eps)


class TrafficVLMConvNorm(nn.Sequential):
    """Convolution, batch normalization and, unless `linear`, ReLU6."""

    def __init__(
        self, in_width: int, width: int, kernel_size: int = 1, stride: int = 1, groups: int = 1, linear: bool = False
    ):
        if groups == in_width == width and kernel_size > 1:
            convolution: nn.Conv2d = TrafficVLMDepthwiseConv2d(width, kernel_size, stride)
        else:
            convolution = nn.Conv2d(in_width, width, kernel_size, stride, kernel_size // 2, groups=groups, bias=False)
        super().__init__(convolution, TrafficVLMBatchNorm2d(width, eps=1e-3), nn.Identity() if linear else nn.ReLU6())


class TrafficVLMConvBlock(GradientCheckpointingLayer):
    """Inverted residual (https://arxiv.org/abs/1801.04381): 1×1 expansion, depthwise convolution, 1×1 projection.

    The input is added if the output has the same shape.
    """

    def __init__(self, in_width: int, width: int, expansion: int, kernel_size: int, stride: int):
        super().__init__()
        inner = expansion * in_width
        self.expand = TrafficVLMConvNorm(in_width, inner) if expansion > 1 else nn.Identity()
        self.filter = TrafficVLMConvNorm(inner, inner, kernel_size, stride, groups=inner)
        self.project = TrafficVLMConvNorm(inner, width, linear=True)
        self.is_residual = (in_width, stride) == (width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.project(self.filter(self.expand(x)))
        return x + h if self.is_residual else h


class TrafficVLMConvolutions(nn.Module):
    """EfficientNet-Lite0 without its classifier (https://arxiv.org/abs/1905.11946).

    Padding is the same on all sides. The original pads more on the right and at the bottom, so its pretrained weights
    see the image shifted by a few pixels.

    Attributes:
        widths: channels of the three feature maps, from fine to coarse.
        ends: indices of the blocks whose outputs are the first two feature maps.
    """

    def __init__(self, config: TrafficVLMVisionConfig):
        super().__init__()
        width, *stage_widths, head_width = config.conv_widths
        self.stem = TrafficVLMConvNorm(3, width, kernel_size=3, stride=2)
        self.blocks = nn.ModuleList()
        grids = []  # channels and last block before each stride of 2
        stages = zip(stage_widths, config.conv_depths, config.conv_kernel_sizes, config.conv_strides)
        for stage, (next_width, depth, kernel_size, stride) in enumerate(stages):
            if stride == 2:
                grids.append((width, len(self.blocks) - 1))
            for index in range(depth):
                expansion, block_stride = EXPANSION if stage else 1, stride if index == 0 else 1
                self.blocks.append(TrafficVLMConvBlock(width, next_width, expansion, kernel_size, block_stride))
                width = next_width
        self.head = TrafficVLMConvNorm(width, head_width)
        (finer, finer_end), (same, same_end) = grids[-2:]
        self.widths, self.ends = (finer, same, head_width), (finer_end, same_end)

    def forward(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        """Three feature maps [B,C,rows,columns] of pixels [B,3,H,W], each half as large as the one before."""
        x = self.stem(pixel_values)
        features = []
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index in self.ends:
                features.append(x)
        return [*features, self.head(x)]


class TrafficVLMDepthwiseLayer(GradientCheckpointingLayer):
    """x += MLP(norm(filter(x))). Each patch reads the 7 × 7 patches around it (https://arxiv.org/abs/2201.03545)."""

    def __init__(self, config: TrafficVLMVisionConfig):
        super().__init__()
        width = config.neck_width
        self.filter = TrafficVLMDepthwiseConv2d(width, kernel_size=7)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.fc1 = nn.Linear(width, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, width)
        self.act_fn = nn.GELU("tanh")

    def forward(self, x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        around = self.filter(x.transpose(1, 2).unflatten(2, grid))  # [B,C,rows,columns]
        return x + self.fc2(self.act_fn(self.fc1(self.norm(around.flatten(2).transpose(1, 2)))))


def patch_coordinates(rows: int, columns: int, num_waves: int, like: torch.Tensor) -> torch.Tensor:
    """Sines and cosines [rows·columns, 4·num_waves] of the patch centers, in coordinates 0..1 for any grid."""
    waves = math.pi * 2.0 ** (torch.arange(num_waves, device=like.device) / 2)  # the first: half a turn per image
    angles = [(torch.arange(n, device=like.device) + 0.5)[:, None] / n * waves for n in (rows, columns)]
    y, x = (torch.cat([one.sin(), one.cos()], -1) for one in angles)
    grid = torch.cat([y[:, None].expand(-1, columns, -1), x[None].expand(rows, -1, -1)], -1)
    return grid.flatten(0, 1).to(like.dtype)


class TrafficVLMPatchPooling(nn.Module):
    """2 × 2 patches → one token, a linear layer of their mean and maximum. It starts as the mean."""

    def __init__(self, config: TrafficVLMVisionConfig):
        super().__init__()
        self.merge = nn.Linear(2 * config.neck_width, config.neck_width)

    def forward(self, x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Tokens [B,P/4,C] of patches [B,P,C] in a grid of an even number of rows and of columns."""
        x = x.transpose(1, 2).unflatten(2, grid)  # [B,C,rows,columns]
        both = torch.cat([nn.functional.avg_pool2d(x, 2), nn.functional.max_pool2d(x, 2)], 1)
        return self.merge(both.flatten(2).transpose(1, 2))


@dataclass
class TrafficVLMVisionOutput(BaseModelOutput):
    """Image tokens, and the output `centers` [B,K + 4,H/8,W/8] of the center head, if there is one."""

    centers: torch.Tensor | None = None


class TrafficVLMVisionModel(PreTrainedModel):
    """Pixels [B,3,H,W] → image tokens [B,P,hidden_size], one per patch, or per 2 × 2 (`pool_above`), row by row.

    With a center head, one token for each of its K classes comes before them.
    """

    config_class = TrafficVLMVisionConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["TrafficVLMVisionModel"]  # it is small, and adds feature maps of three places
    # Every implementation of attention is accepted: the tower has none.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    NUM_WAVES = 8

    def __init__(self, config: TrafficVLMVisionConfig):
        super().__init__(config)
        width = config.neck_width
        self.convolutions = TrafficVLMConvolutions(config)
        finer, same, coarser = self.convolutions.widths
        self.from_finer = nn.Conv2d(finer, width, 2, stride=2, bias=False)
        self.from_same = nn.Conv2d(same, width, 1)
        self.from_coarser = nn.Conv2d(coarser, width, 1, bias=False)
        self.place = nn.Linear(4 * self.NUM_WAVES, width, bias=False)
        self.place_of_token = nn.Linear(4 * self.NUM_WAVES, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(TrafficVLMDepthwiseLayer(config) for _ in range(config.num_hidden_layers))
        if config.pool_above is not None:
            self.pool = TrafficVLMPatchPooling(config)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.to_hidden = nn.Linear(width, config.hidden_size) if width != config.hidden_size else nn.Identity()
        if config.located:
            self.center_head = TrafficVLMCenterHead(width, finer, len(config.located))
            self.objects = TrafficVLMObjectTokens(len(config.located), same, config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Conv2d):  # He initialization: most are followed by a ReLU
            init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        # Positions with the same variance as the normalized features.
        if module is self.place_of_token:
            init.normal_(module.weight, std=1 / math.sqrt(2 * self.NUM_WAVES))
        if self.config.pool_above is not None and module is self.pool.merge:
            init.copy_(module.weight, torch.eye(*module.weight.shape))  # the mean alone
        for part in (self.center_head, self.objects) if self.config.located else ():
            part.start(module)

    def forward(self, pixel_values: torch.Tensor, **kwargs: Any) -> TrafficVLMVisionOutput:
        """Image tokens of pixels [B,3,H,W], H and W multiples of `patch_size`."""
        # Convolutions are faster with channels last, on CPUs and GPUs.
        maps = self.convolutions(pixel_values.contiguous(memory_format=torch.channels_last))
        x = self.combine_maps(*maps)
        rows, columns = x.shape[2:]
        x = x.flatten(2).transpose(1, 2)  # [B,P,C]
        x = x + self.place(patch_coordinates(rows, columns, self.NUM_WAVES, x))
        for layer in self.layers:
            x = layer(x, (rows, columns))
        patches = x
        token_rows, token_columns = token_grid(self.config, *pixel_values.shape[2:])
        if (token_rows, token_columns) != (rows, columns):
            x = self.pool(x, (rows, columns))
        x = self.to_hidden(self.norm(x))
        x = x + self.place_of_token(patch_coordinates(token_rows, token_columns, self.NUM_WAVES, x))
        if not self.config.located:
            return TrafficVLMVisionOutput(last_hidden_state=x)
        centers = self.center_head(patches, maps[0], (rows, columns))
        x = torch.cat([self.objects(centers, maps[1]), x], 1)
        return TrafficVLMVisionOutput(last_hidden_state=x, centers=centers)

    def combine_maps(self, finer: torch.Tensor, same: torch.Tensor, coarser: torch.Tensor) -> torch.Tensor:
        """The sum [B,C,rows,columns] of the three feature maps, one position per patch."""
        rows, columns = same.shape[2:]
        around = nn.functional.interpolate(self.from_coarser(coarser), scale_factor=2.0)[:, :, :rows, :columns]
        return self.from_finer(finer) + self.from_same(same) + around

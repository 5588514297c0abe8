"""Faster inference on CPUs, with the same weights: `model.fuse_for_inference()`.

    linear layer               → one product with the weight in oneDNN's own layout
    convolution, norm, ReLU6   → one convolution with folded batch normalization, and the weight in that layout
    1×1 convolution, norm, …   → the same as a linear layer for each pixel

oneDNN otherwise rearranges a weight in every pass, which for one row of text takes as long as the product itself. The
parameters stay as they are: the rearranged weights are copies, made in the first pass and again after a change. Only a
change in place through `.data` is not noticed, as torch does not count it.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from transformers.utils import is_torchdynamo_compiling

from .vision_traffic_vlm import TrafficVLMConvNorm


Pass = Callable[[torch.Tensor], torch.Tensor]


def fuse(model: nn.Module) -> None:
    """Replace the forward passes of a model's linear layers and convolution blocks by faster ones."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = FusedForward(module, pack_linear)  # type: ignore[assignment]
        elif type(module) is TrafficVLMConvNorm:
            module.forward = FusedForward(module, pack_convolution)  # type: ignore[assignment]


class FusedForward:
    """The forward pass of a module with packed weights, where that is possible; else the module's own pass.

    The module's own pass is used with gradients, in training mode, under autocast, while compiling, on other devices
    than a CPU, and for dtypes that oneDNN does not support.
    """

    def __init__(self, module: nn.Module, pack: Callable[[Any], Pass]):
        self.module, self.pack = module, pack
        self.parts = list(module.modules())
        self.packed: Pass | None = None
        self.version: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"packed": None, "version": []}  # packed weights can neither be copied nor pickled

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() or self.module.training or is_torchdynamo_compiling():
            return type(self.module).forward(self.module, x)
        # Not module.parameters() and module.buffers(), which take as long as a small product.
        found = chain.from_iterable((*part._parameters.values(), *part._buffers.values()) for part in self.parts)
        tensors = [tensor for tensor in found if tensor is not None]
        version = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
        if version != self.version:
            self.packed = self.pack(self.module) if is_supported(tensors[0]) else None
            self.version = version
        if self.packed is None or x.dtype != tensors[0].dtype or torch.is_autocast_enabled("cpu"):
            return type(self.module).forward(self.module, x)
        return self.packed(x)


def is_supported(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies by weights of this device and dtype."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    is_fast_bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or is_fast_bfloat16


def pack_linear(linear: nn.Linear) -> Pass:
    """The forward pass of a linear layer, with its weight in oneDNN's layout."""
    weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
    bias = None if linear.bias is None else linear.bias.detach()
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def pack_convolution(block: Any) -> Pass:
    """The forward pass of a `TrafficVLMConvNorm`, with normalization folded into weight and bias in float32."""
    convolution, norm, activation = block
    mean, variance = norm.running_mean.float(), norm.running_var.float()
    scale, shift = norm.weight.float(), norm.bias.float()
    folded = fuse_conv_bn_weights(convolution.weight.float(), None, mean, variance, norm.eps, scale, shift)
    weight, bias = (tensor.detach().to(convolution.weight.dtype) for tensor in folded)
    # "hardtanh" between 0 and 6 is ReLU6.
    after = ("hardtanh", [0.0, 6.0], "") if isinstance(activation, nn.ReLU6) else ("none", [], "")
    if (convolution.kernel_size, convolution.stride, convolution.groups) == ((1, 1), (1, 1), 1):
        # oneDNN picks a layout for the weight of a convolution by its input's size, which is not known yet. Changing
        # the layout in each pass takes up to 100 times as long as the product. That of a linear layer suits all sizes.
        linear = torch.ops.mkldnn._reorder_linear_weight(weight.flatten(1), None)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x.movedim(1, 3), linear, bias, *after).movedim(3, 1)
    shape = (convolution.padding, convolution.stride, convolution.dilation, convolution.groups)
    weight = weight.contiguous(memory_format=torch.channels_last)
    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *shape, None)
    return lambda x: torch.ops.mkldnn._convolution_pointwise(x, packed, bias, *shape, *after)

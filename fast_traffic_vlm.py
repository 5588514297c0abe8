"""Faster passes without gradients, with the same weights: `with model.fast_context(): ...`, which changes no model.

On a CPU, modules get a faster forward pass while the context is open:

    linear layer               → one product with the weight in oneDNN's own layout
    convolution, norm, ReLU6   → one convolution with folded batch normalization, and the weight in that layout
    1×1 convolution, norm, …   → the same as a linear layer for each pixel

oneDNN otherwise rearranges a weight in every pass, which for one row of text takes as long as the product itself.

On a CUDA GPU, passes are recorded as graphs. A large GPU computes the operations of a small model faster than the CPU
can start them. A graph starts all of them at once, but repeats exactly what was recorded: the same shapes at the same
addresses. So inputs are copied into buffers, and texts are padded to one of a few sizes.

Unusual passes (gradients, training, compiling, autocast, adapters on a GPU) are left to the model.
"""

import hashlib
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from transformers.utils import is_torchdynamo_compiling

from .cache_traffic_vlm import EncodedImages
from .vision_traffic_vlm import TrafficVLMConvNorm


Pass = Callable[[torch.Tensor], torch.Tensor]
Tensors = Sequence[torch.Tensor]
Views = dict[torch.device, list[Any]]

SAMPLED = 32  # bytes of each tensor in a checksum, at most twice as many
MOST = 16  # recorded passes; then all are dropped


# --- changed weights ---

SAMPLES: WeakKeyDictionary[nn.Module, tuple[list[int], Views]] = WeakKeyDictionary()  # as of `fingerprint`, and views


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of a module and its parts; torch takes ten times as long to list them."""
    modules: list[nn.Module | None] = [module]
    tensors: list[torch.Tensor | None] = []
    for one in modules:  # each adds its parts to the list
        if one is not None:
            tensors += one._parameters.values()
            tensors += one._buffers.values()
            modules += one._modules.values()
    return [tensor for tensor in tensors if tensor is not None]


def sample(tensors: Tensors) -> Views:
    """Views of a few bytes of each tensor, by device; on the CPU of NumPy, which reads them six times as fast."""
    views: Views = {}
    for tensor in tensors:
        if tensor.is_meta:  # its values are elsewhere, and accelerate fetches them
            continue
        stored = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        start, step = tensor.storage_offset() * tensor.element_size(), tensor.nbytes // SAMPLED
        view = stored[start : start + tensor.nbytes : step | 1]  # odd: every byte of a number has its turn
        views.setdefault(tensor.device, []).append(view.numpy() if tensor.device.type == "cpu" else view)
    return views


def fingerprint(module: nn.Module) -> tuple[list[int], str]:
    """Addresses of the tensors of a module and torch's counts of their changes, and a checksum of a few bytes of each.

    The checksum is the same in every process that has loaded the same file. It may miss a change of a small part of a
    tensor, such as one embedding. Torch does not count changes of `.data`, nor of inference tensors.
    """
    tensors = tensors_of(module)
    counts = [] if any(map(torch.Tensor.is_inference, tensors)) else [one._version for one in tensors]
    state = [*map(torch.Tensor.data_ptr, tensors), *counts]
    kept = SAMPLES.get(module)
    if kept is None or kept[0] != state:
        kept = SAMPLES[module] = state, sample(tensors)
    digest = hashlib.blake2b(digest_size=16)
    for device, views in kept[1].items():
        read = views if device.type == "cpu" else [torch.cat(views).cpu().numpy()]  # one transfer
        digest.update(b"".join(view.tobytes() for view in read))
    return state, digest.hexdigest()


# --- the context ---


class Fast:
    """Context in which passes of a model without gradients are faster. Outputs change by rounding only.

    Threads can share one: passes are fast until the last thread leaves. Weights that have changed are noticed by the
    first one that enters; they must not change inside. If a model is in two contexts, the first one stays in effect.

    Attributes:
        users: number of entries that have not been left.
        version: checksum of the weights without those of a head.
        graphs: CUDA graphs of a model that answers questions; None on a CPU.
    """

    def __init__(self, model: Any):
        self.model, self.users = model, 0
        self.lock = threading.RLock()
        self.forwards: list[FastForward] = []
        self.graphs: Graphs | None = None
        self.version = ""
        self.state: tuple[list[int], str] = ([], "")

    def __reduce__(self) -> Any:  # a copy is of the copied model, and has nothing packed
        return Fast, (self.model,)

    def __enter__(self) -> "Fast":
        with self.lock:
            if not self.users:
                self.install()
            self.users += 1
        return self

    def __exit__(self, *error: Any) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                self.uninstall()

    def install(self) -> None:
        """Make passes fast, with packed weights and graphs of the current weights."""
        model, state = self.model, fingerprint(self.model)  # of the addresses, too: graphs depend on them
        if state != self.state:
            self.uninstall()
            self.state, self.version = state, fingerprint(model.base_model)[1]
            modules = [one for one in model.modules() if type(one) in PACKS]
            self.forwards = [FastForward(one) for one in modules if all(map(is_supported, one.parameters()))]
            is_offloaded = any(hasattr(one, "_hf_hook") for one in model.modules())  # by accelerate
            can_record = model.device.type == "cuda" and hasattr(model, "question_logits") and not is_offloaded
            self.graphs = Graphs(model) if can_record else None
        vars(model.base_model).setdefault("fast", self)
        for forward in self.forwards:
            vars(forward.module).setdefault("forward", forward)  # others' passes stay; setattr is slow for modules

    def uninstall(self) -> None:
        own = [(self.model.base_model, "fast", self), *((one.module, "forward", one) for one in self.forwards)]
        for module, name, value in own:
            if vars(module).get(name) is value:
                del vars(module)[name]


# --- weights in the layout of a CPU ---


class FastForward:
    """The forward pass of a module with packed weights, made in the first pass that is not left to the module."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.run: Pass | None = None

    def __reduce__(self) -> Any:
        raise TypeError("packed weights cannot be copied: copy a model outside of fast_context()")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module = self.module
        is_own = torch.is_grad_enabled() or module.training or is_torchdynamo_compiling()
        if is_own or torch.is_autocast_enabled("cpu"):
            return type(module).forward(module, x)
        if self.run is None:
            self.run = PACKS[type(module)](module)
        return self.run(x)


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


PACKS: dict[type, Callable[[Any], Pass]] = {nn.Linear: pack_linear, TrafficVLMConvNorm: pack_convolution}


# --- CUDA graphs ---


class Recorded:
    """A function of tensors, repeated on the contents of its buffers.

    On a GPU this replays a CUDA graph; on a CPU, for tests, it calls the function again. The function keeps the model,
    whose memory a graph reads.

    Args:
        buffers: tensors that the function takes; each call copies its inputs into them.
        pool: memory shared by all graphs; None on a CPU.
    """

    def __init__(self, function: Callable[..., Tensors], buffers: Tensors, pool: Any):
        self.function, self.buffers = function, buffers
        self.graph: Any = None
        if pool is None:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # in their first passes, libraries allocate and plan, which cannot be recorded
                function(*buffers)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.outputs = function(*buffers)

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Copies of the outputs for inputs of the shapes of the buffers."""
        for buffer, new in zip(self.buffers, inputs, strict=True):
            buffer.copy_(to_device(new, buffer.device))
        if self.graph is None:
            self.outputs = self.function(*self.buffers)
        else:
            self.graph.replay()
        return [output.clone() for output in self.outputs]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device. From the CPU to a GPU, the copy does not wait for what the GPU still computes."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def pad(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A tensor [B,L] with zeros added up to [rows,columns]."""
    return nn.functional.pad(tensor.long(), (0, columns - tensor.shape[1], 0, rows - len(tensor)))


def power_of_two(count: int) -> int:
    """The power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def encode_images(model: Any, pixel_values: torch.Tensor) -> Tensors:
    """Keys and values [layers,I,K,P,D] of pixels [I,3,H,W], and centers if the tower has a center head."""
    images = model.model.look(pixel_values)
    outputs = [torch.stack(tensors) for tensors in zip(*images.key_values)]
    return outputs if images.centers is None else [*outputs, images.centers]


def answer(model: Any, text: torch.Tensor, ends: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Tensors:
    """Logits [B,N,V] at the ends [B,N] of questions.

    Args:
        text: [3,B,L], token ids, positions, and segments (0 at padding, which reads padding only).
        keys, values: [layers,B,K,P,D], of each row's image.
    """
    ids, positions, segments = text
    decoder, images = model.get_decoder(), EncodedImages(tuple(zip(keys, values)))
    states = decoder.decode(decoder.embed_tokens(ids), positions, segment_ids=segments, images=images)  # [B,L,C]
    return [model.compute_logits(states.gather(1, ends[..., None].expand(-1, -1, states.shape[-1])))]


class Graphs:
    """Recorded passes of a `TrafficVLMForConditionalGeneration`, by function and shapes."""

    def __init__(self, model: Any):
        self.model = model
        self.passes: dict[Hashable, Recorded] = {}
        self.lock = threading.RLock()  # the buffers belong to one caller at a time
        self.pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None

    def is_usable(self) -> bool:
        """Whether the model is in a state in which passes can be recorded and replayed."""
        model, device = self.model, self.model.device
        return (
            (device.type != "cuda" or device.index == torch.cuda.current_device())
            and not (torch.is_grad_enabled() or model.training or is_torchdynamo_compiling())
            and not torch.is_autocast_enabled(device.type)
            and not (hasattr(model, "peft_config") or getattr(model, "is_quantized", False))
        )

    def run(self, function: Callable[..., Tensors], *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Outputs of the recording for this function and these shapes, made on its first use."""
        with self.lock:
            key = (function.__name__, *(one.shape for one in inputs))
            if key not in self.passes:
                if len(self.passes) == MOST:
                    self.passes.clear()
                with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be written later
                    buffers = [torch.zeros(one.shape, dtype=one.dtype, device=self.model.device) for one in inputs]
                    self.passes[key] = Recorded(partial(function, self.model), buffers, self.pool)
            return self.passes[key](*inputs)

    def encode(self, pixel_values: torch.Tensor) -> EncodedImages:
        """Encoded images of checked pixels [I,3,H,W]."""
        keys, values, *centers = self.run(encode_images, pixel_values.to(self.model.dtype))
        return EncodedImages(tuple(zip(keys, values)), centers=next(iter(centers), None))

    def answer(
        self,
        images: EncodedImages,
        image_of_row: torch.Tensor,
        input_ids: torch.Tensor,
        ends: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: Any,
        segment_ids: Any,
    ) -> torch.Tensor | None:
        """Logits [Q,V] of the Q questions of packed rows [B,L], row after row, of checked text on the CPU.

        None if there are no graphs for such inputs: the model then computes its own pass.

        Args:
            image_of_row: [B], index of the image of each row.
            ends: [B,N], the last token of each question, -1 if a row has fewer than N; None for rows not packed.
        """
        if ends is None or images.attention_mask is not None or images.device != self.model.device:
            return None
        (rows, length), count = input_ids.shape, ends.shape[1]
        size = power_of_two(rows), max(16, power_of_two(length))
        segments = segment_ids - segment_ids.min() + 1
        if attention_mask is not None:
            segments = segments * attention_mask.bool()
        text = torch.stack([pad(one, *size) for one in (input_ids, position_ids.expand(rows, -1), segments)])
        keys, values = (torch.stack(part) for part in zip(*images.key_values))
        index = nn.functional.pad(image_of_row, (0, size[0] - rows))
        if not torch.equal(index, torch.arange(len(images))):
            index = to_device(index, images.device)
            keys, values = keys[:, index], values[:, index]
        [logits] = self.run(answer, text, pad(ends.clamp(min=0), size[0], power_of_two(count)), keys, values)
        logits, is_question = logits[:rows, :count].flatten(0, 1), (ends >= 0).flatten()
        return logits if bool(is_question.all()) else logits[to_device(is_question.nonzero()[:, 0], logits.device)]

"""Faster passes without gradients, with the same weights: `with Fast(model): ...`, which leaves the model unchanged.

On a CPU, modules get a faster forward pass while the context is open:

    linear layer               → one product with the weight in oneDNN's own layout
    convolution, norm, ReLU6   → one convolution with folded batch normalization, and the weight in that layout
    1×1 convolution, norm, …   → the same as a linear layer for each pixel

oneDNN otherwise rearranges a weight in every pass, which for one row of text takes as long as the product itself.

On a CUDA GPU, passes are recorded as graphs. A large GPU computes the operations of a small model faster than the CPU
can start them. A graph starts all of them at once, but repeats exactly what was recorded: the same shapes at the same
addresses. So inputs are copied into buffers, and texts are padded to one of a few sizes (`bucket`):

    encode_images   pixels [I,3,H,W] → keys and values of every decoder layer; one graph for each number of images
    answer          packed rows [B,L] → logits [B,N,V] at the ends of up to N questions in each row

Rearranged weights and graphs belong to `Fast`. They are made when they are first needed, and dropped when a checksum
of the weights has changed. Unusual passes (gradients, training, autocast, adapters on a GPU) are left to the model.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from transformers.utils import is_torchdynamo_compiling

from .cache_traffic_vlm import EncodedImages
from .checks_traffic_vlm import count_positions
from .vision_traffic_vlm import TrafficVLMConvNorm


Pass = Callable[[torch.Tensor], torch.Tensor]
Packed = dict[nn.Module, tuple[torch.dtype, Pass | None]]
Tensors = Sequence[torch.Tensor]

SAMPLE = 8  # values of each tensor in a checksum
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes; NumPy has no bfloat16
# PEFT settings that change a module's output but are not tensors.
ADAPTER_STATE = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")
KEPT = 16  # recorded passes; the least recently used one is dropped


# --- changed weights ---


class Sample:
    """Views of a few values of each parameter and buffer of modules, evenly spaced in memory; not of meta tensors."""

    def __init__(self, parts: Sequence[nn.Module]):
        self.parts = list(parts)
        modules = [module for part in parts for module in part.modules()]
        groups = [(module._modules, module._parameters, module._buffers) for module in modules]
        self.groups = [group for three in groups for group in three if group]
        self.members = self.list_members()
        self.tensors = [one for one in self.members if isinstance(one, torch.Tensor) and not one.is_meta]
        self.addresses = list(map(torch.Tensor.data_ptr, self.tensors))
        self.adapters = [module.__dict__ for module in modules if "_disable_adapters" in module.__dict__]
        views: dict[Any, list[Any]] = {}
        for tensor in self.tensors:
            view = tensor.detach().view(INTEGERS[tensor.element_size()])
            stored = view.untyped_storage().nbytes() // view.element_size() - view.storage_offset()
            count = min(view.numel(), stored)
            view = view.as_strided((min(count, SAMPLE),), (max(count // SAMPLE, 1),))
            # Joining many small arrays takes NumPy a fifth of the time.
            views.setdefault((view.device, view.dtype), []).append(view.numpy() if view.device.type == "cpu" else view)
        self.views = list(views.values())

    def list_members(self) -> list[Any]:
        return list(chain.from_iterable(map(methodcaller("values"), self.groups)))

    def is_current(self, parts: Sequence[nn.Module]) -> bool:
        """Whether the modules still have the same submodules and tensors, at the same addresses."""
        members = self.list_members()
        return (
            list(parts) == self.parts
            and len(members) == len(self.members)
            and all(map(is_, members, self.members))
            and list(map(torch.Tensor.data_ptr, self.tensors)) == self.addresses
        )

    def digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for views in self.views:
            values = torch.cat(views).cpu().numpy() if torch.is_tensor(views[0]) else np.concatenate(views)
            digest.update(values.tobytes())
        digest.update(repr([[state.get(name) for name in ADAPTER_STATE] for state in self.adapters]).encode())
        return digest.hexdigest()


class Checksum:
    """Function of modules: a checksum of a sample of their weights, and of their active adapters.

    It is the same in every process that has loaded the same file. A change of a few values of a tensor, such as one
    embedding, may be missed.
    """

    def __init__(self) -> None:
        self.sample: Sample | None = None

    def __reduce__(self) -> Any:
        return Checksum, ()

    @torch.no_grad()
    def __call__(self, parts: Sequence[nn.Module]) -> str:
        sample = self.sample
        if sample is None or not sample.is_current(parts):
            sample = self.sample = Sample(parts)
        return sample.digest()


# --- the context ---


class Fast:
    """Context in which passes of a model without gradients are faster. Outputs change by rounding only.

    Several threads may use one context at a time. A pass of another thread is faster meanwhile, too.

    Attributes:
        packed: for each module the dtype of its weight, and its pass with rearranged weights (None: its own).
        graphs: CUDA graphs of a model that answers questions; None on a CPU.
    """

    def __init__(self, model: Any):
        self.model, self.users = model, 0
        self.forwards: list[FastForward] = []
        self.models: list[Any] = []  # those that look for their context
        self.packed: Packed = {}
        self.graphs: Graphs | None = None
        self.head_checksum = Checksum()
        self.version: Any = None
        self.lock, self.local = threading.RLock(), threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("model", "users", "forwards", "models")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]
        self.__dict__ |= state

    def __enter__(self) -> "Fast":
        self.start()
        self.local.depth = getattr(self.local, "depth", 0) + 1
        return self

    def __exit__(self, *error: Any) -> None:
        self.local.depth -= 1
        with self.lock:
            self.users = max(self.users - 1, 0)
            if self.users == 0:
                self.uninstall()

    def start(self) -> None:
        """Begin without an end; `stop` ends it."""
        self.check()
        with self.lock:
            self.users += 1
            self.install()

    def stop(self) -> None:
        with self.lock:
            self.users = 0
            self.uninstall()

    def check(self) -> None:
        """Drop packed weights and graphs if the weights have changed. A thread does so once for each context."""
        if is_torchdynamo_compiling() or self.is_checked():
            return
        with self.lock:
            base = self.model.base_model
            heads = [one for one in self.model.children() if one is not base and self.model is not base]
            version = (
                base.weights_version(),
                self.head_checksum(heads),
                base.checksum.sample,
                self.head_checksum.sample,
            )
            if version == self.version:
                return
            self.uninstall()
            self.version, self.packed = version, {}
            modules = list(self.model.modules())
            self.forwards = [FastForward(one, self.packed) for one in modules if type(one) in PACKS]
            self.models = [one for one in modules if hasattr(type(one), "fast")]
            answering = [one for one in self.models if hasattr(type(one), "question_logits")]
            is_cuda = self.model.device.type == "cuda"
            self.graphs = Graphs(answering[0]) if is_cuda and answering else None
            if self.users:
                self.install()

    def is_checked(self) -> bool:
        """Whether this thread is inside of the context."""
        return getattr(self.local, "depth", 0) > 0

    def install(self) -> None:
        # Not with setattr, which is slow for modules. What others have set stays.
        for forward in self.forwards:
            forward.module.__dict__.setdefault("forward", forward)
        for model in self.models:
            model.__dict__.setdefault("fast", self)

    def uninstall(self) -> None:
        for forward in self.forwards:
            if forward.module.__dict__.get("forward") is forward:
                del forward.module.__dict__["forward"]
        for model in self.models:
            if model.__dict__.get("fast") is self:
                del model.__dict__["fast"]


# --- weights in the layout of a CPU ---


class FastForward:
    """The forward pass of a module with packed weights, where that is possible; else the module's own pass.

    The module's own pass is used with gradients, in training mode, under autocast, while compiling, on other devices
    than a CPU, and for dtypes that oneDNN does not support.
    """

    def __init__(self, module: nn.Module, packed: Packed):
        self.module, self.packed = module, packed

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "packed": {}}  # packed weights can neither be copied nor pickled

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        module, run = self.module, None
        is_own = torch.is_grad_enabled() or module.training or is_torchdynamo_compiling()
        if not (is_own or torch.is_autocast_enabled("cpu")):
            if module not in self.packed:
                weight = next(module.parameters())
                self.packed[module] = weight.dtype, PACKS[type(module)](module) if is_supported(weight) else None
            dtype, run = self.packed[module]
            run = run if x.dtype == dtype else None
        return type(module).forward(module, x) if run is None else run(x)


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


def bucket(count: int, smallest: int) -> int:
    """The first of smallest · (1, 2, 3, 4, 6, 8, 12, 16, …) that is at least `count`."""
    size = smallest
    while size < count:
        size *= 2
    return size * 3 // 4 if size >= 4 * smallest and size * 3 // 4 >= count else size


def pad(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A tensor [B,L] with zeros added up to [rows,columns]."""
    return nn.functional.pad(tensor.long(), (0, columns - tensor.shape[1], 0, rows - len(tensor)))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, without waiting for what a GPU still computes."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Recorded:
    """A function of tensors, repeated on the contents of its buffers.

    On a GPU this replays a CUDA graph; on a CPU, for tests, it calls the function again. The function is kept, and so
    are all tensors that it reads: a graph reads their memory, which would otherwise be freed.

    Args:
        buffers: tensors that the function takes; each call copies its inputs into them.
        pool: memory shared by all graphs; None on a CPU.
    """

    def __init__(self, function: Callable[..., Tensors], buffers: Sequence[torch.Tensor], pool: Any = None):
        self.function, self.buffers = function, buffers
        self.graph: Any = None
        if pool is None:
            self.outputs = function(*buffers)
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
        """Copies of the outputs for inputs of any device and dtype. A smaller input fills the start of its buffer."""
        for buffer, new in zip(self.buffers, inputs, strict=True):
            if new.device.type == "cpu" and buffer.is_cuda:
                new = new.pin_memory()  # so that the copy need not be waited for
            buffer[tuple(map(slice, new.shape))].copy_(new, non_blocking=True)
        if self.graph is not None:
            self.graph.replay()
        else:
            for output, new in zip(self.outputs, self.function(*self.buffers)):
                output.copy_(new)
        return [output.clone() for output in self.outputs]


def encode_images(model: Any, pixel_values: torch.Tensor) -> Tensors:
    """Keys and values [layers,I,K,P,D] of pixels [I,3,H,W]."""
    tokens = model.projector(model.vision_tower(pixel_values, return_dict=True).last_hidden_state)
    keys, values = zip(*model.text_model.project_image_tokens(tokens))
    return torch.stack(keys), torch.stack(values)


def answer(model: Any, length: int, text: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Tensors:
    """Logits [B,N,V] at the ends of questions.

    Args:
        length: L.
        text: [B,3L+N], token ids, positions, segments (0 at padding, which reads padding only) and ends, side by side:
            one copy to the GPU instead of four.
        keys, values: [layers,B,K,P,D], of each row's image.
    """
    ids, positions, segments, ends = text.split([length, length, length, text.shape[1] - 3 * length], dim=1)
    images = EncodedImages(tuple(zip(keys, values)))
    rows = {"position_ids": positions, "segment_ids": segments, "encoded_images": images, "use_cache": False}
    states = model.get_decoder()(ids, **rows, return_dict=True).last_hidden_state  # [B,L,C]
    return [model.compute_logits(states.gather(1, ends[..., None].expand(-1, -1, states.shape[-1])))]


class Graphs:
    """Recorded passes of a `TrafficVLMForConditionalGeneration`, by kind and shape.

    `encode` and `answer` return None if there is no graph for their inputs: the model then computes its own pass.
    """

    def __init__(self, model: Any):
        self.model = model
        self.passes: OrderedDict[Hashable, Recorded] = OrderedDict()
        self.seen: set[Hashable] = set()
        self.lock = threading.RLock()  # the buffers belong to one caller at a time
        self.pool: Any = None

    def is_usable(self) -> bool:
        """Whether the model is in a state in which passes can be recorded and replayed."""
        model, device = self.model, self.model.device
        is_adapted = hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)
        # Graphs are recorded and replayed on the default stream of the current device.
        is_default = device.type != "cuda" or (
            device.index == torch.cuda.current_device() and torch.cuda.current_stream() == torch.cuda.default_stream()
        )
        return (
            is_default
            and not (torch.is_grad_enabled() or model.training or is_torchdynamo_compiling())
            and not torch.is_autocast_enabled(device.type)
            and not (is_adapted or getattr(model, "is_quantized", False))
            and model.get_decoder().config._attn_implementation in ("sdpa", "eager")
        )

    def find(self, *key: Hashable, build: Callable[[], Recorded]) -> Recorded | None:
        """The recording of this kind and shape, made on its second use; None on the first."""
        key = (*key, self.model.get_decoder().config._attn_implementation)
        if key not in self.passes:
            if key not in self.seen:  # recording takes ten times as long as a pass
                self.seen.add(key)
                return None
            with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be written later
                self.passes[key] = build()
            while len(self.passes) > KEPT:
                self.passes.popitem(last=False)
        self.passes.move_to_end(key)
        return self.passes[key]

    def record(self, function: Callable[..., Tensors], buffers: list[torch.Tensor]) -> Recorded:
        if self.model.device.type == "cuda" and self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        return Recorded(function, buffers, self.pool)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype or self.model.dtype, device=self.model.device)

    def encode(self, pixel_values: torch.Tensor) -> EncodedImages | None:
        """Encoded images of checked pixels [I,3,H,W]."""
        with self.lock:
            if not self.is_usable() or not len(pixel_values):
                return None
            shape = pixel_values.shape
            run = partial(encode_images, self.model.model)
            found = self.find("images", shape, build=lambda: self.record(run, [self.zeros(*shape)]))
            if found is None:
                return None
            keys, values = found(pixel_values)
            return EncodedImages(tuple(zip(keys, values)), pixel_values=pixel_values)

    def stack_images(self, images: EncodedImages, image_of_row: torch.Tensor) -> Tensors | None:
        """Keys and values [layers,B,K,P,D] of each row's image; None for images with hidden tokens."""
        if images.attention_mask is not None or images.device != self.model.device:
            return None
        keys, values = (torch.stack(part) for part in zip(*images.cast(self.model.dtype).key_values))
        if torch.equal(image_of_row, torch.arange(len(images))):
            return keys, values
        index = to_device(image_of_row, images.device)
        return keys[:, index], values[:, index]

    def answer(
        self,
        images: EncodedImages,
        image_of_row: torch.Tensor,
        input_ids: torch.Tensor,
        ends: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        segment_ids: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Logits [Q,V] of Q questions, row after row, of checked text on the CPU.

        Args:
            image_of_row: [B], index of the image of each row.
            ends: [B,N], the last token of each question, -1 if a row has fewer than N. Without ends, a row is one
                question, which ends at the last token that is not padding.
        """
        visible = torch.ones_like(input_ids) if attention_mask is None else attention_mask.bool().long()
        if ends is None:
            ends = (visible * torch.arange(1, input_ids.shape[1] + 1)).argmax(-1)[:, None]
        with self.lock:
            if not self.is_usable() or (stacked := self.stack_images(images, image_of_row)) is None:
                return None
            (rows, length), count = input_ids.shape, ends.shape[1]
            size = bucket(rows, 1), bucket(length, 16), bucket(count, 1)

            def build() -> Recorded:
                text = self.zeros(size[0], 3 * size[1] + size[2], dtype=torch.long)
                shapes = [(one.shape[0], size[0], *one.shape[2:]) for one in stacked]
                return self.record(partial(answer, self.model, size[1]), [text, *(self.zeros(*s) for s in shapes)])

            found = self.find("questions", *size, build=build)
            if found is None:
                return None
            # From 1 on, and 0 at padding.
            segments = visible if segment_ids is None else (segment_ids - segment_ids.min() + 1) * visible
            positions = count_positions(input_ids, visible, 0) if position_ids is None else position_ids
            parts = [pad(one, size[0], size[1]) for one in (input_ids, positions.expand(rows, -1), segments)]
            [logits] = found(torch.cat([*parts, pad(ends.clamp(min=0), size[0], size[2])], dim=1), *stacked)
        logits = logits[:rows, :count].flatten(0, 1)
        is_question = (ends >= 0).flatten()
        return logits if bool(is_question.all()) else logits[to_device(is_question.nonzero()[:, 0], logits.device)]

"""Images and questions recorded as CUDA graphs, after `fuse_for_inference()` on a GPU.

A large GPU computes the operations of a small model faster than the CPU can start them. A graph starts all of them at
once, but repeats exactly what was recorded: the same shapes at the same addresses. So inputs are copied into buffers,
and texts are padded to one of a few sizes (`bucket`):

    encode_images   pixels [I,3,H,W] → keys and values of every decoder layer; one graph for each number of images
    answer          packed rows [B,L] → logits [B,N,V] at the ends of up to N questions in each row

`greedy_traffic_vlm.py` does the same for generated texts. Recorded functions call the model's own modules. So weights
that change in place take effect at once; if weights are replaced by other tensors, `Graphs` drops what it recorded.
Unusual passes (gradients, autocast, adapters, hidden image tokens) are left to the model itself.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from transformers.utils import is_torchdynamo_compiling

from .checks_traffic_vlm import count_positions
from .scoring_traffic_vlm import EncodedImages


KEPT = 16  # recorded passes; the least recently used one is dropped
Tensors = Sequence[torch.Tensor]


def bucket(count: int, smallest: int) -> int:
    """The first of smallest · (1, 2, 3, 4, 6, 8, 12, 16, …) that is at least `count`."""
    size = smallest
    while size < count:
        size *= 2
    return size * 3 // 4 if size >= 4 * smallest and size * 3 // 4 >= count else size


def pad(tensor: torch.Tensor, rows: int, columns: int, left: bool = False) -> torch.Tensor:
    """A tensor [B,L] with zeros added up to [rows,columns], on the right or on the left of the columns."""
    missing = columns - tensor.shape[1]
    sides = (missing, 0) if left else (0, missing)
    return torch.nn.functional.pad(tensor.long(), (*sides, 0, rows - len(tensor)))


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

    Args:
        uses_before: how often a shape is left to the model before it is recorded.
    """

    def __init__(self, model: Any, devices: Sequence[str] = ("cuda",), uses_before: int = 1):
        self.model, self.devices, self.uses_before = model, devices, uses_before
        self.passes: OrderedDict[Hashable, Any] = OrderedDict()
        self.uses: Counter[Hashable] = Counter()
        self.lock = threading.RLock()  # the buffers belong to one caller at a time
        self.groups: list[dict[str, Any]] = []  # parameters and buffers of each module
        self.weights: list[torch.Tensor] = []  # those recorded; graphs read their memory, which must not be freed
        self.addresses: list[int] = []
        self.pool: Any = None

    def __reduce__(self) -> Any:
        return Graphs, (self.model, self.devices, self.uses_before)  # a copy records its own passes

    def is_usable(self) -> bool:
        """Whether the model is in a state in which passes can be recorded and replayed."""
        model, device = self.model, self.model.device
        is_adapted = hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False)
        # Graphs are recorded and replayed on the default stream of the current device.
        is_default = device.type != "cuda" or (
            device.index == torch.cuda.current_device() and torch.cuda.current_stream() == torch.cuda.default_stream()
        )
        return (
            device.type in self.devices
            and is_default
            and not (torch.is_grad_enabled() or model.training or is_torchdynamo_compiling())
            and not torch.is_autocast_enabled(device.type)
            and not (is_adapted or getattr(model, "is_quantized", False))
            and model.get_decoder().config._attn_implementation in ("sdpa", "eager")
        )

    def has_changed(self) -> bool:
        """Whether weights were replaced by other tensors since the last call. If so, all recorded passes are dropped.

        Called after a replay, so that it costs no time while the GPU computes; the caller then discards the outputs.
        """
        weights = [one for group in self.groups for one in group.values() if one is not None]
        addresses = [one.data_ptr() for one in weights]
        if self.groups and addresses == self.addresses:
            return False
        self.passes.clear()
        groups = [group for module in self.model.modules() for group in (module._parameters, module._buffers)]
        self.groups = [group for group in groups if group]
        self.weights = [one.detach() for group in self.groups for one in group.values() if one is not None]
        self.addresses = [one.data_ptr() for one in self.weights]
        return True

    def record(self, function: Callable[..., Tensors], buffers: list[torch.Tensor]) -> Recorded:
        if self.model.device.type == "cuda" and self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        return Recorded(function, buffers, self.pool)

    def find(self, *key: Hashable, build: Callable[[], Any]) -> Any:
        """The recorded pass of a kind and shape; None if the shape is new, as recording takes ten times as long."""
        key = (*key, self.model.get_decoder().config._attn_implementation)
        if not self.groups:
            self.has_changed()  # notes the weights that will be recorded
        if key not in self.passes:
            self.uses[key] += 1
            if self.uses[key] <= self.uses_before:
                return None
            with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be written later
                self.passes[key] = build()
            while len(self.passes) > KEPT:
                self.passes.popitem(last=False)
        self.passes.move_to_end(key)
        return self.passes[key]

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
            return None if self.has_changed() else EncodedImages(tuple(zip(keys, values)), pixel_values=pixel_values)

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
            if self.has_changed():
                return None
        logits = logits[:rows, :count].flatten(0, 1)
        is_question = (ends >= 0).flatten()
        return logits if bool(is_question.all()) else logits[to_device(is_question.nonzero()[:, 0], logits.device)]

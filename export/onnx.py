"""Export the model as three graphs without Python code, for ONNX Runtime.

    vision   pixel_values [I,3,H,W] → image_keys, image_values [N,I,K,P,D] for the N layers of the decoder
    score    packed questions [B,L], question_ends [B,Q], keys and values of B images → P(yes) [B,Q]
    decode   tokens [B,T], a cache [N,B,K,S,D] of S tokens, images → P(yes) [B] and log probabilities [B,V] after the
             last token, the cache [N,B,K,S+T,D], attention maps [B,T,P]

`vision` and `score` answer yes/no questions. `decode` generates words: first the prompt with an empty cache (S = 0),
then one token at a time. It knows no padding, so all prompts of a batch have the same length. Numbers of images, rows,
tokens and questions are dynamic. With latent attention, K is 1, a key is a latent, and values have width 0.
docs/serving.md has a program that asks the three graphs.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from ..attention_traffic_vlm import rotary_embedding
from ..cache_traffic_vlm import CACHE_NAME, KeyValues
from ..common.files import new_folder
from ..common.loading import load_weights, set_image_size
from ..configuration_traffic_vlm import height_and_width, token_grid
from ..processing_traffic_vlm import TrafficVLMProcessor


NAMES = ("vision", "score", "decode")
OPSET = 20
MIN_SIZE = 4096  # numbers of a tensor from which it is stored in fewer bits


class VisionGraph(nn.Module):
    """Pixels to the keys and values of every layer's cross-attention."""

    def __init__(self, model: Any):
        super().__init__()
        self.vision_tower, self.projector = model.model.vision_tower, model.model.projector
        self.cross_attentions = nn.ModuleList(layer.cross_attn for layer in model.model.text_model.layers)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.projector(self.vision_tower(pixel_values).last_hidden_state)
        keys, values = zip(*(cast(Any, cross_attn).project(tokens) for cross_attn in self.cross_attentions))
        return torch.stack(keys), torch.stack(values)


class DecoderGraph(nn.Module):
    """The decoder's layers, shared by both graphs; `lm_head` is a field so that its weights are stored once."""

    def __init__(self, model: Any):
        super().__init__()
        self.text_model, self.lm_head, self.config = model.model.text_model, model.lm_head, model.config
        self.compute_logits, self.yes_probability = model.compute_logits, model.yes_probability

    def hidden_states(self, ids: Tensor, positions: Tensor, mask: Tensor, images: Any, cache: Any = None) -> Tensor:
        text = self.config.get_text_config()
        x = self.text_model.embed_tokens(ids)
        rotary = rotary_embedding(positions, text.rotary_dim, text.rope_parameters["rope_theta"], x.dtype)
        for layer, key, value in zip(self.text_model.layers, *images):
            x = layer(x, key, value, rotary=rotary, attention_mask=mask, **{CACHE_NAME: cache})
        return self.text_model.norm(x)


class ScoreGraph(DecoderGraph):
    """P(yes) of packed questions.

    A question_ends of -1 marks an unused column, whose output is meaningless.
    """

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        question_ends: Tensor,
        image_keys: Tensor,
        image_values: Tensor,
    ) -> Tensor:
        mask = (segment_ids[:, :, None] == segment_ids[:, None]).tril()[:, None]  # [B,1,L,L]
        states = self.hidden_states(input_ids, position_ids, mask, (image_keys, image_values))
        ends = question_ends.clamp(min=0)[..., None].expand(-1, -1, states.shape[-1])
        return self.yes_probability(self.compute_logits(states.gather(1, ends)))


class StepCache:
    """The cache as plain tensors: `before` this step, and one pair `after` it for each layer that ran."""

    def __init__(self, keys: Tensor, values: Tensor):
        self.before: KeyValues = (keys, values)
        self.after: list[KeyValues] = []

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        keys, values = self.before
        self.after.append((torch.cat([keys[layer_idx], key], 2), torch.cat([values[layer_idx], value], 2)))
        return self.after[-1]


class DecodeGraph(DecoderGraph):
    """P(yes) and log probabilities of the next token, the cache with the new tokens, and their attention maps."""

    def forward(
        self,
        input_ids: Tensor,
        past_keys: Tensor,
        past_values: Tensor,
        image_keys: Tensor,
        image_values: Tensor,
    ) -> tuple[Tensor, ...]:
        past, length = past_keys.shape[3], input_ids.shape[1]
        positions = past + torch.arange(length, device=input_ids.device)
        mask = (torch.arange(past + length, device=input_ids.device) <= positions[:, None])[None, None]
        cache = StepCache(past_keys, past_values)
        maps: list[Tensor] = []  # [B,T,P] of each layer: eager attention returns its weights [B,heads,T,P]
        handles = [
            layer.cross_attn.register_forward_hook(lambda module, inputs, output: maps.append(output[1].mean(1)))
            for layer in self.text_model.layers
        ]
        states = self.hidden_states(input_ids, positions[None], mask, (image_keys, image_values), cache)
        for handle in handles:
            handle.remove()
        logits = self.compute_logits(states[:, -1])
        log_probs = logits.log_softmax(-1)
        keys, values = map(torch.stack, zip(*cache.after))
        vision = self.config.vision_config
        rows, columns = token_grid(vision, *height_and_width(vision.image_size))
        patches = torch.stack(maps).mean(0)[..., -rows * columns :]  # without tokens of objects
        return self.yes_probability(logits), log_probs, keys, values, patches


class Graph(NamedTuple):
    """A graph as a module, with what the exporters need to trace it."""

    module: nn.Module
    inputs: dict[str, Tensor]  # example inputs
    dynamic_shapes: dict[str, Any]
    outputs: list[str]


def load(folder: str | Path, image_size: tuple[int, int] | None = None) -> tuple[Any, TrafficVLMProcessor]:
    """(model in float32 with eager attention, as the graphs need it; processor), for images of (height, width).

    Raises what `load_weights` does.
    """
    model = load_weights(folder, dtype=torch.float32, attn_implementation="eager").eval()
    processor = TrafficVLMProcessor.from_pretrained(folder)
    if image_size is not None:
        set_image_size(model, processor, image_size)
    return model, processor


def make_graphs(model: Any) -> dict[str, Graph]:
    """The three graphs, by name, of a model that `load` returned."""
    text, vision = model.config.get_text_config(), model.config.vision_config
    pixels = torch.zeros(2, 3, *height_and_width(vision.image_size))
    with torch.no_grad():
        keys, values = VisionGraph(model)(pixels)
    images = {"image_keys": keys, "image_values": values}
    # The example has two rows of two questions with five tokens each. Inputs must not share memory.
    packed = {
        "input_ids": torch.full((2, 10), 7),
        "position_ids": torch.arange(5).repeat(2, 2),
        "segment_ids": torch.tensor([1, 2]).repeat_interleave(5).repeat(2, 1),
    }
    heads, *widths = text.cache_shape
    cache = {
        name: torch.zeros(text.num_hidden_layers, 2, heads, 3, width)
        for name, width in zip(("past_keys", "past_values"), widths, strict=True)
    }
    rows, length = Dim("rows"), Dim("length", min=2)
    image_shapes = {name: {1: rows} for name in images}
    return {
        "vision": Graph(VisionGraph(model), {"pixel_values": pixels}, {"pixel_values": {0: Dim("images")}}, [*images]),
        "score": Graph(
            ScoreGraph(model),
            packed | {"question_ends": torch.tensor([[4, 9, 9]] * 2)} | images,
            {name: {0: rows, 1: length} for name in packed}
            | {"question_ends": {0: rows, 1: Dim("questions")}}
            | image_shapes,
            ["p_yes"],
        ),
        "decode": Graph(
            DecodeGraph(model),
            {"input_ids": torch.full((2, 4), 7)} | cache | images,
            {"input_ids": {0: rows, 1: Dim("tokens", min=1)}}
            | {name: {1: rows, 3: Dim("past", min=0)} for name in cache}
            | image_shapes,
            ["p_yes", "log_probs", "keys", "values", "maps"],
        ),
    }


def save_onnx(graph: Graph, path: Path) -> None:
    """Write one ONNX file, with its weights inside. Tracing takes up to a minute."""
    print(f"{path.name} ...", flush=True)
    torch.onnx.export(
        graph.module.eval(),
        (),
        path,
        kwargs=graph.inputs,
        input_names=[*graph.inputs],
        output_names=graph.outputs,
        dynamic_shapes=graph.dynamic_shapes,
        opset_version=OPSET,
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def store_in_less(path: Path) -> None:
    """Store the large weights of an ONNX file in fewer bits: matrices in 8, convolutions in 16.

    Products are still of float32, which in WebAssembly is faster than integers, and more exact. Each output channel of
    a matrix has its own scale. Convolutions in 8 bits would change P(yes) by up to 0.06.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(path)
    graph, nodes = model.graph, []
    options: dict[str, Any]
    factors = {node.input[1] for node in graph.node if node.op_type == "MatMul"}  # [in,out]; others are [out,in]
    for tensor in list(graph.initializer):
        weight = numpy_helper.to_array(tensor)
        if weight.dtype != np.float32 or weight.ndim < 2 or weight.size < MIN_SIZE:
            continue
        if weight.ndim == 2:
            axis = int(tensor.name in factors)
            scale = np.maximum(np.abs(weight).max(1 - axis, keepdims=True), 1e-12) / 127
            stored = {"int8": np.rint(weight / scale).astype(np.int8), "scale": scale.ravel()}
            operator, options = "DequantizeLinear", {"axis": axis}
        else:
            stored = {"float16": weight.astype(np.float16)}
            operator, options = "Cast", {"to": TensorProto.FLOAT}
        stored = {f"{tensor.name}_{suffix}": value for suffix, value in stored.items()}
        graph.initializer.remove(tensor)
        graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in stored.items())
        nodes.append(helper.make_node(operator, [*stored], [tensor.name], **options))
    nodes += graph.node
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]
    onnx.save(model, path)


def export_settings(model: Any, processor: Any) -> dict[str, Any]:
    """Plain values that a program needs besides the graphs: sizes, token ids, words and image preprocessing."""
    text, images, tokenizer = model.config.get_text_config(), processor.image_processor, processor.tokenizer
    return {
        "graphs": NAMES,
        "layers": text.num_hidden_layers,
        "cache_shape": text.cache_shape,
        "max_tokens": min(text.max_position_embeddings, tokenizer.model_max_length),
        "max_new_tokens": model.generation_config.max_new_tokens,
        "start": text.bos_token_id,
        "end": text.eos_token_id,
        "yes_no": [text.yes_token_id, text.no_token_id],
        "never": [*text.suppressed_tokens, *(model.generation_config.suppress_tokens or [])],
        "taught": processor.taught,
        "answer_untaught": False,  # true: guess at what was not taught, instead of a problem
        "own_questions": processor.own_questions,
        "questions": processor.questions,
        "image_size": list(height_and_width(model.config.vision_config.image_size)),
        "resample": int(images.resample),
        "rescale_factor": images.rescale_factor,
        "mean": list(images.image_mean),
        "std": list(images.image_std),
    }


def export(model_folder: Path, output_dir: Path, image_size: tuple[int, int] | None = None) -> list[Path]:
    """The graphs of a model with export.json and tokenizer.json, in a new folder, which appears when it is complete.

    They read images of (height, width) `image_size`, by default the model's.

    Raises:
        ValueError, OSError: the folder exists, or the model cannot be used.
        ModuleNotFoundError: a package is missing.
    """
    with new_folder(output_dir) as folder:
        model, processor = load(model_folder, image_size)
        (folder / "export.json").write_text(json.dumps(export_settings(model, processor), indent=1) + "\n")
        (folder / "tokenizer.json").write_text(processor.tokenizer.backend_tokenizer.to_str())
        for name, graph in make_graphs(model).items():
            save_onnx(graph, folder / f"{name}.onnx")
    return sorted(output_dir.iterdir())

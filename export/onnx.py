"""Export the model as three graphs without Python code, for ONNX Runtime or `torch.export`.

    vision   pixel_values [I,3,H,W] → image_keys, image_values [N,I,K,P,D] for the N layers of the decoder
    score    packed questions [B,L], question_ends [B,Q], keys and values of B images → P(yes) [B,Q], logits [B,Q,V]
    decode   tokens [B,T], a cache [N,B,K,S,D] of S tokens, images → P(yes) [B] and log probabilities [B,V] after the
             last token, the cache [N,B,K,S+T,D], attention maps [B,T,P]

`vision` and `score` answer yes/no questions. `decode` generates words: first the prompt with an empty cache (S = 0),
then one token at a time. It knows no padding, so all prompts of a batch have the same length. Numbers of images, rows,
tokens and questions are dynamic. With latent attention, K is 1, a key is a latent, and values have width 0.
docs/serving.md has a program that asks the three graphs.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.export import Dim

from ..attention_traffic_vlm import rotary_embedding
from ..cache_traffic_vlm import KeyValues
from ..common.files import new_folder
from ..common.loading import load_processor, load_weights
from ..configuration_traffic_vlm import height_and_width


NAMES = ("vision", "score", "decode")
FORMATS = ("onnx", "int8", "torch")
OPSET = 20


class VisionGraph(nn.Module):
    """Pixels to the keys and values of every layer's cross-attention."""

    def __init__(self, model: Any):
        super().__init__()
        self.vision_tower, self.projector = model.model.vision_tower, model.model.projector
        self.cross_attentions = nn.ModuleList(layer.cross_attn for layer in model.model.text_model.layers)

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.projector(self.vision_tower(pixel_values).last_hidden_state)
        keys, values = zip(*(cast(Any, cross_attn).project(tokens) for cross_attn in self.cross_attentions))
        return torch.stack(keys), torch.stack(values)


class DecoderGraph(nn.Module):
    """The decoder's layers, shared by `ScoreGraph` and `DecodeGraph`."""

    def __init__(self, model: Any):
        super().__init__()
        self.text_model, self.lm_head, self.config = model.model.text_model, model.lm_head, model.config
        self.yes_probability = model.yes_probability

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor,
        image_keys: torch.Tensor,
        image_values: torch.Tensor,
        cache: Any = None,
    ) -> torch.Tensor:
        text = self.config.get_text_config()
        x = self.text_model.embed_tokens(input_ids)
        rotary = rotary_embedding(position_ids, text.rotary_dim, text.rope_parameters["rope_theta"], x.dtype)
        for layer, key, value in zip(self.text_model.layers, image_keys, image_values):
            x = layer(x, key, value, rotary=rotary, attention_mask=mask, past_key_values=cache)
        return self.text_model.norm(x)


class ScoreGraph(DecoderGraph):
    """P(yes) of packed questions, and the logits of the first token of each answer.

    A question_ends of -1 marks an unused column, whose output is meaningless.
    """

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        segment_ids: torch.Tensor,
        question_ends: torch.Tensor,
        image_keys: torch.Tensor,
        image_values: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask = (segment_ids[:, :, None] == segment_ids[:, None]).tril()[:, None]  # [B,1,L,L]
        states = self.hidden_states(input_ids, position_ids, mask, image_keys, image_values)
        ends = question_ends.clamp(min=0)[..., None].expand(-1, -1, states.shape[-1])
        logits = self.lm_head(states.gather(1, ends))
        return self.yes_probability(logits), logits


class StepCache:
    """The cache as plain tensors: `before` this step, and one pair `after` it for each layer that ran."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.before: KeyValues = (keys, values)
        self.after: list[KeyValues] = []

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.before
        self.after.append((torch.cat([keys[layer_idx], key], 2), torch.cat([values[layer_idx], value], 2)))
        return self.after[-1]


class DecodeGraph(DecoderGraph):
    """P(yes) and log probabilities of the next token, the cache with the new tokens, and their attention maps."""

    def forward(
        self,
        input_ids: torch.Tensor,
        past_keys: torch.Tensor,
        past_values: torch.Tensor,
        image_keys: torch.Tensor,
        image_values: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        past, length = past_keys.shape[3], input_ids.shape[1]
        positions = past + torch.arange(length, device=input_ids.device)
        mask = (torch.arange(past + length, device=input_ids.device) <= positions[:, None])[None, None]
        cache = StepCache(past_keys, past_values)
        maps: list[torch.Tensor] = []  # [B,T,P] of each layer: eager attention returns its weights [B,heads,T,P]
        handles = [
            layer.cross_attn.register_forward_hook(lambda module, inputs, output: maps.append(output[1].mean(1)))
            for layer in self.text_model.layers
        ]
        try:
            states = self.hidden_states(input_ids, positions[None], mask, image_keys, image_values, cache)
        finally:
            for handle in handles:
                handle.remove()
        # Keep the length dimension in the product: a product of two matrices becomes a Gemm, whose weights
        # `quantize` transposes, and with them the embedding that shares them.
        logits = self.lm_head(states[:, -1:])[:, 0]
        is_pad = torch.arange(logits.shape[-1]) == self.config.get_text_config().pad_token_id
        log_probs = logits.masked_fill(is_pad, -torch.inf).log_softmax(-1)
        keys, values = map(torch.stack, zip(*cache.after))
        return self.yes_probability(logits), log_probs, keys, values, torch.stack(maps).mean(0)


class Graph(NamedTuple):
    """A graph as a module, with what the exporters need to trace it."""

    module: nn.Module
    inputs: dict[str, torch.Tensor]  # example inputs
    dynamic_shapes: dict[str, Any]
    outputs: list[str]


@contextmanager
def step(text: str) -> Iterator[None]:
    """Print what a block does, and at its end how long it took, as tracing a graph takes up to a minute."""
    print(text, end=" ... ", flush=True)
    start = time.monotonic()
    yield
    print(f"{time.monotonic() - start:.0f} s", flush=True)


def load(folder: str | Path) -> Any:
    """The model in float32 with eager attention, as the graphs need it. Raises what `load_weights` does."""
    return load_weights(folder, dtype=torch.float32, attn_implementation="eager").eval()


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
        "vision": Graph(
            VisionGraph(model).eval(), {"pixel_values": pixels}, {"pixel_values": {0: Dim("images")}}, [*images]
        ),
        "score": Graph(
            ScoreGraph(model).eval(),
            packed | {"question_ends": torch.tensor([[4, 9, 9]] * 2)} | images,
            {name: {0: rows, 1: length} for name in packed}
            | {"question_ends": {0: rows, 1: Dim("questions")}}
            | image_shapes,
            ["p_yes", "logits"],
        ),
        "decode": Graph(
            DecodeGraph(model).eval(),
            {"input_ids": torch.full((2, 4), 7)} | cache | images,
            {"input_ids": {0: rows, 1: Dim("tokens", min=1)}}
            | {name: {1: rows, 3: Dim("past", min=0)} for name in cache}
            | image_shapes,
            ["p_yes", "log_probs", "keys", "values", "maps"],
        ),
    }


def save_onnx(graph: Graph, path: Path) -> None:
    """Write one ONNX file, with its weights inside."""
    with step(f"{path.name}: tracing the graph, and translating it to ONNX"):
        torch.onnx.export(
            graph.module,
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


def save_program(graph: Graph, path: Path) -> None:
    """Write one file for `torch.export.load`."""
    with step(f"{path.name}: tracing the graph"):
        shapes = graph.dynamic_shapes
        program = torch.export.export(graph.module, (), graph.inputs, dynamic_shapes=shapes, strict=False)
        torch.export.save(program, path)


def quantize(path: Path) -> None:
    """Write NAME_int8.onnx beside NAME.onnx: weights in int8, inputs of products quantized in each run."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantized = path.with_stem(f"{path.stem}_int8")
    with step(f"{quantized.name}: storing the weights of matrices in int8"):
        model = onnx.load(path)
        del model.graph.value_info[:]  # shapes from before the exporter's optimization; they no longer hold
        quantize_dynamic(
            model,
            quantized,
            op_types_to_quantize=["MatMul", "Gemm"],  # quantized convolutions are slower
            weight_type=QuantType.QInt8,
            reduce_range=True,  # 7 bits: without VNNI instructions, sums of products of 8 bits saturate
        )


def describe(model: Any, processor: Any) -> dict[str, Any]:
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
        "pad": text.pad_token_id,
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


def export(model_folder: Path, output_dir: Path, formats: Sequence[str]) -> list[Path]:
    """Write the graphs of a model with export.json and tokenizer.json to a new folder; returns its files.

    The folder appears when it is complete. Each step is printed.

    Raises:
        ValueError, OSError: int8 without onnx, the folder exists, or the model cannot be used.
        ModuleNotFoundError: a package is missing.
    """
    if "int8" in formats and "onnx" not in formats:
        raise ValueError("--format int8 is made from onnx: pass --format onnx int8")
    with new_folder(output_dir) as folder:
        model, processor = load(model_folder), load_processor(model_folder)
        (folder / "export.json").write_text(json.dumps(describe(model, processor), indent=1) + "\n")
        (folder / "tokenizer.json").write_text(processor.tokenizer.backend_tokenizer.to_str())
        for name, graph in make_graphs(model).items():
            if "torch" in formats:
                save_program(graph, folder / f"{name}.pt2")
            if "onnx" in formats:
                save_onnx(graph, folder / f"{name}.onnx")
            if "int8" in formats:
                quantize(folder / f"{name}.onnx")
    return sorted(output_dir.iterdir())

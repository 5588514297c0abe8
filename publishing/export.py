"""The model as three graphs without Python: for ONNX Runtime, or for torch.export.

    vision   pixel_values [I,3,H,W] → image_keys, image_values [N,I,K,P,D], for all N layers of the decoder
    score    packed questions [B,L], their ends [B,Q], keys and values of B images → P(yes) [B,Q], logits [B,Q,V]
    decode   tokens [B,T] after S cached ones, the cache [N,B,K,S,D], images → logits [B,V], the cache [N,B,K,S+T,D]

The first two answer yes/no questions. `decode` takes a prompt with an empty cache (S = 0), then token after token; all
rows of a prompt have the same length, so that no padding is needed. All dimensions but those of the model are dynamic.
"""

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.export import Dim

from ..generation_traffic_vlm import suppressed_tokens
from ..modeling_traffic_vlm import rotary_embedding
from ..scoring_traffic_vlm import KeyValues, height_and_width
from ..utils import load_weights


NAMES = ("vision", "score", "decode")
OPSET = 20


class Vision(nn.Module):
    """Pixels to the keys and values of every layer's cross-attention."""

    def __init__(self, model: Any):
        super().__init__()
        self.vision_tower, self.projector = model.model.vision_tower, model.model.projector
        self.layers = nn.ModuleList(layer.cross_attn for layer in model.model.text_model.layers)

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.projector(self.vision_tower(pixel_values).last_hidden_state)
        keys, values = zip(*(cast(Any, layer).project(tokens) for layer in self.layers))
        return torch.stack(keys), torch.stack(values)


class Decoder(nn.Module):
    """What the two decoders share: the layers, one after the other."""

    def __init__(self, model: Any):
        super().__init__()
        self.text_model, self.lm_head, self.config = model.model.text_model, model.lm_head, model.config

    def states(
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
        rotary = rotary_embedding(position_ids, text.head_dim, text.rope_parameters["rope_theta"], x.dtype)
        for layer, key, value in zip(self.text_model.layers, image_keys, image_values):
            x = layer(x, key, value, rotary, attention_mask=mask, past_key_values=cache)
        return self.text_model.norm(x)


class Score(Decoder):
    """P(yes) of packed questions, and the logits of the first word of each answer.

    An end of -1 stands for no question, and gives numbers without meaning.
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
        mask = (segment_ids[:, :, None] == segment_ids[:, None]).tril()[:, None]
        states = self.states(input_ids, position_ids, mask, image_keys, image_values)
        ends = question_ends.clamp(min=0)[..., None].expand(-1, -1, states.shape[-1])
        text = self.config.get_text_config()
        logits = self.lm_head(states.gather(1, ends))
        no_yes = logits[..., [text.no_token_id, text.yes_token_id]]
        return (no_yes / self.config.yes_no_temperature).softmax(-1)[..., 1], logits


class StepCache:
    """Keys and values before this step, and after it; what a decoder layer asks of a cache."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.before: KeyValues = (keys, values)
        self.after: list[KeyValues] = []

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.before
        self.after.append((torch.cat([keys[layer_idx], key], 2), torch.cat([values[layer_idx], value], 2)))
        return self.after[-1]


class Decode(Decoder):
    """Logits of the next token, and the cache with the tokens that were read. That of `[PAD]` means nothing."""

    def forward(
        self,
        input_ids: torch.Tensor,
        past_keys: torch.Tensor,
        past_values: torch.Tensor,
        image_keys: torch.Tensor,
        image_values: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        past, length = past_keys.shape[3], input_ids.shape[1]
        positions = past + torch.arange(length, device=input_ids.device)
        mask = (torch.arange(past + length, device=input_ids.device) <= positions[:, None])[None, None]
        cache = StepCache(past_keys, past_values)
        states = self.states(input_ids, positions[None], mask, image_keys, image_values, cache)
        keys, values = zip(*cache.after)
        # With its dimension of one token: as a product of two matrices (Gemm), which `quantise` turns around, the head
        # would turn the embedding around, too, whose weights it shares.
        return self.lm_head(states[:, -1:])[:, 0], torch.stack(keys), torch.stack(values)


def load(folder: str | Path) -> Any:
    """The model in float32, with attention written out, as graphs need it."""
    return load_weights(folder, dtype=torch.float32, attn_implementation="eager").eval()


def graphs(model: Any) -> dict[str, tuple[nn.Module, dict[str, torch.Tensor], dict[str, Any], list[str]]]:
    """For each graph its module, an example of its inputs, their dynamic dimensions, and the names of its outputs."""
    text, vision = model.config.get_text_config(), model.config.vision_config
    layers, heads, size = text.num_hidden_layers, text.num_key_value_heads, text.head_dim
    pixels = torch.zeros(2, 3, *height_and_width(vision.image_size))
    with torch.no_grad():
        keys, values = Vision(model)(pixels)
    ids = torch.full((2, 10), 7)
    places = torch.arange(5).repeat(2)[None].expand(2, -1)
    segments = torch.tensor([1, 2]).repeat_interleave(5)[None].expand(2, -1)
    rows, length, questions, images = Dim("rows"), Dim("length", min=2), Dim("questions"), Dim("images")
    past = torch.zeros(layers, 2, heads, 3, size)
    of_image = {name: {1: rows} for name in ("image_keys", "image_values")}
    seen = {"image_keys": keys, "image_values": values}
    packed = {"input_ids": ids, "position_ids": places.clone(), "segment_ids": segments.clone()}
    return {
        "vision": (Vision(model), {"pixel_values": pixels}, {"pixel_values": {0: images}}, [*seen]),
        "score": (
            Score(model),
            packed | {"question_ends": torch.tensor([[4, 9, 9]] * 2)} | seen,
            {name: {0: rows, 1: length} for name in packed} | {"question_ends": {0: rows, 1: questions}} | of_image,
            ["yes_probability", "logits"],
        ),
        "decode": (
            Decode(model),
            {"input_ids": ids[:, :4].clone(), "past_keys": past, "past_values": past.clone()} | seen,
            {"input_ids": {0: rows, 1: Dim("tokens", min=1)}}
            | {name: {1: rows, 3: Dim("past", min=0)} for name in ("past_keys", "past_values")}
            | of_image,
            ["logits", "keys", "values"],
        ),
    }


def export_torch(model: Any, folder: Path) -> None:
    """Write `vision.pt2`, `score.pt2` and `decode.pt2`, for `torch.export.load`."""
    for name, (module, inputs, dimensions, _) in graphs(model).items():
        program = torch.export.export(module, (), inputs, dynamic_shapes=dimensions, strict=False)
        torch.export.save(program, folder / f"{name}.pt2")


def export_onnx(model: Any, folder: Path) -> None:
    """Write `vision.onnx`, `score.onnx` and `decode.onnx`, each with its weights inside."""
    for name, (module, inputs, dimensions, outputs) in graphs(model).items():
        torch.onnx.export(
            module,
            (),
            folder / f"{name}.onnx",
            kwargs=inputs,
            input_names=[*inputs],
            output_names=outputs,
            dynamic_shapes=dimensions,
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def quantise(folder: Path) -> None:
    """Beside each ONNX file one with int8 weights, whose products quantise their inputs as they come (`_int8`)."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for name in NAMES:
        graph = onnx.load(folder / f"{name}.onnx")
        del graph.graph.value_info[:]  # shapes of before the exporter's optimisation, which no longer hold
        products = ["MatMul", "Gemm"]  # convolutions would be slower
        quantize_dynamic(
            graph, folder / f"{name}_int8.onnx", op_types_to_quantize=products, weight_type=QuantType.QInt8
        )


def describe(model: Any, processor: Any) -> dict[str, Any]:
    """What a program must know beside the graphs: sizes, tokens, and how pixels are made, as plain values."""
    text, images = model.config.get_text_config(), processor.image_processor
    return {
        "layers": text.num_hidden_layers,
        "key_value_heads": text.num_key_value_heads,
        "head_dim": text.head_dim,
        "max_tokens": text.max_position_embeddings,
        "start": text.bos_token_id,
        "end": text.eos_token_id,
        "never": suppressed_tokens(text),
        "image_size": list(height_and_width(model.config.vision_config.image_size)),
        "resample": int(images.resample),
        "rescale_factor": images.rescale_factor,
        "mean": list(images.image_mean),
        "std": list(images.image_std),
    }

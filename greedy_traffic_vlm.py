"""Greedy text recorded as two CUDA graphs: a prompt, and a step that appends one token. See `graphs_traffic_vlm.py`.

    columns of the cache:   [PAD] [PAD] prompt … │ answer …
                            0                    L          L + new_tokens

The state of the text stays in buffers that each step changes, so steps follow one another without waiting.
"""

from typing import Any

import torch

from .checks_traffic_vlm import check_token_ids, count_positions, on_cpu, packed_mask
from .graphs_traffic_vlm import Graphs, Tensors, bucket, pad


CHECKED_STEPS = 16  # each time after so many tokens the CPU waits for the GPU, to read whether all texts have ended
# Arguments of generate() that recorded passes can follow; with any other, the library generates the text.
ARGUMENTS = {"input_ids", "attention_mask", "encoded_images", "image_index"}
OPTIONS = {"do_sample", "num_beams", "use_cache", "max_new_tokens", "min_new_tokens"}
# What the model's generation configuration may set.
FIELDS = OPTIONS | {"bos_token_id", "eos_token_id", "pad_token_id", "max_length", "transformers_version"}
FIELDS |= {"_from_model_config"}


class BufferCache:
    """Keys and values [B,K,S,D] of each layer in fixed buffers, written at the columns [L] of the new tokens."""

    encoder_attention_mask = None

    def __init__(self, image_key_values: Any):
        self.image_key_values = image_key_values
        self.layers: dict[int, Tensors] = {}
        self.columns: Any = None

    def get_seq_length(self) -> int:
        return 0  # unused: positions and masks are given

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> Tensors:
        for buffer, new in zip(self.layers[layer_idx], (key, value)):
            if new.numel():  # values of latent attention have width 0
                buffer.index_copy_(2, self.columns, new)
        return self.layers[layer_idx]


class GreedyText:
    """Recorded passes for up to `new_tokens` tokens after B prompts of up to `length` tokens, padded on the left.

    `images` are keys and values of images, of which only shapes and dtypes are used here.
    """

    def __init__(self, graphs: Graphs, rows: int, length: int, new_tokens: int, eos: tuple[int, ...], images: Tensors):
        self.model, self.length, self.new_tokens = graphs.model, length, new_tokens
        config, device = self.model.get_decoder().config, self.model.device
        columns = torch.arange(length + new_tokens, device=device)
        self.columns, self.pad_token_id = columns, config.pad_token_id or 0
        self.visible = torch.ones(rows, 1, 1, len(columns), dtype=torch.bool, device=device)  # False at padding
        self.token, self.position = (torch.zeros(rows, 1, dtype=torch.long, device=device) for _ in range(2))
        self.count, self.minimum = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(rows, new_tokens, dtype=torch.long, device=device)
        vocabulary = torch.arange(config.vocab_size, device=device)
        self.is_eos = torch.isin(vocabulary, torch.tensor(eos, device=device))
        self.suppressed = torch.isin(vocabulary, torch.tensor(list(config.suppressed_tokens), device=device))
        buffers = [torch.zeros_like(one) for one in images]
        self.cache = BufferCache(tuple(zip(*buffers)))
        heads, *widths = config.cache_shape
        for layer in range(config.num_hidden_layers):
            shapes = [(rows, heads, len(columns), width) for width in widths]
            self.cache.layers[layer] = [torch.zeros(s, dtype=self.model.dtype, device=device) for s in shapes]
        text = torch.zeros(rows, 3 * length + 1, dtype=torch.long, device=device)
        self.read = graphs.record(self.read_prompt, [text, *buffers])
        self.step = graphs.record(self.add_token, [])

    def decode(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> None:
        """Append the likeliest token after tokens [B,L] that read the columns of mask, bool [B,1,L,S]."""
        text = {"attention_mask": mask, "position_ids": positions, "past_key_values": self.cache, "use_cache": True}
        states = self.model.get_decoder()(ids, **text, return_dict=True).last_hidden_state[:, -1]
        logits = self.model.compute_logits(states).float()
        hidden = self.suppressed | (self.is_eos & (self.count < self.minimum))
        token = logits.masked_fill(hidden, float("-inf")).argmax(-1).masked_fill(self.ended, self.pad_token_id)
        self.ended |= self.is_eos[token]
        self.token.copy_(token[:, None])
        self.tokens.index_copy_(1, self.count, self.token)
        self.count += 1

    def read_prompt(self, text: torch.Tensor, *images: torch.Tensor) -> Tensors:
        """Start a text about images, whose buffers are those of the cache.

        text: [B,3L+1], ids, positions, 1 at visible tokens, and the least number of new tokens.
        """
        ids, positions, visible, minimum = text.split([self.length] * 3 + [1], dim=1)
        self.minimum.copy_(minimum[0])
        self.position.copy_(positions[:, -1:])
        self.visible[..., : self.length] = visible[:, None, None] > 0
        self.ended.zero_()
        self.count.zero_()
        self.tokens.fill_(self.pad_token_id)
        self.cache.columns = self.columns[: self.length]
        self.decode(ids, positions, packed_mask(visible, None, len(self.columns)))
        return []

    def add_token(self) -> Tensors:
        column = self.length - 1 + self.count  # [1], of the last token
        self.cache.columns = column
        self.decode(self.token, self.position + self.count, self.visible & (self.columns <= column))
        return []

    def generate(self, new_tokens: int, *inputs: torch.Tensor) -> torch.Tensor:
        """New tokens [B,new_tokens] on the CPU, with padding after the end.

        Raises:
            ValueError: more new tokens than the cache has columns for, which a GPU would write elsewhere.
        """
        if new_tokens > self.new_tokens:
            raise ValueError(f"This text has room for {self.new_tokens} new tokens, got {new_tokens}.")
        self.read(*inputs)
        for step in range(1, new_tokens):
            if step % CHECKED_STEPS == 0 and bool(self.ended.all()):
                break
            self.step()
        return self.tokens[:, :new_tokens].cpu()


def recorded_text(
    model: Any, input_ids: torch.Tensor | None, generation_config: Any, arguments: dict[str, Any]
) -> torch.Tensor | None:
    """Prompts and greedy answers [B,L+N], as `model.generate` returns them, of prompts padded on the left.

    None if only the library can generate them.
    """
    graphs, config = model.graphs, model.get_decoder().config
    settings = greedy_settings(model, generation_config, arguments)
    images = arguments.get("encoded_images")
    if settings is None or images is None or input_ids is None:
        return None
    new_tokens = settings["max_new_tokens"]
    ids, mask, index = on_cpu(input_ids, arguments.get("attention_mask"), arguments.get("image_index"))
    check_token_ids(ids, config.vocab_size)
    if mask is None:
        mask = torch.ones_like(ids) if config.pad_token_id is None else ids.ne(config.pad_token_id)
    positions = count_positions(ids, mask, 0)
    if int(positions.max()) + 1 + new_tokens > config.max_position_embeddings:
        return None
    with graphs.lock:
        if not graphs.is_usable() or (stacked := graphs.stack_images(images, index)) is None:
            return None
        eos = settings["eos_token_id"]
        eos = tuple(eos) if isinstance(eos, list) else (eos,)
        rows, length = len(ids), bucket(ids.shape[1], 16)
        size = rows, length, bucket(new_tokens, 16), eos
        found = graphs.find("text", *size, build=lambda: GreedyText(graphs, *size, stacked))
        if found is None:
            return None
        text = [pad(one, rows, length, left=True) for one in (ids, positions, mask)]
        text.append(torch.full((rows, 1), settings["min_new_tokens"]))
        tokens = found.generate(new_tokens, torch.cat(text, dim=1), *stacked)
        if graphs.has_changed():
            return None
    ends = torch.isin(tokens, torch.tensor(eos)).long()
    used = int(torch.where(ends.any(1), ends.argmax(1) + 1, new_tokens).max())  # up to the longest answer
    return torch.cat([ids, tokens[:, :used].to(ids.dtype)], dim=1).to(input_ids.device)


def greedy_settings(model: Any, generation_config: Any, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of `generate()`; None if they ask for anything but a plain greedy text."""
    own = {name: value for name, value in model.generation_config.to_diff_dict().items() if value}
    given = {name: value for name, value in arguments.items() if name not in ARGUMENTS and value is not None}
    if generation_config is not None or not (own.keys() <= FIELDS and given.keys() <= OPTIONS):
        return None
    settings = {"use_cache": True, "num_beams": 1, "min_new_tokens": 0} | own | given
    is_greedy = not settings.get("do_sample") and settings["num_beams"] == 1 and settings["use_cache"]
    is_complete = settings.get("max_new_tokens", 0) > 0 and "eos_token_id" in settings
    return settings if is_greedy and is_complete else None

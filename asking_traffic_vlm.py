"""Look once, ask many: images encoded once, yes/no questions scored in packed rows, attention maps of words.

A question is answered at its last token: P(yes) = softmax([l_no, l_yes] / temperature)[1], from the logits of `[NO]`
and `[YES]` there. Logits are computed at those tokens only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Any

import torch
from transformers import Cache
from transformers.utils import is_torchdynamo_compiling

from .generation_traffic_vlm import holds_image


KeyValues = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer, each [B,K,P,D]

# Packed rows are scored in chunks of at most this many tokens: attention's L² then stays small beside the rest, and
# time and memory grow with the number of questions in a straight line.
MAX_CHUNK_TOKENS = 512


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """What is computed once per image: projected cross-attention keys and values. Made by `model.encode_images`.

    Not a tensor on purpose: `generate()` repeats every tensor argument for beams; images must stay as they are
    beside an `image_index` that is repeated.

    Attributes:
        key_values: for each decoder layer the keys and values of I images, each [I,K,P,D].
        attention_mask: [I,P], 1 for image tokens to read and 0 for hidden ones, or None for all.
        pixel_values: [I,3,H,W] as given; an assistant model looks at them with its own vision tower.
        fingerprint: a few of the weights that made the keys and values, to refuse those of another model; None where
            weights are loaded layer by layer (offloading), so that none can be read.
    """

    key_values: tuple[KeyValues, ...]
    fingerprint: torch.Tensor | None
    attention_mask: torch.Tensor | None = None
    pixel_values: torch.Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return self.key_values[0][0].shape[0]

    def __deepcopy__(self, memo: dict) -> "EncodedImages":
        return self  # never written to, so that copies (assisted decoding makes them) can share it

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "EncodedImages":
        optional = (self.attention_mask, self.pixel_values)
        mask, pixels = (None if tensor is None else function(tensor) for tensor in optional)
        key_values = tuple((function(key), function(value)) for key, value in self.key_values)
        return replace(self, key_values=key_values, attention_mask=mask, pixel_values=pixels)

    def to(self, device: torch.device | str) -> "EncodedImages":
        """The same images on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def __getitem__(self, index: int | slice | list[int] | torch.Tensor) -> "EncodedImages":
        """Some of the images, in the order of `index`: an image number, a slice, a list or a tensor of numbers."""
        index = slice(index, index + 1 or None) if isinstance(index, int) else index
        return self._map(lambda tensor: tensor[index])

    @property
    def device(self) -> torch.device:
        return self.key_values[0][0].device

    def rows(self, image_index: torch.Tensor | None, batch_size: int) -> "EncodedImages":
        """The image of each of `batch_size` rows of text: as they are, or those that `image_index` names."""
        self.check_index(image_index, batch_size)
        return self if image_index is None else replace(self, pixel_values=None)[image_index]

    def check_index(self, image_index: torch.Tensor | None, batch_size: int) -> None:
        """Raise `ValueError` unless `image_index` [batch_size] names an image for each row, or is None for I = B."""
        if image_index is None:
            if len(self) != batch_size:
                raise ValueError(f"{batch_size} rows of text for {len(self)} images: image_index must pair them up.")
        elif image_index.shape != (batch_size,):
            raise ValueError(f"image_index must be [{batch_size}], one number a row, got {list(image_index.shape)}.")
        elif not is_torchdynamo_compiling():
            low, high = (int(value) for value in image_index.aminmax())
            if low < 0 or high >= len(self):
                raise ValueError(f"image_index must lie in [0, {len(self)}), got {low if low < 0 else high}.")


class ImageEncoder:
    """How the model without a head makes `EncodedImages`, and refuses those that are not its own."""

    device: Any
    projector: Any
    text_model: Any
    get_image_features: Callable[[torch.Tensor], torch.Tensor]

    def encode(self, pixel_values: torch.Tensor, attention_mask: torch.Tensor | None = None) -> EncodedImages:
        """Run the vision tower and project keys and values for every decoder layer, with gradients where enabled."""
        key_values = self.text_model.project_image_tokens(self.get_image_features(pixel_values))
        return EncodedImages(key_values, self._fingerprint(), attention_mask, pixel_values)

    def _fingerprint(self) -> torch.Tensor | None:
        weights = [self.projector.weight, *(layer.cross_attn.k_proj.weight for layer in self.text_model.layers)]
        if any(weight.is_meta for weight in weights):
            return None
        return torch.stack([weight.detach().flatten()[0].to(weights[0].device) for weight in weights])

    def choose_images(
        self,
        pixel_values: torch.Tensor | None,
        encoded_images: EncodedImages | None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> EncodedImages | None:
        """The images to read: pixels encoded now, or encoded before and checked; None if the cache holds them."""
        if pixel_values is not None and encoded_images is not None:
            raise ValueError("Give pixel_values or encoded_images, not both: one of them would go unseen.")
        if holds_image(past_key_values):
            return None
        if encoded_images is None:
            return None if pixel_values is None else self.encode(pixel_values, encoder_attention_mask)
        if not hasattr(encoded_images, "key_values"):
            raise TypeError(f"encoded_images must come from encode_images(), got {type(encoded_images).__name__}.")
        if not is_torchdynamo_compiling():
            ours, theirs = self._fingerprint(), encoded_images.fingerprint
            if ours is not None and theirs is not None and not torch.equal(ours, theirs.to(ours)):
                raise ValueError("encoded_images come from another model, or from weights that have changed since.")
        if encoder_attention_mask is not None:
            encoded_images = replace(encoded_images, attention_mask=encoder_attention_mask)
        return encoded_images


class ImageReader:
    """What the full models share, whatever their head."""

    config: Any
    device: Any
    model: Any
    get_decoder: Callable[[], Any]

    @torch.no_grad()
    def encode_images(
        self, pixel_values: torch.Tensor, encoder_attention_mask: torch.Tensor | None = None
    ) -> EncodedImages:
        """Look at images [I,3,224,224] once; pass the result as `encoded_images=` in place of pixels, many times.

        encoder_attention_mask [I,P] hides image tokens where it is 0. No gradients are kept.
        """
        return self.model.encode(pixel_values, encoder_attention_mask)

    def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Projected image tokens [I,P,C] of pixels [I,3,224,224]."""
        return self.model.get_image_features(pixel_values)

    def padding_mask(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The attention mask that the `[PAD]` tokens of input_ids [B,L] tell."""
        return input_ids.ne(self.config.get_text_config().pad_token_id).long()

    def question_states(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        question_ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """States [N,C] at the last real token of each of N questions; those of packed rows one after the other."""
        if question_ends is not None:
            rows, numbers = (question_ends >= 0).nonzero(as_tuple=True)
            return hidden_states[rows, question_ends[rows, numbers]]
        length = hidden_states.shape[1]
        if attention_mask is None:
            return hidden_states[:, -1]
        last = (attention_mask[:, -length:] * torch.arange(1, length + 1, device=attention_mask.device)).argmax(-1)
        return hidden_states[torch.arange(len(last), device=last.device), last]

    @torch.no_grad()
    def attention_maps(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        layers: list[int] | None = None,
        heads: list[int] | None = None,
        **inputs: Any,
    ) -> torch.Tensor:
        """Where each word looks: cross-attention averaged over layers and heads (all by default).

        Works with every attention implementation: the weights are computed here, beside the model's own attention.

        Args:
            input_ids, pixel_values, attention_mask, **inputs: what the processor gives, packed or not; or
                `encoded_images` in place of pixels.
            layers, heads: numbers of the layers and query heads to average over.

        Returns:
            [B,L,h,w] in float32, [14,14] cells for each token; a map sums to 1, that of padding is 0.

        Raises:
            ValueError: no image, or a layer or head that does not exist.
        """
        encoded_images = self.model.choose_images(
            pixel_values, inputs.pop("encoded_images", None), inputs.pop("encoder_attention_mask", None)
        )
        if encoded_images is None:
            raise ValueError("attention_maps shows where words look in an image: give pixel_values or encoded_images.")
        text_config = self.config.get_text_config()
        layers = _check_numbers("layers", layers, text_config.num_hidden_layers)
        heads = _check_numbers("heads", heads, text_config.num_attention_heads)
        attention_mask = self.padding_mask(input_ids) if attention_mask is None else attention_mask
        hidden_cells, image_index = encoded_images.attention_mask, inputs.get("image_index")
        if hidden_cells is not None and image_index is not None:
            hidden_cells = hidden_cells[image_index]
        maps: list[torch.Tensor] = []

        def record(module: Any, args: tuple[torch.Tensor, ...], output: Any) -> None:
            hidden_states, key = args[:2]
            query = module.split_heads(module.q_proj(hidden_states))[:, heads]
            key = key.repeat_interleave(module.num_key_value_groups, dim=1)[:, heads]
            scores = (query @ key.transpose(2, 3)).float() * module.scaling  # [B,H,L,P]
            if hidden_cells is not None:
                scores = scores.masked_fill(hidden_cells[:, None, None] == 0, float("-inf"))
            maps.append(scores.softmax(-1).mean(1))

        decoder_layers = self.get_decoder().layers
        handles = [decoder_layers[i].cross_attn.register_forward_hook(record) for i in layers]
        try:
            inputs = {key: value for key, value in inputs.items() if key not in ("question_ends", "labels")}
            self.model(input_ids, None, attention_mask, encoded_images=encoded_images, use_cache=False, **inputs)
        finally:
            for handle in handles:
                handle.remove()
        weights = torch.stack(maps).mean(0) * attention_mask[..., None]  # [B,L,P]
        side = isqrt(weights.shape[-1])  # a tower's class token, if it has one, comes before the grid
        return weights[..., -side * side :].unflatten(-1, (side, side))


class YesNoScorer(ImageReader):
    """P(yes) of many questions in one pass of the decoder."""

    compute_logits: Callable[[torch.Tensor], torch.Tensor]

    def yes_probability(self, logits: torch.Tensor) -> torch.Tensor:
        """P(yes) [...] in float32 of logits [...,V] at the last token of a question, with the config's temperature."""
        text_config = self.config.get_text_config()
        no_yes = logits[..., [text_config.no_token_id, text_config.yes_token_id]].float()
        return (no_yes / self.config.yes_no_temperature).softmax(-1)[..., 1]

    @torch.no_grad()
    def score_yes_no(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        segment_ids: torch.Tensor | None = None,
        question_ends: torch.Tensor | None = None,
        encoded_images: EncodedImages | None = None,
        image_index: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """P(yes) of every question: for each image a float32 tensor, in the order in which its questions were given.

        Takes what the processor gives, packed (rows are images) or not (rows are questions, `image_index` says about
        which image), with `encoded_images` in place of pixels if they are at hand. Labels are ignored.

        Raises:
            ValueError: no image; images that do not fit the rows; packed rows without `question_ends`, `position_ids`.
        """
        encoded_images = self.model.choose_images(pixel_values, encoded_images, encoder_attention_mask)
        if encoded_images is None:
            raise ValueError("score_yes_no asks about images: give pixel_values or encoded_images.")
        encoded_images.check_index(image_index, len(input_ids))
        if image_index is None:
            image_index = torch.arange(len(input_ids), device=input_ids.device)
        attention_mask = self.padding_mask(input_ids) if attention_mask is None else attention_mask
        if segment_ids is None:
            text = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
            probabilities = self._score(encoded_images, image_index, None, **text)
            return [probabilities[image_index == image] for image in range(len(encoded_images))]
        if question_ends is None or position_ids is None:
            raise ValueError("Packed rows (segment_ids) need question_ends and position_ids from the processor.")
        packed = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        packed |= {"segment_ids": segment_ids, "question_ends": question_ends}
        scores: list[list[torch.Tensor]] = [[] for _ in range(len(encoded_images))]
        for rows, chunk in split_packed_rows(packed):
            ends = chunk.pop("question_ends")
            probabilities = self._score(encoded_images, image_index[rows], ends, **chunk)
            counts = (ends >= 0).sum(-1).tolist()
            for image, row_scores in zip(image_index[rows].tolist(), probabilities.split(counts)):
                scores[image].append(row_scores)
        empty = torch.zeros(0, device=self.device)
        return [torch.cat(row_scores) if row_scores else empty for row_scores in scores]

    def _score(
        self,
        encoded_images: EncodedImages,
        image_index: torch.Tensor,
        question_ends: torch.Tensor | None,
        **text: torch.Tensor | None,
    ) -> torch.Tensor:
        in_order = len(image_index) == len(encoded_images) and bool((image_index.diff() == 1).all())
        images = {"encoded_images": encoded_images, "image_index": None if in_order else image_index}
        hidden_states = self.model(**images, **text, use_cache=False, return_dict=True).last_hidden_state
        states = self.question_states(hidden_states, text["attention_mask"], question_ends)
        return self.yes_probability(self.compute_logits(states))


def split_packed_rows(
    packed: dict[str, torch.Tensor], max_tokens: int = MAX_CHUNK_TOKENS
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Cut packed rows between questions into rows of at most `max_tokens` (one question at least).

    Args:
        packed: input_ids, attention_mask, position_ids, segment_ids [I,L] and question_ends [I,Q], -1 for none.

    Yields:
        the numbers of the rows that a chunk is cut from, and the chunk, in the form of `packed`.
    """
    segment_ids, ends = packed["segment_ids"], packed["question_ends"]
    if segment_ids.shape[1] <= max_tokens:
        yield torch.arange(len(segment_ids), device=ends.device), packed
        return
    spans = [list(_question_spans(*row, max_tokens)) for row in zip(segment_ids.tolist(), ends.tolist())]
    for number in range(max(len(row_spans) for row_spans in spans)):
        rows = torch.tensor([row for row, cut in enumerate(spans) if number < len(cut)], device=ends.device)
        cuts = torch.tensor([spans[row][number] for row in rows.tolist()], device=ends.device)  # [R,4]
        start, stop, first, last = cuts.T[..., None]
        columns = start + torch.arange(int((stop - start).max()), device=ends.device)
        inside = columns < stop
        columns = columns.clamp(max=segment_ids.shape[1] - 1)
        chunk = {
            name: packed[name][rows[:, None], columns] * inside
            for name in ("input_ids", "attention_mask", "position_ids", "segment_ids")
        }
        questions = first + torch.arange(int((last - first).max()), device=ends.device)
        chosen = ends[rows[:, None], questions.clamp(max=ends.shape[1] - 1)] - start
        chunk["question_ends"] = chosen.masked_fill(questions >= last, -1)
        yield rows, chunk


def _question_spans(segments: list[int], ends: list[int], max_tokens: int) -> Iterator[tuple[int, int, int, int]]:
    """The chunks of one packed row: first column, column after the last, first question, question after the last."""
    questions = sum(end >= 0 for end in ends)
    starts = [segments.index(number + 1) for number in range(questions)]
    stops = [len(segments) - segments[::-1].index(number + 1) for number in range(questions)]
    first = 0
    for question in range(1, questions + 1):
        if question == questions or stops[question] - starts[first] > max_tokens:
            yield starts[first], stops[question - 1], first, question
            first = question


def _check_numbers(name: str, numbers: list[int] | None, count: int) -> list[int]:
    if numbers is None:
        return list(range(count))
    if not numbers or any(not 0 <= number < count for number in numbers):
        raise ValueError(f"{name} must be numbers in [0, {count}), at least one; got {numbers}.")
    return list(numbers)

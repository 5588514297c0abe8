"""P(yes) of many questions in one pass, and attention maps: methods of a full model.

P(yes) = softmax([l_no, l_yes] / temperature)[1], where l_no and l_yes are the logits of `[NO]` and `[YES]` at the last
token of a question. Logits are computed at these tokens only.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .cache_traffic_vlm import EncodedImages
from .checks_traffic_vlm import check_image_index, check_prompt_ends, check_text, count_positions, padding_mask
from .configuration_traffic_vlm import height_and_width, token_grid


def question_states(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, question_ends: torch.Tensor | None = None
) -> torch.Tensor:
    """States [N,C] at the last token of each of N questions, row after row.

    Args:
        attention_mask: [B,L], 0 at padding.
        question_ends: [B,Q], the last token of each question of packed rows, -1 if a row has fewer. Without it, a row
            is one question.
    """
    if question_ends is not None:
        rows, questions = (question_ends >= 0).nonzero(as_tuple=True)
        return hidden_states[rows, question_ends[rows, questions]]
    if attention_mask is None:
        return hidden_states[:, -1]
    columns = torch.arange(1, hidden_states.shape[1] + 1, device=attention_mask.device)
    last = (attention_mask * columns).argmax(-1)  # the last visible column of each row
    return hidden_states[torch.arange(last.shape[0], device=last.device), last]


class TrafficVLMScoringMixin:
    """P(yes) of many questions, for a full model with the language-model head."""

    @torch.no_grad()
    def question_logits(
        self: Any,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        segment_ids: torch.Tensor | None = None,
        question_ends: torch.Tensor | None = None,
        encoded_images: EncodedImages | None = None,
        image_index: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[int]]:
        """Logits [Q,V] of the first token of every answer, and the number of questions about each image.

        Takes the output of the processor, packed (several questions per row) or not, with pixels or `encoded_images`.
        Questions are in the given order, those about the first image first.

        Args:
            question_ends: [B,Q], the last token of each question, as the processor returns them; they are not checked.
            image_index: [B], index of the image of each row; not needed if row i is about image i.

        Raises:
            ValueError: no image; a number of images that does not match the rows; packed rows without `question_ends`
                or `position_ids`; a question that ends in `[EOS]`.
        """
        images = self.model.choose_images(pixel_values, encoded_images, encoder_attention_mask)
        if images is None:
            raise ValueError("Questions need pixel_values or encoded_images.")
        # Text is read on the CPU, which need not wait for a GPU that encodes the images meanwhile.
        optional = (attention_mask, position_ids, segment_ids, question_ends, image_index)
        attention_mask, position_ids, segment_ids, question_ends, image_index = (
            None if tensor is None else tensor.cpu() for tensor in optional
        )
        input_ids = input_ids.cpu()
        config = self.config.get_text_config()
        if attention_mask is None:
            attention_mask = padding_mask(input_ids, config.pad_token_id)
        if segment_ids is not None and question_ends is None:
            raise ValueError("Packed rows (segment_ids) need question_ends from the processor.")
        check_text(config, input_ids, None, attention_mask, position_ids, segment_ids)
        check_image_index(image_index, len(input_ids), len(images))
        if position_ids is None:
            position_ids = count_positions(input_ids, attention_mask, 0)
        image_of_row = torch.arange(len(images)) if image_index is None else image_index
        text: Any = {"attention_mask": attention_mask, "position_ids": position_ids, "segment_ids": segment_ids}
        logits, graphs = None, getattr(self.model.fast, "graphs", None)
        if graphs is not None and graphs.is_usable():
            logits = graphs.answer(images, image_of_row, input_ids, question_ends, **text)
        if logits is None:
            decoder, device = self.model.text_model, images.device
            moved = {name: None if tensor is None else tensor.to(device) for name, tensor in text.items()}
            embeddings = decoder.embed_tokens(input_ids.to(device))
            states = decoder.decode(embeddings, **moved, images=images.rows(image_index))
            logits = self.compute_logits(question_states(states, attention_mask, question_ends))
        check_prompt_ends(question_states(input_ids, attention_mask, question_ends), config.eos_token_id)
        image_of_question = image_of_row
        if question_ends is not None:
            image_of_question = image_of_row.repeat_interleave((question_ends >= 0).sum(-1))
        if bool((image_of_question.diff() < 0).any()):  # rows are not in the order of their images
            logits = logits[image_of_question.argsort(stable=True)]
        return logits, torch.bincount(image_of_question, minlength=len(images)).tolist()

    def yes_probability(self: Any, logits: torch.Tensor, image_size: tuple[int, int] | None = None) -> torch.Tensor:
        """P(yes) = softmax([l_no, l_yes] / temperature)[1] [...] in float32, of logits [...,V] of questions.

        The temperature is that of images of (height, width) `image_size`, by default the model's.
        """
        text_config = self.config.get_text_config()
        margin = logits[..., text_config.yes_token_id].float() - logits[..., text_config.no_token_id].float()
        return (margin / self.config.temperature_at(image_size)).sigmoid()

    @torch.no_grad()
    def score_yes_no(
        self: Any,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        *,
        encoded_images: EncodedImages | None = None,
        **inputs: Any,
    ) -> list[torch.Tensor]:
        """P(yes) of every question: one float32 tensor [Q] per image, its Q questions in the given order.

        Arguments and errors are those of `question_logits`.
        """
        images = self.model.choose_images(pixel_values, encoded_images, None)
        logits, counts = self.question_logits(input_ids, encoded_images=images, **inputs)
        return list(self.yes_probability(logits, images.image_size).split(counts))


@contextmanager
def reading_cross_attention(decoder: Any) -> Iterator[list[tuple[Any, torch.Tensor, torch.Tensor]]]:
    """Inputs of the cross-attention of each layer, in passes of this thread: (module, states [B,L,C], image keys).

    `module.attention_weights(states, keys)` are the weights, with every implementation of attention. They are computed
    after the pass; within it, gradient checkpointing would compute them twice.
    """
    inputs: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    caller = threading.get_ident()

    def record(module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() == caller:  # hooks also run in forward passes of other threads
            inputs.append((module, args[0], kwargs["key"]))

    handles = [layer.cross_attn.register_forward_hook(record, with_kwargs=True) for layer in decoder.layers]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def attention_maps(
    model: Any,
    input_ids: torch.Tensor,
    pixel_values: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    *,
    encoded_images: EncodedImages | None = None,
    image_index: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    question_ends: torch.Tensor | None = None,  # returned by the processor, and not read
    **text: Any,
) -> torch.Tensor:
    """Cross-attention maps [B,L,h,w] in float32, of the image tokens, for each token of text; 0 at padding.

    They are means over all layers and heads. A map sums to 1, or to less if the vision tower has tokens of objects or
    a class token, which are left out.

    Args:
        input_ids ... encoder_attention_mask, text: as of `question_logits`.

    Raises:
        ValueError: no image.
    """
    images = model.model.choose_images(pixel_values, encoded_images, encoder_attention_mask)
    if images is None:
        raise ValueError("attention_maps needs pixel_values or encoded_images.")
    if attention_mask is None:
        attention_mask = padding_mask(input_ids, model.config.get_text_config().pad_token_id)
    check_image_index(image_index, len(input_ids), len(images))
    images, decoder = images.rows(image_index), model.get_decoder()
    with reading_cross_attention(decoder) as read:
        decoder(input_ids, attention_mask, **text, encoded_images=images, use_cache=False)
    maps = [module.attention_weights(states, key, images.attention_mask).mean(1) for module, states, key in read]
    weights = torch.stack(maps).mean(0)  # [B,L,P]
    if attention_mask is not None:
        weights = weights * attention_mask[..., None]
    vision, size = model.config.vision_config, images.image_size
    rows, columns = token_grid(vision, *(height_and_width(vision.image_size) if size is None else size))
    return weights[..., -rows * columns :].unflatten(-1, (rows, columns))  # drops a leading class token

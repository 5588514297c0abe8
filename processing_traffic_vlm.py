"""The processor of Traffic VLM: turns images and questions into the tensors that the model reads.

What is special here:
- A prompt is ``[SOS] words ?`` without ``[EOS]``. Closing punctuation is replaced by one ``?``, so that "Is there a
  car", "Is there a car?" and "Is there a car ?" are the same prompt, and every answer follows the same token.
- One image can have many questions. A row of ``input_ids`` is one question, and ``image_index`` is the index of its
  image; with ``packed=True`` a row holds several questions about one image, one after the other.
- Images of any kind become RGB: rotated upright, on white where transparent, 16-bit gray scaled by its own range.
- Nothing is dropped silently: unknown words, misspelled options and questions that are too long are reported.
"""

import math
import sys
import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature
from transformers.image_processing_utils import get_size_dict
from transformers.processing_utils import ImagesKwargs, ProcessingKwargs, ProcessorMixin, TextKwargs
from transformers.utils import logging

from .images_traffic_vlm import Region, to_rgb
from .pipeline_traffic_vlm import TrafficVLMPipeline
from .question_traffic_vlm import Prompt, Rules, has_word, is_content_word, question_words
from .tokenization_traffic_vlm import TrafficVLMTokenizer, words_at


CHAT_TEMPLATE = """\
{#- The prompt is the text of the last user message; images are passed separately. -#}
{%- set found = namespace(content="", words=[]) -%}
{%- for message in messages if message.role == "user" -%}
    {%- set found.content = message.content -%}
{%- endfor -%}
{%- set blocks = [{"type": "text", "text": found.content}] if found.content is string else found.content or [] -%}
{%- for block in blocks if block.type == "text" -%}
    {%- set found.words = found.words + block.text.split() -%}
{%- endfor -%}
{{- bos_token ~ " " ~ (found.words | join(" ")).rstrip(" .?!…。？！") ~ " ?" -}}
"""

logger = logging.get_logger(__name__)

MAX_WIDTH = 1_000_000  # tokens of a padded row; a wider row is a mistake and would exhaust the memory
ROW_TOKENS = 512  # of a packed row. Attention costs L²; with a limit, the cost grows linearly with the questions
IGNORED_LABEL = -100  # ignored by torch.nn.functional.cross_entropy
TAUGHT_ON = ("photographs", "rendered")
TEXT_OPTIONS = frozenset(
    "padding padding_side truncation max_length pad_to_multiple_of return_attention_mask add_special_tokens "
    "sanitize_control_tokens verbose".split()
)

Segment = tuple[list[int], list[int]]  # the ids of one prompt and of its answer (empty without answers)


def _size(segment: Segment) -> int:
    return len(segment[0]) + len(segment[1])


def _image_list(images: Any) -> list[Any]:
    """Images as a list, from one image, a list, a batch [I,...] or, from chat templates, nested lists of one image."""
    if isinstance(images, np.ndarray | torch.Tensor) and images.ndim == 4:
        images = list(images)
    if not isinstance(images, list | tuple):
        return [images]
    if not images:
        raise ValueError("`images` is an empty list; expected at least one image, or None for text only")
    rows = [image if isinstance(image, list | tuple) else [image] for image in images]
    for number, row in enumerate(rows):
        if len(row) != 1:
            raise ValueError(
                f"row {number} of `images` holds {len(row)} images; a question is about exactly one image"
            )
    return [image for [image] in rows]


def _nesting(value: Any) -> str:
    """How strings are nested, for error messages: "one string", "a nested list" or "a flat list"."""
    nested = isinstance(value, list | tuple) and any(isinstance(row, list | tuple) for row in value)
    return "one string" if isinstance(value, str) else "a nested list" if nested else "a flat list"


def _rows(value: Any, name: str) -> list[list[str]]:
    """``text`` or ``suffix``, which errors call `name`, as one list of strings per image."""
    if isinstance(value, str):
        return [[value]]
    if not isinstance(value, list | tuple):
        raise TypeError(
            f"`{name}` must be a string, a list or a nested list of strings, got {type(value).__name__}: {value!r:.80}"
        )
    rows = [list(row) if isinstance(row, list | tuple) else [row] for row in value]
    if _nesting(value) == "a nested list" and (flat := [row for row in value if not isinstance(row, list | tuple)]):
        raise TypeError(f"`{name}` mixes lists with {flat[0]!r:.80}; expected only strings or only lists")
    if not rows or not all(rows):
        raise ValueError(f"`{name}` has an empty list: {value!r:.80}; expected at least one string per image")
    for item in (item for row in rows for item in row):
        if not isinstance(item, str):
            raise TypeError(f"`{name}` holds {type(item).__name__} {item!r:.80}; expected a string")
    return rows


def _list_words(words: list[str]) -> str:
    """The first ten words for a message, and how many there are beside them."""
    more = f" and {len(words) - 10:,} more" if len(words) > 10 else ""
    return ", ".join(f"{word!r:.40}" for word in words[:10]) + more


def _check_image_count(text: Any, rows: list[list[str]], images: list[Any]) -> None:
    """Raise `ValueError` unless there is one list of questions per image."""
    if len(rows) == len(images):
        return
    hint = ""
    if len(images) == 1 and _nesting(text) == "a flat list":
        hint = "; to ask one image several questions, nest them: text=[[question, question, ...]]"
    unit = "lists of questions" if _nesting(text) == "a nested list" else "questions"
    more = "more" if len(rows) > len(images) else "fewer"
    raise ValueError(f"{more} {unit} than images: {len(rows)} in `text` for {len(images)} in `images`{hint}")


def _check_shape(text: Any, rows: list[list[str]], suffix: Any, answers: list[list[str]]) -> None:
    """Raise `ValueError` unless there is one answer per question."""
    sizes = [len(row) for row in rows], [len(row) for row in answers]
    if _nesting(text) != _nesting(suffix) or sizes[0] != sizes[1]:
        raise ValueError(
            f"`suffix` must have the shape of `text`: `text` is {_nesting(text)} with {sizes[0]!s:.40} questions per "
            f"image, `suffix` is {_nesting(suffix)} with {sizes[1]!s:.40} answers"
        )


def _fill_rows(lengths: list[int], limit: int, reorder: bool) -> list[list[int]]:
    """Rows of indices of questions; a row has at most `limit` tokens, or one longer question.

    A question goes into the last row, or a new one. With `reorder`, the longest question comes first, and each goes
    into the first row with room.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    indices = range(len(lengths))
    for index in sorted(indices, key=lengths.__getitem__, reverse=True) if reorder else indices:
        candidates = range(len(rows)) if reorder else range(len(rows))[-1:]
        row = next((row for row in candidates if room[row] >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(limit)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def _pack(images: list[list[Segment]], row_tokens: int | str) -> list[tuple[int, list[int]]]:
    """The image of each row, and the indices of its questions among those of the image."""
    lengths = [[_size(segment) for segment in questions] for questions in images]

    def fill(limit: int, reorder: bool) -> list[tuple[int, list[int]]]:
        return [(image, row) for image, sizes in enumerate(lengths) for row in _fill_rows(sizes, limit, reorder)]

    if row_tokens != "fit":
        return fill(int(row_tokens), reorder=False)
    # All rows of the batch have the same width: choose the width with the fewest tokens in total, including padding.
    widths = range(max(map(max, lengths)), max(map(sum, lengths)) + 1, 4)
    return min(((width, fill(width, reorder=True)) for width in widths), key=lambda pair: pair[0] * len(pair[1]))[1]


def _lay_out(rows: list[list[Segment]], pad_id: int, width: int, left: bool) -> dict[str, list[list[int]]]:
    """The text inputs [R,L] of rows of segments, padded to `width`, and ``question_ends`` [R,Q].

    Example: two questions of two tokens, the second with an answer, in a row of width 8 padded on the left::

        input_ids     [PAD] [PAD] [SOS] ? [SOS] ? yes [EOS]      question_ends 3 5
        position_ids    0     0     0   1   0   1  2    3
        segment_ids     0     0     1   1   2   2  2    2
    """
    fillers = {"input_ids": pad_id, "attention_mask": 0, "labels": IGNORED_LABEL, "position_ids": 0, "segment_ids": 0}
    data: dict[str, list[list[int]]] = {name: [] for name in (*fillers, "question_ends")}
    most = max(map(len, rows))
    for row in rows:
        sizes = [_size(segment) for segment in row]
        pads = max(0, width - sum(sizes))
        real = {
            "input_ids": [token for prompt, answer in row for token in prompt + answer],
            "attention_mask": [1] * sum(sizes),
            "labels": [label for prompt, answer in row for label in [IGNORED_LABEL] * len(prompt) + answer],
            "position_ids": [position for size in sizes for position in range(size)],
            "segment_ids": [number for number, size in enumerate(sizes, start=1) for _ in range(size)],
        }
        for name, values in real.items():
            padding = [fillers[name]] * pads
            data[name].append(padding + values if left else values + padding)
        starts = accumulate(sizes, initial=pads if left else 0)
        ends = [start + len(prompt) - 1 for start, (prompt, _) in zip(starts, row)]
        data["question_ends"].append(ends + [-1] * (most - len(ends)))
    return data


def _as_blocks(message: Any) -> Any:
    """A chat message with its content as a list of blocks."""
    if isinstance(message, dict) and isinstance(message.get("content"), str):
        return {**message, "content": [{"type": "text", "text": message["content"]}]}
    return message


class TrafficVLMProcessor(ProcessorMixin):
    """Combine an image processor and the tokenizer.

    Args:
        image_processor: an image processor of transformers that returns pixels [I,3,256,256].
        tokenizer: the `TrafficVLMTokenizer`.
        chat_template: a Jinja template; by default it makes a prompt of the last user message's text.
        taught: the content words that the weights were taught: {"photographs": [...], "rendered": [...]}, by questions
            about photographs, or about rendered scenes only. None if they are not known.
        own_questions: whether the weights were taught a user's own questions. Then the pipeline accepts every kind
            of question, and every answer in words.
        questions: the arguments of `Rules`, by which questions are read: kinds of answers, other wordings, examples.

    Raises:
        ValueError: `taught` has another form, or words that are not in the vocabulary.
    """

    def __init__(
        self,
        image_processor: Any,
        tokenizer: Any,
        chat_template: str | None = None,
        taught: dict[str, list[str]] | None = None,
        own_questions: bool = False,
        questions: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(image_processor, tokenizer, chat_template=chat_template or CHAT_TEMPLATE, **kwargs)
        if taught is not None:
            if not isinstance(taught, dict) or set(taught) != set(TAUGHT_ON):
                raise ValueError(f"taught must be a dictionary with the lists {TAUGHT_ON}, got {taught!r:.80}")
            words = {word for some in taught.values() for word in some}
            if other := sorted(words - set(tokenizer.get_vocab())):
                raise ValueError(f"taught has words that are not in the vocabulary: {', '.join(other[:10])}")
        self.taught, self.own_questions, self.questions = taught, own_questions, questions
        self.rules = Rules(**(questions or {}))

    @classmethod
    def _load_tokenizer_from_pretrained(
        cls, sub_processor_type: str, pretrained_model_name_or_path: Any, trust_remote_code: Any = None, **kwargs: Any
    ) -> TrafficVLMTokenizer:
        # Use the class imported above, so that loading the tokenizer runs no further code from the folder.
        return TrafficVLMTokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs)

    @property
    def model_input_names(self) -> list[str]:
        """The inputs for one question about one image; `__call__` lists what other calls add."""
        return ["input_ids", "attention_mask", "pixel_values"]

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
        suffix: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
        packed: bool = False,
        row_tokens: int | str = ROW_TOKENS,
        on_unknown: str = "warn",
        region: Any = None,
        return_tensors: str | None = None,
        videos: None = None,
        audio: None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Turn I images and N questions about them into model inputs.

        Args:
            images: one image or a list of images; `to_rgb` lists the accepted types. With None, only text inputs are
                returned; each list of nested text then belongs to one image, such as an image encoded earlier.
            text: a question (I = 1), a list of one question per image, or one list of questions per image.
            suffix: the answers to train on, with the same shape as ``text``.
            packed: whether a row holds several questions about one image.
            row_tokens: maximum number of tokens of a packed row; an image with more gets several rows. "fit" reorders
                the questions of an image into rows with the fewest tokens in total, for training.
            on_unknown: "warn", "raise" or "ignore" if words are not in the vocabulary or, without `suffix`, not taught
                (see `untaught_words`).
            region: the part of each image to read: a `Region`, or its left, top, width and height as fractions.
            return_tensors: "pt", "np", or None for lists; with `packed`, None means "pt".
            kwargs: ``truncation=True`` shortens questions longer than ``max_length`` (at most
                ``tokenizer.model_max_length``) instead of raising; ``padding`` (by default True if tensors are
                returned), ``padding_side``, ``pad_to_multiple_of``; the options of the image processor. All are also
                accepted in ``text_kwargs``, ``images_kwargs`` or ``common_kwargs``.

        Returns:
            ``pixel_values`` [I,3,256,256] float32 and, all int64,

            - one question per row: ``input_ids``, ``attention_mask`` [N,L], and ``image_index`` [N], the index of each
              row's image (left out if every image has exactly one question);
            - packed: ``input_ids``, ``attention_mask`` [R,L], ``position_ids`` [R,L] starting at 0 for each question,
              ``segment_ids`` [R,L], the number of the question in its row (from 1; 0 at padding), ``question_ends``
              [R,Q], the column of each prompt's last token (-1 if a row has fewer than Q questions), and, unless row i
              holds all questions about image i, ``image_index`` [R]; with "fit" also ``question_spans`` [N,3], where
              each of the N questions went, in the order of `text`: its row, and its prompt's first and last column;
            - with ``suffix``: ``labels``, with the shape of ``input_ids``: the answer and ``[EOS]``, elsewhere -100.

        Raises:
            ValueError, TypeError: an invalid argument; the message names the value and what was expected.
        """
        if videos is not None or audio is not None:
            raise ValueError("Traffic VLM reads images and text; `videos` and `audio` are not supported")
        if images is None and text is None:
            raise ValueError("expected `images`, `text` or both, got neither")
        if text is None and suffix is not None:
            raise ValueError("`suffix` holds the answers to the questions in `text`, but `text` is None")
        if row_tokens != "fit" and (not isinstance(row_tokens, int) or row_tokens < 1):
            raise ValueError(f'row_tokens must be a positive integer or "fit", got {row_tokens!r}')
        if on_unknown not in ("warn", "raise", "ignore"):
            raise ValueError(f'on_unknown must be "warn", "raise" or "ignore", got {on_unknown!r}')
        text_options, image_options, return_tensors = self._split_options(kwargs, return_tensors)
        if packed and return_tensors is None:
            return_tensors = "pt"
        image_list = None if images is None else _image_list(images)
        data: dict[str, Any] = {}
        if text is not None:
            rows = _rows(text, "text")
            answers = None if suffix is None else _rows(suffix, "suffix")
            if image_list is not None:
                _check_image_count(text, rows, image_list)
            if answers is not None:
                _check_shape(text, rows, suffix, answers)
            segments = self._segments(rows, answers, on_unknown, text_options)
            text_options.setdefault("padding", return_tensors is not None)
            data = self._text_inputs(segments, answers is not None, packed, row_tokens, text_options)
        if image_list is not None:
            data["pixel_values"] = self._pixels(image_list, region, return_tensors, image_options)
        return BatchFeature(data, tensor_type=return_tensors)

    def _split_options(self, given: dict, return_tensors: str | None) -> tuple[dict, dict, str | None]:
        """Split keyword arguments into text options, image options and return_tensors; others raise TypeError."""
        image_options = getattr(self.image_processor, "valid_kwargs", ImagesKwargs).__annotations__
        known = {"text_kwargs": TEXT_OPTIONS, "images_kwargs": image_options}
        defaults = self.tokenizer.init_kwargs  # padding can be set when a tokenizer is created
        names = ("padding", "max_length") if "padding" in defaults else ()
        options = {"text_kwargs": {name: defaults[name] for name in names if name in defaults}, "images_kwargs": {}}
        groups = {name: dict(given.pop(name, None) or {}) for name in ("common_kwargs", *known)}
        for group, members in [*groups.items(), ("", given)]:
            return_tensors = members.pop("return_tensors", None) or return_tensors
            for name, value in members.items():
                targets = [key for key in known if name in known[key] and group in ("", "common_kwargs", key)]
                from_library = name in TextKwargs.__annotations__ or name in ProcessingKwargs.__annotations__
                if not targets and not (from_library and not value):  # the library passes options that are off
                    raise TypeError(f"unexpected keyword argument `{name}`{f' in `{group}`' if group else ''}")
                for target in targets:
                    if not group and name in groups[target]:
                        raise ValueError(f"`{name}` was passed twice: as a keyword argument and in `{target}`")
                    options[target][name] = value
        return options["text_kwargs"], options["images_kwargs"], return_tensors

    def _pixels(self, images: list[Any], region: Any, return_tensors: str | None, options: dict) -> Any:
        layout = options.pop("input_data_format", None)
        channels_first = None if layout is None else layout == "channels_first"
        pictures = [to_rgb(image, channels_first) for image in images]
        if region is not None:
            pictures = [Region.of(region).crop(picture) for picture in pictures]
        # Resize here instead of in the image processor: this is twice as fast for a large image, and the pixels are
        # the same with and without torchvision.
        size = get_size_dict(options.get("size") or self.image_processor.size)
        resample = options.get("resample", self.image_processor.resample)
        if options.get("do_resize", self.image_processor.do_resize) and {"height", "width"} <= set(size):
            pictures = [picture.resize((size["width"], size["height"]), resample) for picture in pictures]
        # Set explicitly: the library would mistake an image of 1 or 3 rows for one with channels first. With this
        # option and torchvision, transformers 5.17 moves the channels of PIL images twice, but not those of arrays.
        options["input_data_format"] = "channels_last"
        arrays = [np.array(picture) for picture in pictures]
        return self.image_processor(arrays, return_tensors=return_tensors, **options)["pixel_values"]

    def _segments(
        self, rows: list[list[str]], answer_rows: list[list[str]] | None, on_unknown: str, options: dict
    ) -> list[list[Segment]]:
        """The ids of each prompt and answer, one list per image; the tokenizer is called once for all texts."""
        typed = [question for row in rows for question in row]
        texts = [question_words(question) for question in typed]
        texts += [" ".join(answer.split()) for row in answer_rows or [] for answer in row]
        ids = self._tokenize(texts)
        count = len(typed)
        for index, (text, words) in enumerate(zip(texts, ids)):
            if not words or (index < count and not has_word(text)):
                name, value = ("text", typed[index]) if index < count else ("suffix", text)
                raise ValueError(f"`{name}` has an empty string: {value!r:.80}; expected words")
        if on_unknown != "ignore":
            self._report_words(texts, ids, answer_rows is not None, on_unknown)
        answers = [[*words, self.tokenizer.eos_token_id] for words in ids[count:]] or [[]] * count
        longest = min(self.tokenizer.model_max_length, options.get("max_length") or math.inf)
        is_shortened = options.get("truncation") not in (None, False, "do_not_truncate")
        segments = []
        for index, (words, answer) in enumerate(zip(ids, answers)):
            room = longest - len(answer) - 2  # for the words between [SOS] and "?"
            if len(words) > room and not (is_shortened and room > 0):
                what = "prompt and answer" if answer else "prompt"
                raise ValueError(
                    f"question {index} has {len(words) + len(answer) + 2} tokens ({what}), at most {longest} are "
                    f"allowed: {typed[index][:80]!r}... (truncation=True shortens the question)"
                )
            segments.append((self._prompt(words[:room]), answer))
        ordered = iter(segments)
        return [[next(ordered) for _ in row] for row in rows]

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        distinct = list(dict.fromkeys(texts))  # many images often have the same questions
        ids = self.tokenizer.encode_words(distinct, return_attention_mask=False)["input_ids"]
        ids_of = dict(zip(distinct, ids))
        return [ids_of[text] for text in texts]

    def _prompt(self, words: list[int]) -> list[int]:
        return [self.tokenizer.bos_token_id, *words, self.tokenizer.convert_tokens_to_ids("?")]

    def _text_inputs(
        self, images: list[list[Segment]], with_labels: bool, packed: bool, row_tokens: int | str, options: dict
    ) -> dict[str, Any]:
        """The text inputs that `__call__` returns, for the segments of each image."""
        layout = _pack(images, row_tokens if packed else 1)  # no two questions fit into 1 token
        rows = [[images[image][index] for index in indices] for image, indices in layout]
        side = options.get("padding_side") or self.tokenizer.padding_side
        if side not in ("left", "right"):
            raise ValueError(f'padding_side must be "left" or "right", got {side!r}')
        width = self._row_width([sum(map(_size, row)) for row in rows], options)
        inputs = _lay_out(rows, self.tokenizer.pad_token_id, width, left=side == "left")
        names = ["input_ids"] if options.get("return_attention_mask") is False else ["input_ids", "attention_mask"]
        names += ["labels"] if with_labels else []
        names += ["position_ids", "segment_ids", "question_ends"] if packed else []
        data: dict[str, Any] = {name: inputs[name] for name in names}
        image_index = [image for image, _ in layout]
        is_reordered = packed and row_tokens == "fit"
        if is_reordered or image_index != list(range(len(images))):
            data["image_index"] = image_index
        if is_reordered:
            spans = {}  # by the image of each question, and its index among those of the image
            for row, (image, indices) in enumerate(layout):
                for index, end in zip(indices, inputs["question_ends"][row]):
                    spans[image, index] = [row, end + 1 - len(images[image][index][0]), end]
            data["question_spans"] = [span for _, span in sorted(spans.items())]
        return data

    def _row_width(self, sizes: list[int], options: dict) -> int:
        """The width to pad rows of these numbers of tokens to; 0 without padding."""
        padding = options["padding"]
        if padding in (None, False, "do_not_pad"):
            return 0
        if padding not in (True, "longest", "max_length"):
            choices = 'True, False, "longest", "max_length" or "do_not_pad"'
            raise ValueError(f"padding must be {choices}, got {padding!r}")
        width = max(sizes)
        if padding == "max_length":
            width = max(width, options.get("max_length") or self.tokenizer.model_max_length)
        multiple = options.get("pad_to_multiple_of") or 1
        width = -(-width // multiple) * multiple
        if width > MAX_WIDTH:
            raise ValueError(f"rows would be padded to {width:,} tokens; the limit is {MAX_WIDTH:,}")
        return width

    def prompt(self, question: str) -> Prompt:
        """The prompt, `[SOS] words ?`, of a question as `question_words` returns it. Nothing is checked."""
        words = self.tokenizer.encode_words([question], return_offsets_mapping=True, return_attention_mask=False)
        ids = self._prompt(words["input_ids"][0])
        typed = list(words_at(question, words["offset_mapping"][0]))
        return Prompt(ids, self.tokenizer.convert_ids_to_tokens(ids), typed)

    def lay_out(self, prompts: Sequence[Sequence[Sequence[int]]], packed: bool) -> BatchFeature:
        """The text inputs, as `__call__` returns them, for lists of tokenized prompts, one list for each image."""
        segments: list[list[Segment]] = [[(list(ids), []) for ids in row] for row in prompts]
        data = self._text_inputs(segments, False, packed, ROW_TOKENS, {"padding": True})
        return BatchFeature(data, tensor_type="pt")

    def _report_words(self, texts: list[str], ids: list[list[int]], with_answers: bool, on_unknown: str) -> None:
        """Warn of unknown and untaught words of texts with these ids, or raise `ValueError`."""
        messages = []
        if any(self.tokenizer.unk_token_id in words for words in ids):
            reading = "" if on_unknown == "raise" else f"; the model reads them as {self.tokenizer.unk_token}"
            unknown = _list_words(self._find_unknown(texts))
            messages.append(f"words that are not in the vocabulary: {unknown}{reading}")
        # With answers, untaught words are being taught.
        if not with_answers and (untaught := self.untaught_ids([token for words in ids for token in words])):
            messages.append(f"words that the model was not taught, or not reliably: {_list_words(untaught)}")
        for message in messages:
            if on_unknown == "raise":
                raise ValueError(message)
            warnings.warn(message, UserWarning, stacklevel=4)  # at the line that called the processor

    def _find_unknown(self, texts: list[str]) -> list[str]:
        found: dict[str, str] = {}
        for word in self.tokenizer.unknown_words(texts):
            found.setdefault(word.casefold(), word)
        return list(found.values())

    def unknown_words(self, text: str | Sequence[str]) -> list[str]:
        """The words that are not in the vocabulary, as typed, each once, in order of appearance."""
        rows = _rows(text, "text") if text else []
        return self._find_unknown([question_words(item) for row in rows for item in row])

    def untaught_words(self, text: str | Sequence[str]) -> list[str]:
        """The content words of texts that the model was not taught, or not reliably, each once.

        Empty if `taught` is None: nothing is known then.
        """
        if not text:
            return []
        ids = self._tokenize([question_words(item) for row in _rows(text, "text") for item in row])
        return self.untaught_ids([token for words in ids for token in words])

    def untaught_ids(self, ids: Sequence[int]) -> list[str]:
        """The result of `untaught_words` for token ids."""
        if self.taught_words is None:
            return []
        words = self.tokenizer.convert_ids_to_tokens(list(dict.fromkeys(ids)))
        return [word for word in words if is_content_word(word) and word not in self.taught_words]

    @property
    def taught_words(self) -> frozenset[str] | None:
        """All words of `taught`; None if they are not known."""
        return None if self.taught is None else frozenset(word for words in self.taught.values() for word in words)

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        """As in the library; also tokenizes messages whose content is a string, with every version of transformers.

        Warns once if there are other messages than the last one of the user, because they are not read.
        """
        is_batch = bool(conversation) and isinstance(conversation[0], list | tuple)
        conversations = conversation if is_batch else [conversation]
        if any(len(messages) > 1 for messages in conversations):
            logger.warning_once(
                "Only the last user message is read: earlier turns, answers and system messages are not."
            )
        # transformers 5.5 looks for images and expects each content to be a list of blocks.
        blocks = [[_as_blocks(message) for message in messages] for messages in conversations]
        return super().apply_chat_template(blocks if is_batch else blocks[0], *args, **kwargs)

    def post_process_image_text_to_text(
        self, generated_outputs: Any, skip_special_tokens: bool = True, **kwargs: Any
    ) -> list[str]:
        """Decode ids [N,L] to N texts.

        A prompt without an answer ends in "? ", including the space before an answer. The ``image-text-to-text``
        pipeline removes the prompt from the start of the full text, and so gets "yes", not " yes".
        """
        if len(generated_outputs) and np.ndim(generated_outputs[0]) == 0:  # one row of ids [L]
            generated_outputs = [generated_outputs]
        texts = self.tokenizer.batch_decode(generated_outputs, skip_special_tokens=skip_special_tokens, **kwargs)
        return [f"{text} " if text.endswith("?") else text for text in texts]


TrafficVLMProcessor.register_for_auto_class()

# `AutoProcessor` does not make this file an attribute of its package. The class would then be pickled with all of its
# code, which differs from process to process, and `datasets.Dataset.map(processor)` would never find its cache.
_package, _, _name = __name__.rpartition(".")
setattr(sys.modules[_package], _name, sys.modules[__name__])

# The pipeline belongs to each saved folder: the library copies what this file imports.
__all__ = ["TrafficVLMPipeline", "TrafficVLMProcessor"]

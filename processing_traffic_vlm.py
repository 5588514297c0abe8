"""The processor of Traffic VLM: images and questions in, the tensors that the model reads out.

    images    ── pixels → pixel_values [I,3,H,W]
    questions ── text → ids of each prompt and answer ── lay_out → input_ids [rows,L] and what belongs to them

What is special here:
- A prompt is ``[SOS] words ?`` without ``[EOS]``. Closing punctuation is replaced by one ``?``, so that "Is there a
  car", "Is there a car?" and "Is there a car ?" are the same prompt, and every answer follows the same token.
- One image can have many questions. A row of ``input_ids`` is one question, and ``image_index`` is the index of its
  image; with ``packed=True`` a row holds several questions about one image, one after the other.
- Nothing is dropped silently: unknown words, misspelled options and questions that are too long are reported.
"""

import warnings
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from transformers import BatchFeature
from transformers.processing_utils import ProcessorMixin
from transformers.utils import PaddingStrategy, logging

from .configuration_traffic_vlm import check_image_size
from .describing_traffic_vlm import Caption  # noqa: F401  for the pipeline: transformers < 5.16 copies only what is here
from .images_traffic_vlm import Region, to_rgb
from .pipeline_traffic_vlm import TrafficVLMPipeline
from .question_traffic_vlm import (
    LETTERS,
    UNKNOWN_TOKEN,
    Prompt,
    Rules,
    has_word,
    is_content_word,
    question_words,
    words_at,
)
from .tokenization_traffic_vlm import TrafficVLMTokenizer


logger = logging.get_logger(__name__)

SIDES = (224, 640)  # of images that the weights were tried on, in pixels
ROW_TOKENS = 512  # of a packed row. Attention costs L²; with a limit, the cost grows linearly with the questions
IGNORED_LABEL = -100  # ignored by torch.nn.functional.cross_entropy
TEXT_OPTIONS = ("padding", "padding_side", "max_length", "truncation")
IMAGE_OPTIONS = ("do_rescale", "do_normalize")
IGNORED_OPTIONS = ("add_special_tokens", "sanitize_control_tokens", "verbose")  # the library passes these
TOKEN_INPUTS = ("input_ids", "attention_mask", "labels", "position_ids", "segment_ids")  # one number for each token

Segment = tuple[Sequence[int], Sequence[int]]  # the ids of one prompt and of its answer (empty without answers)


def list_images(images: Any) -> list[Any]:
    """List of images, from one image, a list, a batch [I,...] or, from chat templates, nested lists of one image.

    Raises:
        ValueError: an empty list, or a nested list that does not hold exactly one image.
    """
    if getattr(images, "ndim", 0) == 4:
        return list(images)
    if not isinstance(images, list | tuple):
        return [images]
    if not images:
        raise ValueError("`images` is an empty list; expected at least one image, or None for text only")
    rows = [image if isinstance(image, list | tuple) else [image] for image in images]
    for number, row in enumerate(rows):
        if len(row) != 1:
            raise ValueError(f"row {number} of `images` holds {len(row)} images; a question is about one image")
    return [image for [image] in rows]


def list_texts(texts: Any, name: str, limit: int) -> list[list[str]]:
    """One list of strings for each image, from a string, one string per image or one list of strings per image.

    Args:
        name: of the argument, for errors.
        limit: maximum number of characters of a string.

    Raises:
        TypeError: something else than strings. ValueError: an empty list, or a string above the limit.
    """
    given = texts if isinstance(texts, list | tuple) else [texts]
    rows = [list(row) if isinstance(row, list | tuple) else [row] for row in given]
    if not rows or not all(rows):
        raise ValueError(f"`{name}` has an empty list: {texts!r:.80}; expected at least one string per image")
    for text in (text for row in rows for text in row):
        if not isinstance(text, str):
            raise TypeError(f"`{name}` must hold strings, got {type(text).__name__}: {text!r:.80}")
        if len(text) > limit:
            raise ValueError(f"`{name}` has {len(text):,} characters, at most {limit:,} are allowed: {text[:80]!r}...")
    return rows


def fill_rows(questions: Sequence[tuple[int, int]], width: int) -> list[list[int]]:
    """Rows of indices of questions (image, tokens), in order: each row is about one image and has at most `width`
    tokens, or one question."""
    rows: list[list[int]] = []
    room, last = 0, -1
    for index, (image, tokens) in enumerate(questions):
        if image != last or tokens > room:
            rows.append([])
            room, last = width, image
        rows[-1].append(index)
        room -= tokens
    return rows


def fit_rows(questions: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The rows of `fill_rows` in the width with the fewest tokens in all rows together, padding included."""
    totals = [sum(tokens for _, tokens in group) for _, group in groupby(questions, key=lambda one: one[0])]
    widths = range(max(tokens for _, tokens in questions), max(totals) + 1, 4)
    filled = [(width, fill_rows(questions, width)) for width in widths]
    return min(filled, key=lambda pair: pair[0] * len(pair[1]))[1]


def place_rows(rows: Sequence[Sequence[Segment]], pad_id: int, width: int, left: bool) -> dict[str, list[list[int]]]:
    """The text inputs [R,L] of rows of segments, padded to `width`, and ``question_ends`` [R,Q].

    Example: two questions of two tokens, the second with an answer, in a row of width 8 padded on the left::

        input_ids     [PAD] [PAD] [SOS] ? [SOS] ? yes [EOS]      question_ends 3 5
        position_ids    0     0     0   1   0   1  2    3
        segment_ids     0     0     1   1   2   2  2    2
    """
    placed, all_ends = [], []
    for row in rows:
        tokens, ends = [], []
        for number, (prompt, answer) in enumerate(row, start=1):
            labels = (*[IGNORED_LABEL] * len(prompt), *answer)
            pairs = enumerate(zip((*prompt, *answer), labels))
            tokens += [(token, 1, label, position, number) for position, (token, label) in pairs]
            ends.append(len(tokens) - len(answer) - 1)
        padding = [(pad_id, 0, IGNORED_LABEL, 0, 0)] * (width - len(tokens))
        placed.append([*zip(*(padding + tokens if left else tokens + padding))])
        all_ends.append([end + len(padding) for end in ends] if left else ends)
    data = {name: [list(row[i]) for row in placed] for i, name in enumerate(TOKEN_INPUTS)}
    most = max(map(len, rows))
    return data | {"question_ends": [ends + [-1] * (most - len(ends)) for ends in all_ends]}


def _as_blocks(chat: Any) -> Any:
    """A message, or nested lists of messages, with each content as a list of blocks."""
    if isinstance(chat, list | tuple):
        return [_as_blocks(one) for one in chat]
    if isinstance(chat, dict) and isinstance(chat.get("content"), str):
        return {**chat, "content": [{"type": "text", "text": chat["content"]}]}
    return chat


class TrafficVLMProcessor(ProcessorMixin):
    """Combine an image processor and the tokenizer.

    Args:
        image_processor: an image processor of transformers that returns pixels [I,3,H,W].
        tokenizer: the `TrafficVLMTokenizer`.
        chat_template: a Jinja template; that of the repository makes a prompt of the last user message's text.
        taught: the content words that the weights were taught. None if they are not known.
        own_questions: whether the weights were taught a user's own questions. Then the pipeline accepts every kind
            of question, and every answer in words.
        questions: the arguments of `Rules`, by which questions are read: kinds of answers, colors, examples.
    """

    def __init__(
        self,
        image_processor: Any,
        tokenizer: Any,
        chat_template: str | None = None,
        taught: list[str] | None = None,
        own_questions: bool = False,
        questions: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(image_processor, tokenizer, chat_template=chat_template, **kwargs)
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
        image_size: int | Sequence[int] | None = None,
        **options: Any,
    ) -> BatchFeature:
        """Model inputs for I images and N questions about them.

        Args:
            images: one image or a list of images; `to_rgb` lists the accepted types. With None, only text inputs are
                returned; each list of nested text then belongs to one image, such as an image encoded earlier.
            text: a question (I = 1), a list of one question per image, or one list of questions per image.
            suffix: the answers to train on, with the same shape as ``text``.
            packed: whether a row holds several questions about one image.
            row_tokens: maximum number of tokens of a packed row; an image with more gets several rows. "fit" is the
                number with the fewest tokens in all rows together, for training.
            on_unknown: "warn", "raise" or "ignore" if words are not in the vocabulary or, without `suffix`, not taught
                (see `untaught_words`).
            region: the part of each image to read: a `Region`, or its left, top, width and height as fractions.
            image_size: side of the pixels, or (height, width), multiples of 32 in 224..640: smaller is faster, larger
                shows smaller objects. By default that of the image processor.
            options: ``return_tensors`` is "pt", "np", or None for lists ("pt" if packed); ``padding`` is True (if
                tensors are returned), False or "max_length", to ``max_length`` tokens; ``padding_side``;
                ``truncation=True`` shortens long questions; ``do_rescale`` and ``do_normalize`` of the images. As in
                the library, they can stand in ``text_kwargs``, ``images_kwargs`` or ``common_kwargs``.

        Returns:
            ``pixel_values`` [I,3,H,W] float32 and, all int64,

            - one question per row: ``input_ids``, ``attention_mask`` [N,L], and ``image_index`` [N], the index of each
              row's image (left out if every image has exactly one question);
            - packed: ``input_ids``, ``attention_mask`` [R,L], ``position_ids`` [R,L] starting at 0 for each question,
              ``segment_ids`` [R,L], the number of the question in its row (from 1; 0 at padding), ``question_ends``
              [R,Q], the column of each prompt's last token (-1 if a row has fewer than Q questions), and, unless row i
              holds all questions about image i, ``image_index`` [R];
            - with ``suffix``: ``labels``, with the shape of ``input_ids``: the answer and ``[EOS]``, elsewhere -100.

        Raises:
            TypeError: an unknown option, or a question or answer that is no string.
            ValueError: an invalid argument; a question that is empty or too long; another number of images or
                answers than of questions. The message names the value and what was expected.
        """
        if text is None and (images is None or suffix is not None):
            raise ValueError("`text` is None: expected questions, or `images` alone")
        return_tensors, layout, pixels = self._read_options(options)
        return_tensors = return_tensors or ("pt" if packed else None)
        data: dict[str, Any] = {}
        if images is not None:
            data["pixel_values"] = self.pixels(images, region, image_size, return_tensors, **pixels)
        if text is not None:
            limit = LETTERS * self.tokenizer.model_max_length
            rows = list_texts(text, "text", limit)
            answers = None if suffix is None else list_texts(suffix, "suffix", limit)
            if images is not None and len(rows) != len(data["pixel_values"]):
                given = f"`text` is about {len(rows)} images, but `images` holds {len(data['pixel_values'])}"
                raise ValueError(f"{given}. Questions about one image are a nested list: text=[[question, question]]")
            if answers is not None and [*map(len, rows)] != [*map(len, answers)]:
                got = f"{[*map(len, rows)]!s:.40} questions and {[*map(len, answers)]!s:.40} answers per image"
                raise ValueError(f"`suffix` must have the shape of `text`, got {got}")
            segments = self.text(rows, answers, on_unknown, layout.pop("truncation", None))
            layout = {"padding": return_tensors is not None} | layout
            data |= self.lay_out(segments, packed, row_tokens, return_tensors=None, **layout)
        return BatchFeature(data, tensor_type=return_tensors)

    @staticmethod
    def _read_options(options: dict[str, Any]) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
        """(`return_tensors`, options of the text, options of the image processor).

        Raises:
            TypeError: an unknown option that is not off.
        """
        for group in ("common_kwargs", "text_kwargs", "images_kwargs"):
            options = options | (options.pop(group, None) or {})
        return_tensors = options.pop("return_tensors", None)
        texts = {name: options.pop(name) for name in TEXT_OPTIONS if name in options}
        pixels = {name: options.pop(name) for name in IMAGE_OPTIONS if name in options}
        for name, value in options.items():
            if value and name not in IGNORED_OPTIONS:
                raise TypeError(f"unexpected keyword argument `{name}`")
        return return_tensors, texts, pixels

    def pixels(
        self,
        images: Any,
        region: Any = None,
        image_size: int | Sequence[int] | None = None,
        return_tensors: str | None = "pt",
        **options: Any,
    ) -> Any:
        """Pixels [I,3,H,W] of one image or a list, or of the `region` of each; `options` are `IMAGE_OPTIONS`.

        Raises:
            TypeError, ValueError: an image that cannot be read, a region outside of it, or no possible size.
        """
        height, width = self.image_processor.size["height"], self.image_processor.size["width"]
        if image_size is not None:
            height, width = check_image_size(image_size)
            if not (SIDES[0] <= min(height, width) and max(height, width) <= SIDES[1]):
                limits = f"{SIDES[0]}..{SIDES[1]} pixels"
                logger.warning_once(f"image_size {height} × {width} is beyond {limits}, where the weights were tried.")
        pictures = [to_rgb(image) for image in list_images(images)]
        if region is not None:
            pictures = [Region.of(region).crop(picture) for picture in pictures]
        # Resize here instead of in the image processor: this is twice as fast for a large image, and the pixels are
        # the same with and without torchvision.
        pictures = [picture.resize((width, height), self.image_processor.resample) for picture in pictures]
        # Set explicitly: the library would mistake an image of 1 or 3 rows for one with channels first. With this
        # option and torchvision, transformers 5.17 moves the channels of PIL images twice, but not those of arrays.
        options |= {"do_resize": False, "input_data_format": "channels_last", "return_tensors": return_tensors}
        return self.image_processor([np.array(picture) for picture in pictures], **options)["pixel_values"]

    def text(
        self,
        questions: Sequence[Sequence[str]],
        answers: Sequence[Sequence[str]] | None = None,
        on_unknown: str = "warn",
        truncation: Any = None,
    ) -> list[list[Segment]]:
        """(ids of the prompt, ids of the answer and [EOS]) for each question of each image; [] without answers.

        The arguments are those of `__call__`. The tokenizer is called once, with all different texts.

        Raises:
            ValueError: a text without words, or with too many tokens; unknown words with `on_unknown="raise"`.
        """
        if on_unknown not in ("warn", "raise", "ignore"):
            raise ValueError(f'on_unknown must be "warn", "raise" or "ignore", got {on_unknown!r}')
        typed = [text for row in (*questions, *(answers or ())) for text in row]
        count = sum(map(len, questions))
        texts = [question_words(text) for text in typed[:count]] + [" ".join(text.split()) for text in typed[count:]]
        distinct = list(dict.fromkeys(texts))  # many images often have the same questions
        ids_of = dict(zip(distinct, self.tokenizer.encode_words(distinct)["input_ids"]))
        ids = [ids_of[text] for text in texts]
        for index, words in enumerate(ids):
            if not words or not has_word(texts[index]):
                name = "text" if index < count else "suffix"
                raise ValueError(f"`{name}` has an empty string: {typed[index]!r:.80}; expected words")
        if on_unknown != "ignore":
            self._report_words(distinct, on_unknown, is_taught=answers is not None)
        prompts = [self._prompt(words) for words in ids[:count]]
        ends = [[*words, self.tokenizer.eos_token_id] for words in ids[count:]] or [[]] * count
        limit, is_shortened = self.tokenizer.model_max_length, truncation not in (None, False, "do_not_truncate")
        for index, (prompt, end) in enumerate(zip(prompts, ends)):
            over = len(prompt) + len(end) - limit
            if over > 0 and not (is_shortened and over < len(prompt) - 2):
                sizes = f"{len(prompt)} tokens and {len(end)} of its answer, at most {limit} are allowed"
                question = f"{typed[index][:80]!r}... (truncation=True shortens the question)"
                raise ValueError(f"question {index} has {sizes}: {question}")
            if over > 0:
                del prompt[-1 - over : -1]  # the last words, before "?"
        segments = iter(zip(prompts, ends))
        return [[next(segments) for _ in row] for row in questions]

    def lay_out(
        self,
        images: Sequence[Sequence[Segment]],
        packed: bool = True,
        row_tokens: int | str = ROW_TOKENS,
        padding: Any = True,
        padding_side: str | None = None,
        max_length: int | None = None,
        return_tensors: str | None = "pt",
    ) -> BatchFeature:
        """The text inputs that `__call__` returns, for the segments of each image, with its arguments.

        Raises:
            ValueError: `padding` or `padding_side` has no such value.
        """
        side = padding_side or self.tokenizer.padding_side
        if side not in ("left", "right"):
            raise ValueError(f'padding_side must be "left" or "right", got {side!r}')
        questions = [(image, *segment) for image, row in enumerate(images) for segment in row]
        sizes = [(image, len(prompt) + len(answer)) for image, prompt, answer in questions]
        if not packed:
            rows = [[index] for index in range(len(questions))]
        else:
            rows = fit_rows(sizes) if row_tokens == "fit" else fill_rows(sizes, int(row_tokens))
        strategy, width = PaddingStrategy.LONGEST if padding is True else PaddingStrategy(padding or "do_not_pad"), 0
        if strategy != PaddingStrategy.DO_NOT_PAD:
            width = max(sum(sizes[index][1] for index in row) for row in rows)
            if strategy == PaddingStrategy.MAX_LENGTH:
                width = max(width, max_length or self.tokenizer.model_max_length)
        segments = [[questions[index][1:] for index in row] for row in rows]
        data: dict[str, Any] = place_rows(segments, self.tokenizer.pad_token_id, width, side == "left")
        if not any(answer for *_, answer in questions):
            del data["labels"]
        image_index = [questions[row[0]][0] for row in rows]
        if image_index != list(range(len(images))):
            data["image_index"] = image_index
        if not packed:
            del data["position_ids"], data["segment_ids"], data["question_ends"]
        return BatchFeature(data, tensor_type=return_tensors)

    def prompt(self, question: str) -> Prompt:
        """The prompt, `[SOS] words ?`, of a question as `question_words` returns it. Nothing is checked."""
        words = self.tokenizer.encode_words([question], return_offsets_mapping=True)
        ids = self._prompt(words["input_ids"][0])
        typed = words_at(question, words["offset_mapping"][0])
        return Prompt(ids, self.tokenizer.convert_ids_to_tokens(ids), list(typed))

    def _prompt(self, words: list[int]) -> list[int]:
        return [self.tokenizer.bos_token_id, *words, self.tokenizer.convert_tokens_to_ids("?")]

    def _report_words(self, texts: list[str], on_unknown: str, is_taught: bool) -> None:
        """Warn of unknown and untaught words of texts, or raise `ValueError`."""
        reports = {"are not in the vocabulary": self.unknown_words(texts)}
        if not is_taught:  # with answers, words are being taught
            reports["the model was not taught, or not reliably"] = self.untaught_words(texts)
        for meaning, words in reports.items():
            names = ", ".join(f"{word!r:.40}" for word in words[:10])
            message = f"words that {meaning}: {names}{f' and {len(words) - 10:,} more' if len(words) > 10 else ''}"
            if words and on_unknown == "raise":
                raise ValueError(message)
            if words:
                warnings.warn(message, UserWarning, stacklevel=4)  # at the line that called the processor

    def unknown_words(self, text: str | Sequence[str]) -> list[str]:
        """The words of a text or texts that are not in the vocabulary, as typed, each once, in order of appearance."""
        return self._words_of(text, lambda token: token == UNKNOWN_TOKEN)

    def untaught_words(self, text: str | Sequence[str]) -> list[str]:
        """The content words of a text or texts that the model was not taught, or not reliably, as typed, each once.

        Empty if `taught` is None: nothing is known then.
        """
        if (taught := self.taught_words) is None:
            return []
        return self._words_of(text, lambda token: is_content_word(token) and token not in taught)

    def _words_of(self, text: str | Sequence[str], is_meant: Callable[[str], bool]) -> list[str]:
        prompts = map(self.prompt, [text] if isinstance(text, str) else text)
        pairs = (pair for prompt in prompts for pair in zip(prompt.tokens[1:-1], prompt.typed))
        return list(dict.fromkeys(word for token, word in pairs if is_meant(token)))

    @property
    def taught_words(self) -> frozenset[str] | None:
        """The words of `taught`; None if they are not known."""
        return None if self.taught is None else frozenset(self.taught)

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        """As in the library; also tokenizes messages whose content is a string, with every version of transformers."""
        # transformers 5.5 and 5.6 look for images and expect each content to be a list of blocks.
        return super().apply_chat_template(_as_blocks(conversation), *args, **kwargs)

    def post_process_image_text_to_text(
        self, generated_outputs: Any, skip_special_tokens: bool = True, **kwargs: Any
    ) -> list[str]:
        """Decode ids [N,L] to N texts.

        A prompt without an answer ends in "? ", including the space before an answer. The ``image-text-to-text``
        pipeline removes the prompt from the start of the full text, and so gets "yes", not " yes".
        """
        texts = self.tokenizer.batch_decode(generated_outputs, skip_special_tokens=skip_special_tokens, **kwargs)
        return [f"{text} " if text.endswith("?") else text for text in texts]


TrafficVLMProcessor.register_for_auto_class()

# The pipeline belongs to each saved folder: the library copies what this file imports.
__all__ = ["TrafficVLMPipeline", "TrafficVLMProcessor"]

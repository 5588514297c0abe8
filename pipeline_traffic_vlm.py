"""The pipeline that answers: images and questions in, answers out.

    images ── opened and resized in threads, while the previous batch is answered ── encoded once ─┐
    questions ── read once each: form, words, problem ─────────────────────────────────────────────┤
        ┌──────────────────────────────────────────────────────────────────────────────────────────┘
        ├─ yes/no questions: one packed pass; yes from p_yes >= 0.5, or from its threshold
        └─ others: words are generated, of its kind, that agree with "Is there …?", "Is it …?"

Everything that asks the model asks through this class: scripts, page, service, labels, video and evaluation. The rules
for reading a question and for what counts as its answer are in `question_traffic_vlm.py`, which needs no torch.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers import Pipeline
from transformers.pipelines import PIPELINE_REGISTRY

from .configuration_traffic_vlm import check_image_size
from .describing_traffic_vlm import QUESTIONS, Caption
from .images_traffic_vlm import BYTES, Region, to_rgb
from .question_traffic_vlm import Question, with_article


__all__ = ["Question", "TrafficVLMPipeline"]

TASK = "visual-question-answering"
THREADS = 4  # default number of threads that prepare images
WHOLE = Region(0, 0, 1, 1)
QUESTIONS_KEPT = 4096  # once read


@dataclass(frozen=True, eq=False)
class Asked:
    """One image with its questions. `EncodedImages` have `key_values`, and need no pixels."""

    image: Any
    questions: list[Question]
    pixels: torch.Tensor | None = None  # [1,3,H,W], unless the image is encoded


Item = tuple[int, Question, dict[str, Any]]  # the index of an image, a question about it, and what is found out


def answer_batches(
    prepare: Callable[..., Any],
    answer: Callable[[list[Any]], Iterable[Any]],
    batch_size: int,
    threads: int,
    items: Iterable[tuple[Any, ...]],
) -> Iterator[Any]:
    """Yield what `answer` returns for each batch of prepared items; an item holds the arguments of `prepare`.

    Threads prepare the next batch while the model answers this one.
    """
    with ThreadPoolExecutor(threads) as pool:
        futures = (pool.submit(prepare, *item) for item in items)
        batch = list(islice(futures, batch_size))
        while batch:
            ahead = list(islice(futures, batch_size))
            yield from answer([future.result() for future in batch])
            batch = ahead


def named(index: int, call: Callable[..., Asked], *args: Any) -> Asked:
    """What a call returns; an error begins with the index of its image."""
    try:
        return call(*args)
    except (TypeError, ValueError) as error:
        raise type(error)(f"image {index}: {error}") from error


class TrafficVLMPipeline(Pipeline):
    """Answer questions about images: the task `visual-question-answering`.

    Args of the constructor and of each call, besides those of the library's pipelines (`device`, `dtype`, `batch_size`
    and `num_workers`, here the number of threads that prepare images):
        region: the part of each image to ask about, as fractions (left, top, width, height); small objects are larger
            in it.
        image_size: side of the pixels that the model looks at, or (height, width), multiples of 32 in 224..640:
            smaller is faster, larger shows smaller objects. By default that of the processor.
        thresholds: P(yes) from which the answer is yes: a number, or an object whose `for_question(text)` gives one
            for each question, as `traffic_vlm.evaluation.thresholds.Thresholds` does. "Is there no car?" is asked
            as "Is there any car?", and has its threshold.
        answer_untaught: True also answers questions about what the model does not know or was not taught; it guesses.
        min_score: score below which a likeliest answer in words is no answer, by default 0.05; the color of a vehicle
            needs 0.7.
        margins: True adds "margin", l_yes - l_no without temperature, to each item that the model was asked.
    """

    _load_processor = True
    # They are parts of the processor.
    _load_tokenizer = _load_image_processor = _load_feature_extractor = _load_video_processor = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.fast = self.model.fast_context()  # passes are fast while this pipeline asks; the model stays unchanged
        self.text_config = self.model.config.get_text_config()
        self.located: dict[str, float] = getattr(self.model.config.vision_config, "located", {})
        self._read_once = lru_cache(QUESTIONS_KEPT)(self._read)  # the same are usually asked about many images

    def _sanitize_parameters(
        self,
        region: Any = None,
        image_size: Any = None,
        thresholds: Any = None,
        margins: bool | None = None,
        answer_untaught: bool | None = None,
        min_score: float | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        if thresholds is not None and not hasattr(thresholds, "for_question"):
            if not isinstance(thresholds, int | float):
                raise TypeError(f"thresholds must be a number or loaded thresholds, got {thresholds!r:.80}")
            if not 0 <= thresholds <= 1:
                raise ValueError(f"thresholds must be in 0..1, got {thresholds}")
        preprocess = {
            "region": None if region is None else Region.of(region),
            "image_size": None if image_size is None else check_image_size(image_size),
            "answer_untaught": answer_untaught,
        }
        forward = {"thresholds": thresholds, "margins": margins, "min_score": min_score}
        first, second = ({k: v for k, v in some.items() if v is not None} for some in (preprocess, forward))
        return first, second, {}

    def __call__(
        self,
        image: Any = None,
        question: Any = None,
        batch_size: int | None = None,
        num_workers: int | None = None,
        **options: Any,
    ) -> Any:
        """Answers to questions about images.

        Args:
            image: an image (whatever `to_rgb` reads: a path, a PIL image, an array, bytes, an open file, ...), an
                encoded image of `encode`, or a list of them; or dictionaries with "image" and "question" in their
                place. Generators and datasets of torch or `datasets` are read as they are consumed.
            question: one question or a list; with several images, also one list of questions for each.
            batch_size: number of images in one pass, by default 1.
            num_workers: number of threads that prepare images.
            options: see the class.

        Returns:
            for one image a list with a dictionary for each question; for several images a list of these lists, for
            an iterator a generator of them. The keys are "question"; "answer", None if there is none; "score", the
            probability of the answer, for words the geometric mean; "p_yes", calibrated P(yes) of yes/no questions,
            else None; "not_sure" of these, with loaded thresholds; "unknown_words", "untaught_words" and "problem",
            why a question was not answered, if there are any. A problem does not affect the other questions.

        Raises:
            ValueError, TypeError: an unknown option; no image, or one that cannot be read; no question; lists that do
                not fit together; an encoded image of another model. FloatingPointError: a logit is NaN or infinite.
        """
        preprocess, forward, _ = self._sanitize_parameters(**options) if options else ({}, {}, {})
        preprocess = self._preprocess_params | preprocess
        ask = partial(self._ask, answer_untaught=preprocess.pop("answer_untaught", False))
        prepare: Callable[[Asked], Asked] = partial(self.preprocess, **preprocess)
        answer = partial(self.forward, **(self._forward_params | forward))
        batch_size = (self._batch_size or 1) if batch_size is None else batch_size
        threads = (self._num_workers or THREADS) if num_workers is None else num_workers
        for name, number, least in (("batch_size", batch_size, 1), ("num_workers", threads, 0)):
            if not isinstance(number, int) or number < least:
                raise ValueError(f"{name} must be a whole number, at least {least}, got {number!r}")

        def batches(pairs: Iterable[tuple[Any, Any]]) -> Iterator[list[dict[str, Any]]]:
            items = ((i, prepare, named(i, ask, *pair)) for i, pair in enumerate(pairs))
            return answer_batches(named, answer, batch_size, threads or THREADS, items)

        is_iterator = isinstance(image, Iterator) and not hasattr(image, "read")  # an open file iterates over lines
        # Images come one by one: from a generator, or a dataset of torch or of the library `datasets`.
        if is_iterator or isinstance(image, Dataset) or hasattr(image, "column_names"):
            items = image if isinstance(image, Iterable) else map(image.__getitem__, range(len(image)))
            return batches((item, question) for item in items)
        is_list = isinstance(image, Sequence) and not isinstance(image, str | BYTES)
        if not (is_list or getattr(image, "ndim", 0) == 4 or (hasattr(image, "key_values") and len(image) > 1)):
            return answer([prepare(ask(image, question))])[0]
        images = [image[i] for i in range(len(image))]
        if not images:
            raise ValueError("no image was given: the list is empty")
        has_lists = isinstance(question, list | tuple) and any(isinstance(row, list | tuple) for row in question)
        if has_lists and len(question) != len(images):
            raise ValueError(f"{len(question)} lists of questions for {len(images)} images: give one for each image")
        return list(batches(zip(images, question if has_lists else [question] * len(images))))

    def _ask(self, image: Any, question: Any, answer_untaught: bool) -> Asked:
        """An image, or what a dictionary holds, with its questions, checked and tokenized."""
        # A dictionary of bytes and path alone is an image: a cell of the library `datasets` that is not decoded.
        if isinstance(image, Mapping) and not image.keys() <= {"bytes", "path"}:
            if "image" not in image or ("question" in image) == (question is not None):
                given = f"{list(image)!s:.50} and question={question!r:.50}"
                raise ValueError(f'expected a dictionary with "image", and one "question" in all, got {given}')
            image, question = image["image"], image.get("question", question)
        if image is None:
            raise ValueError("no image was given")
        if hasattr(image, "key_values") and len(image) != 1:
            raise ValueError(f"expected one encoded image, got {len(image)}")
        questions = question if isinstance(question, list | tuple) else [question]
        if not questions or question is None:
            raise ValueError("no question was given")
        if other := [one for one in questions if not isinstance(one, str)]:
            raise TypeError(f"a question must be a string, got {type(other[0]).__name__}: {other[0]!r:.80}")
        return Asked(image, [self.read_question(one, answer_untaught) for one in questions])

    def encode(self, image: Any, region: Any = None, image_size: Any = None) -> Any:
        """`EncodedImages` of an image or a list, to ask about them later: `vqa(vqa.encode(image), question)`.

        `region` and `image_size` are those of the pipeline by default. An image that cannot be read raises TypeError
        or ValueError.
        """
        own = self._preprocess_params
        region = own.get("region") if region is None else region
        image_size = own.get("image_size") if image_size is None else image_size
        pixels = self.processor.pixels(image, region, image_size)
        with self.fast:
            return self.model.encode_images(pixels.to(self.device))

    def locate(
        self,
        image: Any,
        labels: str | Sequence[str] = "all",
        region: Any = None,
        image_size: Any = None,
        size: tuple[int, int] | None = None,
    ) -> list[dict[str, Any]]:
        """Objects in one image, best first: [{"label", "score", "box": [x0, y0, x1, y1], "point": [x, y]}].

        The point is the center of the object. Positions are pixels of the image, also with a `region`. A class is left
        out if "Is there a car?" is answered no.

        Args:
            image: as in a call, or an encoded image.
            labels: as of `read_labels`.
            region, image_size: as of `encode`; an encoded image has the region that it was encoded with.
            size: (width, height) in pixels of the image that was encoded; by default the size it is encoded at.

        Raises:
            ValueError, TypeError: a class that is not located; an image that cannot be read, or several images; a
                region of an encoded image without `size`.
        """
        names = self.read_labels(labels)
        part = (self._preprocess_params.get("region") or WHOLE) if region is None else Region.of(region)
        if not hasattr(image, "key_values"):
            picture = to_rgb(image)
            image, size = self.encode(picture, part, image_size), picture.size
        elif image_size not in (None, image.image_size):
            raise ValueError(f"the image is encoded at {image.image_size} pixels: pass image_size to `encode`")
        if len(image) != 1:
            raise ValueError(f"locate takes one image, got {len(image)}")
        if region is not None and not size:
            raise ValueError(f"for the region {region!r} of an encoded image, pass size=(width, height) of the image")
        left, top, right, bottom = part.box(size) if size else (0, 0, *image.image_size[::-1])

        def in_pixels(fractions: list[float]) -> list[float]:  # x, y, or x, y, x, y
            starts, sides = (left, top) * 2, (right - left, bottom - top) * 2
            return [round(start + share * side, 1) for share, start, side in zip(fractions, starts, sides)]

        objects = [
            {"label": name, "score": round(score, 4), "box": in_pixels(box), "point": in_pixels(point)}
            for name in names
            for score, box, point in self.model.locate(image, name)[0]
        ]
        presence = {f"Is there {with_article(found['label'])}?": found["label"] for found in objects}
        items = self(image, [*presence]) if presence else []
        absent = {presence[item["question"]] for item in items if item["answer"] == "no"}
        return sorted((one for one in objects if one["label"] not in absent), key=lambda found: -found["score"])

    def read_labels(self, labels: str | Sequence[str] = "all") -> list[str]:
        """Classes to locate: those of a label such as "bus" or of a list; "all" are all that the model locates.

        Raises:
            ValueError: a class that the model does not locate, or it locates nothing.
        """
        names = [labels] if isinstance(labels, str) else [*labels]
        unknown = [name for name in names if name not in ("all", *self.located)]
        if unknown or not self.located:
            known = ", ".join(self.located) or "nothing, as this model has no center head"
            raise ValueError(f"locate knows: {known}" + (f"; got {unknown[0]!r:.80}" if unknown else ""))
        return [*self.located] if "all" in names else list(dict.fromkeys(names))

    def describe(self, image: Any, sure: float = 0.8, region: Any = None, image_size: Any = None) -> dict[str, Any]:
        """A caption of one image, of what is sure: {"caption", "facts": [{"question", "p_yes"}]}.

        The facts are the answers that the caption says. Sides and numbers need a model with a center head.

        Args:
            image: as in a call, or an encoded image.
            sure: P(yes) from which a yes is sure, and P(no) from which it is sure that no road is in view.
            region, image_size: as of `encode`.

        Raises:
            ValueError, TypeError: `sure` is not in 0.5..1; an image that cannot be read, or several images.
        """
        if not 0.5 <= sure <= 1:
            raise ValueError(f"sure must be in 0.5..1, got {sure}")
        options: dict[str, Any] = {"region": region, "image_size": image_size}
        if not hasattr(image, "key_values"):
            image, options = self.encode(image, **options), {}
        if len(image) != 1:
            raise ValueError(f"describe takes one image, got {len(image)}")
        items = self(image, [*QUESTIONS], answer_untaught=False, **options)
        p_yes = {item["question"]: item["p_yes"] for item in items if item["p_yes"] is not None}
        located = self.located if image.centers is not None else ()
        centers = [(name, x) for name in located for _, _, (x, _) in self.model.locate(image, name)[0]]
        caption = Caption(p_yes, centers, sure)
        return {"caption": caption.text, "facts": [{"question": one, "p_yes": p_yes[one]} for one in caption.said]}

    def read_question(self, text: str, answer_untaught: bool | None = None) -> Question:
        """The question, checked and tokenized. If its answer would be a guess, that is a problem, unless
        `answer_untaught`."""
        if answer_untaught is None:
            answer_untaught = self._preprocess_params.get("answer_untaught", False)
        processor = self.processor
        options = (processor.taught_words, processor.own_questions, answer_untaught)
        return self._read_once(text, processor.tokenizer, processor.rules, *options)

    def _read(self, text: str, tokenizer: Any, rules: Any, *options: Any) -> Question:
        limit = min(self.text_config.max_position_embeddings, tokenizer.model_max_length)
        return rules.read(text, self.processor.prompt, limit, *options)

    def preprocess(self, inputs: Asked, region: Any = None, image_size: Any = None) -> Asked:
        """The image with its pixels, unless it is encoded. Runs in threads."""
        if not hasattr(inputs.image, "key_values"):
            return replace(inputs, image=None, pixels=self.processor.pixels([inputs.image], region, image_size))
        if image_size not in (self._preprocess_params.get("image_size"), inputs.image.image_size):
            raise ValueError(f"the image is encoded at {inputs.image.image_size} pixels: pass image_size to `encode`")
        if region != self._preprocess_params.get("region"):  # `encode` has cut out that of the pipeline
            raise ValueError("a region cannot be cut out of an encoded image: pass it to `encode`")
        return inputs

    def _forward(
        self, rows: Sequence[Asked], thresholds: Any = 0.5, margins: bool = False, min_score: float = 0.05
    ) -> list[list[dict[str, Any]]]:
        if self.model.training:
            raise ValueError("the model is in training mode, which changes its answers: call model.eval() first")
        find_threshold: Callable[[str], Any] = getattr(thresholds, "for_question", lambda text: thresholds)
        items: list[Item] = [
            (image, question, {"problem": question.problem})
            for image, row in enumerate(rows)
            for question in row.questions
        ]
        scored: list[Item] = []
        in_words: list[tuple[Item, list[Item]]] = []  # with its `checks`
        for image, question, found in (item for item in items if item[1].problem is None):
            if margins or question.is_yes_no:
                scored.append((image, question, found))
            if not question.is_yes_no:
                checks: list[Item] = [(image, one, {}) for _, one in question.checks]
                in_words.append(((image, question, found), checks))
                scored += checks
        with self.fast:
            encoded = self._encode(rows)
            scores = self._score(encoded, scored) if scored else []
            for (_, question, found), (p, margin) in zip(scored, scores):
                if question.is_yes_no:
                    found |= question.yes_or_no(p, find_threshold(question.asked))
                if margins:
                    found["margin"] = -margin if question.is_negated else margin
            asked: list[Item] = []
            for (image, question, found), checks in in_words:
                is_yes = [answer["answer"] == "yes" for _, _, answer in checks]
                asked.append((image, question.agreeing(is_yes) if checks else question, found))
            words = self._generate(encoded, asked) if asked else []
        for (_, question, _), p in zip(scored + asked, [p for p, _ in scores] + [p for _, p in words]):
            if not math.isfinite(p):
                raise FloatingPointError(f"the model answers {question.text!r:.80} with a probability of {p}")
        for (_, question, found), (answer, score) in zip(asked, words):
            found |= question.answer_in_words(answer, score, min_score)
        answers = iter([question.item(**found) for _, question, found in items])
        return [[next(answers) for _ in row.questions] for row in rows]

    def postprocess(self, model_outputs: Any) -> Any:  # the base class requires it
        return model_outputs

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Save a folder that loads by itself: model, processor and code."""
        self.model.save_pretrained(save_directory, **kwargs)
        self.processor.save_pretrained(save_directory)

    def _encode(self, rows: Sequence[Asked]) -> Any:
        """The images of all rows, encoded together."""
        pixels = [row.pixels.to(self.device) for row in rows if row.pixels is not None]
        if len(pixels) == len(rows):
            return self.model.encode_images(torch.cat(pixels))
        new = map(self.model.encode_images, pixels)
        parts = [row.image if row.pixels is None else next(new) for row in rows]
        return parts[0] if len(parts) == 1 else type(parts[0]).join(parts)

    def _score(self, encoded: Any, asked: Sequence[Item]) -> list[tuple[float, float]]:
        """(P(yes), l_yes - l_no) of each question, from one packed pass."""
        prompts: list[list[Any]] = [[] for _ in range(len(encoded))]
        for image, question, _ in asked:
            prompts[image].append((question.input_ids, ()))
        logits, _ = self.model.question_logits(**self.processor.lay_out(prompts), encoded_images=encoded)  # [Q,V]
        yes, no = self.text_config.yes_token_id, self.text_config.no_token_id
        margins = (logits[:, yes].float() - logits[:, no].float()).tolist()
        return list(zip(self.model.yes_probability(logits, encoded.image_size).tolist(), margins))

    def _generate(self, encoded: Any, asked: Sequence[Item]) -> list[tuple[str, float]]:
        """(greedy answer in words, geometric mean of the probabilities of its words and its end) of each question.

        The probability of a whole sentence is always near 0.
        """
        images, questions, _ = zip(*asked)
        most, new_tokens = self.text_config.max_position_embeddings, self.model.generation_config.max_new_tokens
        if len(asked) > 1 and max(len(question.input_ids) for question in questions) > most - new_tokens:
            # A long question leaves less room, and would cut the answers to the others: each is asked alone.
            return [answer for item in asked for answer in self._generate(encoded, [item])]
        prompts = self.processor.lay_out([[(question.input_ids, ())] for question in questions], packed=False)
        length = prompts["input_ids"].shape[1]
        tokenizer, vocabulary = self.processor.tokenizer, self.processor.tokenizer.get_vocab()
        no_first = {self.text_config.yes_token_id, self.text_config.no_token_id, *self.text_config.suppressed_tokens}

        def find_next(row: int, ids: torch.Tensor) -> list[int]:
            words = tokenizer.convert_ids_to_tokens(ids[length:].tolist())
            return questions[row].next_ids(words, vocabulary, no_first)

        output = self.model.generate(
            **prompts.to(self.device),
            encoded_images=encoded,
            image_index=torch.tensor(images, device=self.device),
            prefix_allowed_tokens_fn=find_next,
            max_new_tokens=min(new_tokens, most - length),
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[:, length:]  # [N,T]
        log_p = torch.stack(output.logits, 1).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        is_word = tokens != self.text_config.pad_token_id  # padding follows the end
        scores = (log_p.masked_fill(~is_word, 0.0).sum(-1) / is_word.sum(-1)).exp().tolist()
        return list(zip(self.processor.batch_decode(tokens, skip_special_tokens=True), scores))


# The library reads the task of a folder from config.json; for a model in memory it needs a registered task. It has
# removed its own task of this name, and newer releases refuse the name before they look it up.
getattr(transformers.pipelines, "REMOVED_TASKS", {}).pop(TASK, None)
if TASK not in PIPELINE_REGISTRY.supported_tasks:
    model_class = transformers.AutoModelForImageTextToText
    PIPELINE_REGISTRY.register_pipeline(TASK, TrafficVLMPipeline, model_class, type="multimodal")

"""The demo page: an image, questions one per line, answers as they are generated, and the attention of each word.

image ── encoded once, kept with the session ──┐
questions ── yes/no in one packed pass ────────┴→ table ── words, as they are generated ──→ table
a word of a question ── its cross-attention ──→ drawn over the image

A sentence about a bad image is shown beside it; a question that is not answered has its sentence in its row.
"""

import hashlib
import html
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image
from transformers import TextIteratorStreamer

from ..answer_kind_traffic_vlm import NONE
from ..image_files import open_image
from ..images_traffic_vlm import Region
from ..pipeline_traffic_vlm import TrafficVLMPipeline
from ..question_traffic_vlm import answer_notes, answer_text
from .overlay import asked_word, attention_of_question, heat_over, map_strength, mapped_words
from .suggestions import suggest_questions


MAX_QUESTIONS = 64
SESSION_SECONDS = 3600  # after which the encoded image of a session and uploaded files are deleted
DELETING = (300, SESSION_SECONDS)  # every 300 seconds, files that are older
PICTURE_WIDTH = 896  # of the picture under the attention, pixels

SURE = 0.6  # answers of lower probability are shown as "not sure", unless thresholds say which are

EXAMPLES = ("crossing.jpg", "night.jpg", "truck.jpg")  # photographs in docs/
QUESTIONS = """Is there a car?
Is there a traffic light?
What color is the traffic light?
Is there a stop sign?
What is the speed limit?
What time of day is it?"""
INTRODUCTION = """# Traffic VLM
Encodes a photograph of traffic once and answers many questions about it.

**For** a cheap first look at many frames: vehicles, people, signs, lights, sides, weather, time of day. The weights of
this repository are for research and non-commercial use.

**Not for** decisions that a person's safety depends on. Accidents and what to do next were not taught; small and
distant objects are lost."""
STYLE = """
#answers table { width: 100%; table-layout: fixed; border: 0; border-collapse: collapse; }
#answers tr { background: none; border: 0; }
#answers th, #answers td { text-align: left; vertical-align: top; padding: .5rem .75rem .5rem 0; border: 0;
    border-bottom: 1px solid var(--border-color-primary); overflow-wrap: break-word; }
#answers th { font-weight: normal; }
#answers .confidence { display: flex; align-items: center; gap: .5rem; font-variant-numeric: tabular-nums; }
#answers meter { flex: 1; min-width: 2rem; max-width: 10rem; }
.note { font-size: .875rem; opacity: .8; }
#image_problem:not(:has(.problem)), #note:not(:has(.note, .problem)) { display: none; }
body:has(#image_problem .problem) #image img { visibility: hidden; }
.problem { padding: .5rem .75rem; border-left: 4px solid #c22; background: var(--block-background-fill); }
"""


@dataclass(frozen=True, eq=False)
class EncodedPicture:
    """The encoded image of a session.

    Attributes:
        key: hash of the file.
        encoded: the encoded image, for the pipeline.
        picture: RGB, at most PICTURE_WIDTH wide.
    """

    key: str
    encoded: Any = field(repr=False)
    picture: Image.Image = field(repr=False)


def split_questions(text: str) -> list[str]:
    """The questions in a text, one per line.

    Raises:
        ValueError: there are none, or more than MAX_QUESTIONS.
    """
    questions = [line.strip() for line in text.splitlines() if line.strip()]
    if not questions:
        raise ValueError("Write at least one question.")
    if len(questions) > MAX_QUESTIONS:
        raise ValueError(f"These are {len(questions)} questions; at most {MAX_QUESTIONS} are answered at once.")
    return questions


@dataclass(frozen=True)
class Step:
    """What the page shows at one moment of answering: the encoded image, items of the pipeline, and HTML.

    The item of an answer that is being generated has the text so far as "answer", and the score None.
    """

    image: EncodedPicture | None
    status: str = ""
    items: Sequence[Mapping[str, Any]] = ()
    image_problem: str = ""
    questions_note: str = ""

    @property
    def answered(self) -> list[Mapping[str, Any]]:
        return [item for item in self.items if item["score"] is not None]


def problem(error: ValueError | str) -> str:
    """The sentence of an error as HTML."""
    return f'<div class="problem" role="alert">{html.escape(str(error))}</div>'


def show_notes(notes: Sequence[str]) -> str:
    """Notes as HTML."""
    return "".join(f'<div class="note">{html.escape(note)}</div>' for note in notes)


def table(items: Sequence[Mapping[str, Any]]) -> str:
    """Questions with their answers or problems as HTML; "" without any."""
    if not items:
        return ""
    head = "<tr><th>question</th><th>answer and its probability</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{''.join(map(table_row, items))}</tbody></table>"


def table_row(item: Mapping[str, Any]) -> str:
    notes, score = answer_notes(item), item["score"]
    text = html.escape("none seen" if item["answer"] == NONE else item["answer"] or "…")
    if "problem" in item:
        shown = show_notes([item["problem"]])
    elif score is None:
        shown = f"<strong>{text}</strong>"
    else:
        is_sure = not (notes or item.get("not_sure", score < SURE))
        shown = f"<strong>{text}</strong>" if is_sure else f"<em>{text}</em>, not sure"
        yellow = "" if is_sure else ' low="1" optimum="1"'  # otherwise green
        meter = f'<meter value="{score:.2f}"{yellow} aria-label="probability"></meter>'
        shown += f'<div class="confidence">{meter}{score:.2f}</div>'
    return f"<tr><td>{html.escape(item['question'])}{show_notes(notes)}</td><td>{shown}</td></tr>"


class Page:
    """The functions behind the page, independent of Gradio.

    Args:
        region: the part of each image that the pipeline is asked about; by default all of it.
    """

    def __init__(self, pipe: TrafficVLMPipeline, region: Region | None = None):
        self.pipe, self.region = pipe, region

    def note_on_questions(self, text: str) -> str:
        """What is to be said about the questions before they are asked, as HTML; "" if nothing is."""
        text, processor = text.strip(), self.pipe.processor
        try:
            if text:
                split_questions(text)
        except ValueError as error:
            return problem(error)
        words = {"unknown_words": processor.unknown_words(text), "untaught_words": processor.untaught_words(text)}
        return show_notes(answer_notes(words))

    def image_problem(self, path: str | None) -> str:
        """Why an image cannot be read, as HTML; "" if it can be."""
        try:
            if path is not None:
                open_image(path)
        except ValueError as error:
            return problem(error)
        return ""

    def encode(self, path: str | None, last: EncodedPicture | None) -> tuple[EncodedPicture, float]:
        """The encoded image, `last` if it is the same one, and the seconds that encoding took."""
        if path is None:
            raise ValueError("Choose an image first.")
        try:
            key = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except FileNotFoundError as error:
            raise ValueError("The image has been deleted, as all are after an hour. Choose it again.") from error
        if last is not None and last.key == key:
            return last, 0.0
        picture = open_image(path)
        start = time.perf_counter()
        encoded = self.pipe.encode(picture)
        seconds = time.perf_counter() - start
        picture = picture if self.region is None else self.region.crop(picture)
        if picture.width > PICTURE_WIDTH:
            picture = picture.resize((PICTURE_WIDTH, max(1, round(picture.height * PICTURE_WIDTH / picture.width))))
        return EncodedPicture(key, encoded, picture), seconds

    def answer(self, path: str | None, text: str, last: EncodedPicture | None) -> Iterator[Step]:
        """Yield what to show, repeatedly while answers in words grow. A bad question does not stop the others."""
        note = self.note_on_questions(text)
        try:
            questions = split_questions(text)
        except ValueError as error:
            yield Step(last, questions_note=problem(error))
            return
        try:
            image, encoding = self.encode(path, last)
        except ValueError as error:
            yield Step(last, image_problem=problem(error), questions_note=note)
            return
        status = f"Image encoded in {1000 * encoding:.0f} ms." if encoding else "Same image, not encoded again."
        start = time.perf_counter()
        items = self.pipe(image.encoded, questions, generate_words=False)
        asked = [item for item in items if "problem" not in item]
        if asked:
            status += f" Questions in one pass: {len(asked)}, in {1000 * (time.perf_counter() - start):.0f} ms."
        status = f'<div class="note" role="status">{status}</div>'
        yield Step(image, status, list(items), questions_note=note)
        for i, item in enumerate(items):
            if item["answer"] is None and "problem" not in item:
                for items[i] in self.generate(image.encoded, item):
                    yield Step(image, status, list(items), questions_note=note)

    def generate(self, encoded: Any, item: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yield the item of a question in words with the answer so far, at last with all of it."""
        streamer = TextIteratorStreamer(self.pipe.tokenizer, skip_prompt=True, skip_special_tokens=True)
        with ThreadPoolExecutor(1) as thread:
            generated = thread.submit(self.pipe, encoded, item["question"], streamer=streamer)
            generated.add_done_callback(lambda _: streamer.end())  # also after an error
            answer = ""
            for piece in streamer:
                answer += piece
                yield {**item, "answer": answer}
            yield generated.result()[0]

    def words(self, items: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """The words of answered questions that have a map as choices: the label, and "column:question"."""
        return [
            (f"{word} · {question}", f"{column}:{question}")
            for question in dict.fromkeys(item["question"] for item in items)
            for column, word in mapped_words(self.pipe, question)
        ]

    def first_word(self, items: Sequence[Mapping[str, Any]]) -> str | None:
        """The choice for the word asked about in the first question whose map is strongest."""
        question = max(items, key=map_strength)["question"]
        found = asked_word(self.pipe, question)
        return f"{found[0]}:{question}" if found else None

    def overlay(self, choice: str | None, image: EncodedPicture | None) -> tuple[Image.Image | None, str]:
        """The image with the map of a word of `words`, and its caption; no image for an invalid choice."""
        column, _, question = (choice or "").partition(":")
        words = {str(place): word for place, word in mapped_words(self.pipe, question)}
        if image is None or column not in words:
            return None, ""
        [item] = self.pipe(image.encoded, question)
        if item["answer"] is None:
            return None, ""
        weights = attention_of_question(self.pipe, image.encoded, question)[int(column)]
        strength = map_strength(item)
        faded = " Faded, as probably nothing is there." if strength < 1 else ""
        caption = html.escape(f"{question} {answer_text(item)}. Orange: where “{words[column]}” attends.{faded}")
        return heat_over(image.picture, weights, strength), f'<div class="note">{caption}</div>'


def add_question(question: str | None, text: str) -> tuple[str, None]:
    """The questions with one more line, if it is not among them, and no choice for the next suggestion."""
    lines = [line for line in text.splitlines() if line.strip()]
    if question and question not in lines:
        lines.append(question)
    return "\n".join(lines), None


def path_of(payload: Any) -> str | None:
    """The path of an uploaded file, whatever it contains."""
    return payload and payload.path


def build_page(pipe: TrafficVLMPipeline, examples: Sequence[Path], region: Region | None = None) -> gr.Blocks:
    """The page for a loaded model, with example images."""
    page = Page(pipe, region)
    no_map = (gr.Column(visible=False), gr.Dropdown(choices=[], value=None), None, "")

    def ask(path: str | None, text: str, last: EncodedPicture | None) -> Iterator[tuple[Any, ...]]:
        for step in page.answer(path, text, last):
            shown = step.image_problem, step.questions_note, step.status, table(step.items), step.image
            yield *shown, *[gr.skip() for _ in no_map]
        if step.answered:
            first = page.first_word(step.answered)
            words = gr.Dropdown(choices=page.words(step.answered), value=first)
            yield *shown, gr.Column(visible=True), words, *page.overlay(first, step.image)
        else:
            yield *shown, *no_map

    with gr.Blocks(title="Traffic VLM", analytics_enabled=False, delete_cache=DELETING) as blocks:
        gr.Markdown(INTRODUCTION)
        encoded = gr.State(None, time_to_live=SESSION_SECONDS)
        with gr.Row():
            with gr.Column():
                image = gr.Image(
                    label="Image",
                    show_label=False,  # it would cover a corner of the image
                    type="filepath",
                    image_mode=None,
                    sources=["upload", "webcam", "clipboard"],
                    buttons=[],
                    height=320,
                    elem_id="image",
                )
                # Pass on the path of any file: `open_image` explains what is wrong with it, Gradio would not.
                image.preprocess = path_of  # type: ignore[method-assign]
                image_problem = gr.HTML(elem_id="image_problem")
                gr.Examples([[str(path)] for path in examples], image, label="Example photographs")
                questions = gr.Textbox(
                    QUESTIONS, label="Questions, one per line (Shift+Enter asks)", lines=6, elem_id="questions"
                )
                note = gr.HTML(elem_id="note")
                suggested = suggest_questions(pipe.processor).items()
                suggestion = gr.Dropdown(
                    [(f"{question_type}: {question}", question) for question, question_type in suggested],
                    value=None,
                    label="Add a question of taught words (type to search)",
                    elem_id="suggestion",
                )
                button = gr.Button("Ask", variant="primary", elem_id="ask")
            with gr.Column():
                status = gr.HTML(elem_id="status")
                answers = gr.HTML(elem_id="answers", min_height=100)  # room for the spinner
                with gr.Column(visible=False) as maps:
                    word = gr.Dropdown([], label="Map of a word", elem_id="word")
                    overlay = gr.Image(label="Map", show_label=False, buttons=[], interactive=False, elem_id="overlay")
                    caption = gr.HTML(elem_id="caption")
        map_parts = [maps, word, overlay, caption]
        outputs = [image_problem, note, status, answers, encoded, *map_parts]
        asking = gr.on(
            [button.click, questions.submit], ask, [image, questions, encoded], outputs, show_progress_on=answers
        )
        questions.change(page.note_on_questions, questions, note, show_progress="hidden")
        suggestion.input(add_question, [suggestion, questions], [questions, suggestion], show_progress="hidden")
        word.input(page.overlay, [word, encoded], [overlay, caption], show_progress="hidden")
        # The browser handles these in order: stop the answers about the previous image, then clear them.
        image.change(None, cancels=[asking])
        cleared = [status, answers, *map_parts]
        image.change(lambda: ("", "", *no_map), None, cleared, show_progress="hidden")
        image.change(page.image_problem, image, image_problem, show_progress="hidden")
    return blocks


def launch(blocks: gr.Blocks, examples: Sequence[Path], **options: Any) -> tuple[Any, str, str]:
    """Serve the page, on this machine only unless GRADIO_SERVER_NAME says otherwise. The fonts are local."""
    return blocks.queue(max_size=32).launch(
        css=STYLE,
        theme=gr.themes.Default(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace")),
        max_file_size="30mb",
        allowed_paths=[str(path) for path in examples],
        **options,
    )

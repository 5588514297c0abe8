"""The demo page: an image, questions one per line, answers as they are generated, and the attention of each word.

image ── encoded once, kept with the session ──┐
questions ── yes/no in one packed pass ────────┴→ table with P(yes) ── words, as they are generated ──→ table
a word of a question ── its cross-attention ──→ drawn over the image
"""

import hashlib
import html
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from .answerer import Answer, Answerer
from .overlay import asked_word, attention_of_question, heat_over
from .pictures import open_picture


MAX_QUESTIONS = 64
SESSION_SECONDS = 3600  # after which the encoded image of a session and uploaded files are deleted
DELETING = (300, SESSION_SECONDS)  # every 300 seconds, files that are older
PICTURE_WIDTH = 896  # of the picture under the attention, pixels

QUESTIONS = "Is there a pedestrian?\nIs there a bus on the left?\nWhat color is the traffic light?\nWhat is ahead?"
INTRODUCTION = """# Traffic VLM
Encodes a traffic scene once and answers many questions about it."""
STYLE = """
.answers { width: 100%; border-collapse: collapse; table-layout: fixed; }
.answers th:nth-child(1) { width: 38%; } .answers th:nth-child(2) { width: 28%; }
.answers th, .answers td { text-align: left; padding: .4rem .3rem; vertical-align: middle; overflow-wrap: break-word; }
.answers .number { text-align: right; font-variant-numeric: tabular-nums; }
.answers meter { width: 100%; }
.problem { padding: .5rem .75rem; border-left: 4px solid #c22; background: var(--block-background-fill); }
"""


@dataclass(frozen=True, eq=False)
class EncodedPicture:
    """The encoded image of a session.

    Attributes:
        key: hash of the file.
        encoded: the encoded image, for `Answerer`.
        picture: RGB, at most PICTURE_WIDTH wide.
    """

    key: str
    encoded: Any = field(repr=False)
    picture: Image.Image = field(repr=False)


def split_questions(text: str) -> list[str]:
    """Return the questions in a text, one per line.

    Raises:
        ValueError: there are none, or more than MAX_QUESTIONS.
    """
    questions = [line.strip() for line in text.splitlines() if line.strip()]
    if not questions:
        raise ValueError("Write at least one question.")
    if len(questions) > MAX_QUESTIONS:
        raise ValueError(f"These are {len(questions)} questions; at most {MAX_QUESTIONS} are answered at once.")
    return questions


def table(rows: Sequence[tuple[str, Answer | str | None, float | None]]) -> str:
    """Return questions, answers (a partial text, or None before it) and their seconds as an HTML table."""
    lines = []
    for question, answer, seconds in rows:
        text = answer.shown if isinstance(answer, Answer) else answer or "…"
        p_yes = answer.yes_probability if isinstance(answer, Answer) else None
        meter = "" if p_yes is None else f'<meter value="{p_yes:.2f}" aria-label="P(yes)"></meter>{p_yes:.2f}'
        unsure = ", not sure" if isinstance(answer, Answer) and answer.not_sure else ""
        took = "" if seconds is None else f"{1000 * seconds:.1f} ms"
        lines.append(
            f"<tr><td>{html.escape(question)}</td><td><strong>{html.escape(text)}</strong>{unsure}</td>"
            f'<td class="number">{meter}</td><td class="number">{took}</td></tr>'
        )
    head = "<tr><th>question</th><th>answer</th><th>P(yes)</th><th>time</th></tr>"
    return f'<table class="answers"><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table>'


class Page:
    """The functions behind the page, independent of Gradio."""

    def __init__(self, answerer: Answerer):
        self.answerer, self.processor = answerer, answerer.processor

    def list_unknown_words(self, text: str) -> str:
        """Return the words in the questions that the model ignores, or was not taught, as HTML."""
        notes = []
        if unknown := self.processor.unknown_words(text.strip()):
            notes.append(f"unknown words, ignored: {html.escape(', '.join(unknown))}")
        if untaught := self.processor.untaught_words(text.strip()):
            notes.append(f"words not taught, or not reliably: {html.escape(', '.join(untaught))}")
        return "<br>".join(notes)

    def encode(self, path: str | None, last: EncodedPicture | None) -> tuple[EncodedPicture, float]:
        """Return the encoded image, `last` if it is the same one, and the seconds that encoding took."""
        if path is None:
            raise ValueError("Choose an image first.")
        try:
            key = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except FileNotFoundError as error:
            raise ValueError("The image has been deleted, as all are after an hour. Choose it again.") from error
        if last is not None and last.key == key:
            return last, 0.0
        picture = open_picture(path)
        start = time.perf_counter()
        encoded = self.answerer.encode(self.answerer.read([picture]))
        seconds = time.perf_counter() - start
        if picture.width > PICTURE_WIDTH:
            picture = picture.resize((PICTURE_WIDTH, max(1, round(picture.height * PICTURE_WIDTH / picture.width))))
        return EncodedPicture(key, encoded, picture), seconds

    def answer(
        self, path: str | None, text: str, last: EncodedPicture | None
    ) -> Iterator[tuple[str, str, EncodedPicture | None]]:
        """Yield status, table and encoded image, repeatedly while answers in words grow."""
        try:
            questions = split_questions(text)
            image, encoding = self.encode(path, last)
            start = time.perf_counter()
            [answers] = self.answerer.classify(image.encoded, [questions])
            seconds = time.perf_counter() - start
        except ValueError as error:
            yield f'<div class="problem" role="alert">{html.escape(str(error))}</div>', "", last
            return
        once = f"image encoded in {1000 * encoding:.0f} ms" if encoding else "same image, not encoded again"
        status = f"{once} · all {len(questions)} questions in one pass: {1000 * seconds:.0f} ms"
        each = seconds / len(questions)
        rows: list[Any] = [(q, answer, each if answer else None) for q, answer in zip(questions, answers)]
        yield status, table(rows), image
        for i, question in enumerate(questions):
            if answers[i] is None:
                start = time.perf_counter()
                text = ""
                for piece in self.answerer.stream(image.encoded, question):
                    if isinstance(piece, str):
                        text += piece
                    rows[i] = (question, text if isinstance(piece, str) else piece, time.perf_counter() - start)
                    yield status, table(rows), image

    def words(self, text: str) -> list[tuple[str, str]]:
        """Return the words of the questions as choices: the label, and "column:question"."""
        choices = []
        for question in dict.fromkeys(split_questions(text)):
            ids = self.processor(text=question, on_unknown="ignore")["input_ids"][0]
            for column, word in enumerate(self.processor.tokenizer.convert_ids_to_tokens(ids)):
                if word.isalpha():
                    choices.append((f"{word}  ({question})", f"{column}:{question}"))
        return choices

    def first_word(self, text: str) -> str | None:
        """Return the choice for the word that the first question asks about."""
        question = split_questions(text)[0]
        found = asked_word(self.processor, question)
        return f"{found[0]}:{question}" if found else None

    def overlay(self, choice: str | None, image: EncodedPicture | None) -> Image.Image | None:
        """Return the image with the attention of a word of `words` drawn over it; None for an invalid choice."""
        column, _, question = (choice or "").partition(":")
        if image is None or not column.isdecimal():
            return None
        try:
            maps = attention_of_question(self.answerer.model, self.processor, image.encoded, question)
            return heat_over(image.picture, list(maps)[int(column)])
        except (ValueError, IndexError):  # not a question of the model, or too short for this column
            return None


def path_of(payload: Any) -> str | None:
    """Return the path of an uploaded file, whatever it contains."""
    return payload and payload.path


def build_page(answerer: Answerer, examples: Sequence[Path]) -> gr.Blocks:
    """Build the page for a loaded model, with example images."""
    page = Page(answerer)
    no_words = gr.Dropdown(choices=[], value=None)

    def ask(path: str | None, text: str, last: EncodedPicture | None) -> Iterator[tuple[Any, ...]]:
        for status, answers, image in page.answer(path, text, last):
            yield status, answers, image, gr.skip(), gr.skip()
        if not answers:
            yield status, answers, image, no_words, None
            return
        first = page.first_word(text)
        choices = gr.Dropdown(choices=page.words(text), value=first)
        yield status, answers, image, choices, page.overlay(first, image)

    with gr.Blocks(title="Traffic VLM", analytics_enabled=False, delete_cache=DELETING) as blocks:
        gr.Markdown(INTRODUCTION)
        encoded = gr.State(None, time_to_live=SESSION_SECONDS)
        with gr.Row():
            with gr.Column():
                image = gr.Image(
                    label="Image",
                    type="filepath",
                    image_mode=None,
                    sources=["upload", "webcam", "clipboard"],
                    height=320,
                    elem_id="image",
                )
                # Pass on the path of any file: `open_picture` explains what is wrong with it, Gradio would not.
                image.preprocess = path_of  # type: ignore[method-assign]
                gr.Examples([[str(path)] for path in examples], image, label="Example scenes")
                questions = gr.Textbox(
                    QUESTIONS, label="Questions, one per line (Shift+Enter to ask)", lines=5, elem_id="questions"
                )
                unknown = gr.HTML(elem_id="unknown")
                button = gr.Button("Ask", variant="primary", elem_id="ask")
            with gr.Column():
                status = gr.HTML(elem_id="status")
                answers = gr.HTML(elem_id="answers")
                word = gr.Dropdown([], label="Attention of a word", elem_id="word")
                overlay = gr.Image(label="Attention", interactive=False, elem_id="overlay")
        outputs = [status, answers, encoded, word, overlay]
        asking = gr.on([button.click, questions.submit], ask, [image, questions, encoded], outputs)
        questions.change(page.list_unknown_words, questions, unknown, show_progress="hidden")
        word.input(page.overlay, [word, encoded], overlay)
        # The browser handles these in order: stop the answers about the previous image, then clear them.
        image.change(None, cancels=[asking])
        image.change(lambda: ("", "", no_words, None), None, [status, answers, word, overlay])
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

"""The demo page: an image, questions one per line, answers as they are generated, and the attention of each word.

image ── encoded once, kept with the session ──┐
questions ── yes/no in one packed pass ────────┴→ table ── words, as they are generated ──→ table
a word of a question ── its cross-attention ──→ drawn over the image

A sentence about bad input is shown beside the input; a question that is refused has its sentence in its row.
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

from .answerer import Answer, Answerer, notes_on_words
from .overlay import asked_word, attention_of_question, heat_over, map_strength, mapped_words
from .pictures import open_picture
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


@dataclass(frozen=True)
class Step:
    """What the page shows at one moment of answering: the encoded image, questions with their answers, and HTML."""

    image: EncodedPicture | None
    status: str = ""
    rows: Sequence[tuple[str, Answer | ValueError | str | None]] = ()
    image_problem: str = ""
    questions_note: str = ""

    @property
    def answers(self) -> list[Answer]:
        return [answer for _, answer in self.rows if isinstance(answer, Answer)]


def problem(error: ValueError | str) -> str:
    """Return the sentence of an error as HTML."""
    return f'<div class="problem" role="alert">{html.escape(str(error))}</div>'


def show_notes(notes: Sequence[str]) -> str:
    """Return notes as HTML."""
    return "".join(f'<div class="note">{html.escape(note)}</div>' for note in notes)


def table(rows: Sequence[tuple[str, Answer | ValueError | str | None]]) -> str:
    """Return questions with their answers (a partial text, or None before it) or problems as HTML; "" without any."""
    if not rows:
        return ""
    head = "<tr><th>question</th><th>answer and its probability</th></tr>"
    body = "".join(table_row(question, answer) for question, answer in rows)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def table_row(question: str, answer: Answer | ValueError | str | None) -> str:
    notes: list[str] = []
    if isinstance(answer, Answer):
        p, notes = answer.probability, answer.notes
        is_sure = not notes and (p >= SURE if answer.not_sure is None else not answer.not_sure)
        text = html.escape(answer.shown)
        shown = f"<strong>{text}</strong>" if is_sure else f"<em>{text}</em>, not sure"
        yellow = "" if is_sure else ' low="1" optimum="1"'  # else green
        meter = f'<meter value="{p:.2f}"{yellow} aria-label="probability"></meter>'
        shown += f'<div class="confidence">{meter}{p:.2f}</div>'
    elif isinstance(answer, ValueError):
        shown = show_notes([str(answer)])
    else:
        shown = f"<strong>{html.escape(answer or '…')}</strong>"
    return f"<tr><td>{html.escape(question)}{show_notes(notes)}</td><td>{shown}</td></tr>"


class Page:
    """The functions behind the page, independent of Gradio."""

    def __init__(self, answerer: Answerer):
        self.answerer, self.processor = answerer, answerer.processor

    def note_on_questions(self, text: str) -> str:
        """Return what is to be said about the questions before they are asked, as HTML; "" if nothing is."""
        text = text.strip()
        try:
            if text:
                split_questions(text)
        except ValueError as error:
            return problem(error)
        return show_notes(notes_on_words(self.processor.unknown_words(text), self.processor.untaught_words(text)))

    def image_problem(self, path: str | None) -> str:
        """Return why an image cannot be read, as HTML; "" if it can be."""
        try:
            if path is not None:
                open_picture(path)
        except ValueError as error:
            return problem(error)
        return ""

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
        picture = self.answerer.open(picture)
        if picture.width > PICTURE_WIDTH:
            picture = picture.resize((PICTURE_WIDTH, max(1, round(picture.height * PICTURE_WIDTH / picture.width))))
        return EncodedPicture(key, encoded, picture), seconds

    def answer(self, path: str | None, text: str, last: EncodedPicture | None) -> Iterator[Step]:
        """Yield what to show, repeatedly while answers in words grow. A question that is refused stops no other."""
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
        answers: list[Any] = [self.refuse(question) for question in questions]
        asked = [i for i, refusal in enumerate(answers) if refusal is None]
        status = f"Image encoded in {1000 * encoding:.0f} ms." if encoding else "Same image, not encoded again."
        if asked:
            start = time.perf_counter()
            [classified] = self.answerer.classify(image.encoded, [[questions[i] for i in asked]])
            status += f" Questions in one pass: {len(asked)}, in {1000 * (time.perf_counter() - start):.0f} ms."
            for i, answer in zip(asked, classified):
                answers[i] = answer
        status = f'<div class="note" role="status">{status}</div>'
        yield Step(image, status, list(zip(questions, answers)), questions_note=note)
        for i in (i for i in asked if answers[i] is None):
            for piece in self.answerer.stream(image.encoded, questions[i]):
                answers[i] = (answers[i] or "") + piece if isinstance(piece, str) else piece
                yield Step(image, status, list(zip(questions, answers)), questions_note=note)

    def refuse(self, question: str) -> ValueError | None:
        """Return why a question cannot be answered; None if it can be."""
        try:
            self.answerer.check_question(question)
        except ValueError as error:
            return error
        return None

    def words(self, answers: Sequence[Answer]) -> list[tuple[str, str]]:
        """Return the words of answered questions that have a map as choices: the label, and "column:question"."""
        return [
            (f"{word} · {question}", f"{column}:{question}")
            for question in dict.fromkeys(answer.question for answer in answers)
            for column, word in mapped_words(self.processor, question)
        ]

    def first_word(self, answers: Sequence[Answer]) -> str | None:
        """Return the choice for the word asked about in the first question whose map is strongest."""
        question = max(answers, key=map_strength).question
        found = asked_word(self.processor, question)
        return f"{found[0]}:{question}" if found else None

    def overlay(self, choice: str | None, image: EncodedPicture | None) -> tuple[Image.Image | None, str]:
        """Return the image with the map of a word of `words`, and its caption; no image for an invalid choice."""
        column, _, question = (choice or "").partition(":")
        if image is None or self.refuse(question):
            return None, ""
        words = {str(place): word for place, word in mapped_words(self.processor, question)}
        if column not in words:
            return None, ""
        weights = attention_of_question(self.answerer.model, self.processor, image.encoded, question)[int(column)]
        [[answer]] = self.answerer.ask(image.encoded, [[question]])
        strength = map_strength(answer)
        faded = f" Faded, as the answer is “{answer.shown}”." if strength < 1 else ""
        caption = html.escape(f"{question} {answer.to_text()}. Orange: where “{words[column]}” attends.{faded}")
        return heat_over(image.picture, weights, strength), f'<div class="note">{caption}</div>'


def add_question(question: str | None, text: str) -> tuple[str, None]:
    """Return the questions with one more line, if it is not among them, and no choice for the next suggestion."""
    lines = [line for line in text.splitlines() if line.strip()]
    if question and question not in lines:
        lines.append(question)
    return "\n".join(lines), None


def path_of(payload: Any) -> str | None:
    """Return the path of an uploaded file, whatever it contains."""
    return payload and payload.path


def build_page(answerer: Answerer, examples: Sequence[Path]) -> gr.Blocks:
    """Build the page for a loaded model, with example images."""
    page = Page(answerer)
    no_map = (gr.Column(visible=False), gr.Dropdown(choices=[], value=None), None, "")

    def ask(path: str | None, text: str, last: EncodedPicture | None) -> Iterator[tuple[Any, ...]]:
        for step in page.answer(path, text, last):
            shown = step.image_problem, step.questions_note, step.status, table(step.rows), step.image
            yield *shown, *[gr.skip() for _ in no_map]
        if step.answers:
            first = page.first_word(step.answers)
            words = gr.Dropdown(choices=page.words(step.answers), value=first)
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
                # Pass on the path of any file: `open_picture` explains what is wrong with it, Gradio would not.
                image.preprocess = path_of  # type: ignore[method-assign]
                image_problem = gr.HTML(elem_id="image_problem")
                gr.Examples([[str(path)] for path in examples], image, label="Example photographs")
                questions = gr.Textbox(
                    QUESTIONS, label="Questions, one per line (Shift+Enter asks)", lines=6, elem_id="questions"
                )
                note = gr.HTML(elem_id="note")
                suggested = suggest_questions(answerer.processor).items()
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

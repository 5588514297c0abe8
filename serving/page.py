"""The page: an image, questions one a line, answers as they come, and where each word looks.

image ── looked at once, kept with the session ─┐
questions ── yes and no in one packed pass ─────┴→ table with P(yes) ── words, as they are generated ──→ table
a word of a question ── its cross-attention ──→ laid over the image
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
MAX_FILE_SIZE = "30mb"
SESSION_SECONDS = 3600.0  # encoded images of sessions that are gone are dropped after it
SHOWN_WIDTH = 896  # pixels of the picture that attention is laid over

QUESTIONS = "Is there a pedestrian?\nIs there a bus on the left?\nWhat color is the traffic light?\nWhat is ahead?"
INTRODUCTION = """# Traffic VLM
Looks at a traffic scene once and answers many questions about it."""
STYLE = """
.answers { width: 100%; border-collapse: collapse; table-layout: fixed; }
.answers th:nth-child(1) { width: 38%; } .answers th:nth-child(2) { width: 28%; }
.answers th:nth-child(3) { width: 17%; } .answers th:nth-child(4) { width: 17%; }
.answers th, .answers td { text-align: left; padding: .4rem .3rem; vertical-align: middle; overflow-wrap: break-word; }
.answers .number { text-align: right; font-variant-numeric: tabular-nums; }
.answers .bar { height: .6rem; border-radius: .3rem; overflow: hidden; background: var(--border-color-primary); }
.answers .bar > div { height: 100%; background: var(--color-accent); }
.problem { padding: .5rem .75rem; border-left: 4px solid #c22; background: var(--block-background-fill); }
"""


@dataclass(frozen=True, eq=False)
class Seen:
    """An image that was looked at.

    Attributes:
        key: hash of the file, to know it again.
        encoded: what questions read.
        picture: RGB, at most SHOWN_WIDTH wide.
    """

    key: str
    encoded: Any = field(repr=False)
    picture: Image.Image = field(repr=False)


def filled_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def split_questions(text: str) -> list[str]:
    """The questions in a text, one a line; empty lines are none.

    Raises:
        ValueError: there are none, or more than MAX_QUESTIONS.
    """
    questions = filled_lines(text)
    if not questions:
        raise ValueError("Write at least one question.")
    if len(questions) > MAX_QUESTIONS:
        raise ValueError(f"These are {len(questions)} questions; at most {MAX_QUESTIONS} are answered at once.")
    return questions


def table(rows: Sequence[tuple[str, Answer | str | None, float | None]]) -> str:
    """Questions, answers (a text that still grows, or None for none yet) and the seconds they took, as HTML."""
    lines = []
    for question, answer, seconds in rows:
        bar = "<td></td>"
        if isinstance(answer, Answer) and answer.yes_probability is not None:
            p_yes = answer.yes_probability
            bar = (
                f'<td class="number"><div class="bar" role="img" aria-label="P(yes) is {p_yes:.2f}">'
                f'<div style="width:{100 * p_yes:.0f}%"></div></div>{p_yes:.2f}</td>'
            )
        text = answer.answer if isinstance(answer, Answer) else answer or "…"
        took = "" if seconds is None else f"{1000 * seconds:.1f} ms"
        lines.append(
            f"<tr><td>{html.escape(question)}</td><td><strong>{html.escape(text)}</strong></td>{bar}"
            f'<td class="number">{took}</td></tr>'
        )
    head = "<tr><th>question</th><th>answer</th><th>P(yes)</th><th>time</th></tr>"
    return f'<table class="answers"><thead>{head}</thead><tbody>{"".join(lines)}</tbody></table>'


def problem(message: str) -> str:
    return f'<div class="problem" role="alert">{html.escape(message)}</div>'


def take_any_file(component: gr.Image) -> gr.Image:
    """Let an image component hand on the path of any file, so that our own messages say what is wrong with it."""
    # Not a subclass: Gradio would write an interface file for it beside this one.
    read = component.preprocess

    def preprocess(payload: Any) -> Any:
        try:
            return read(payload)
        except Exception:
            return payload.path

    component.preprocess = preprocess  # type: ignore[method-assign]
    return component


class Page:
    """What the page does, without its looks."""

    def __init__(self, answerer: Answerer):
        self.answerer = answerer

    def name_unknown_words(self, text: str) -> str:
        """A line for each question with words that the model does not know."""
        lines = []
        for question in filled_lines(text)[:MAX_QUESTIONS]:
            if unknown := self.answerer.processor.unknown_words(question):
                lines.append(f"not known, and not read: {', '.join(unknown)}")
        return "".join(f"<div>{html.escape(line)}</div>" for line in dict.fromkeys(lines))

    def look(self, path: str | None, seen: Seen | None) -> tuple[Seen, float]:
        """The image, looked at now or before, and the seconds that it took."""
        if path is None:
            raise ValueError("Choose an image first.")
        key = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        if seen is not None and seen.key == key:
            return seen, 0.0
        picture = open_picture(path)
        start = time.perf_counter()
        encoded = self.answerer.look([picture])
        seconds = time.perf_counter() - start
        if picture.width > SHOWN_WIDTH:
            picture = picture.resize((SHOWN_WIDTH, max(1, round(picture.height * SHOWN_WIDTH / picture.width))))
        return Seen(key, encoded, picture), seconds

    def answer(self, path: str | None, text: str, seen: Seen | None) -> Iterator[tuple[str, str, Seen | None]]:
        """Status, table, and the image for later questions; again and again as answers in words grow."""
        try:
            questions = split_questions(text)
            seen, looked = self.look(path, seen)
            start = time.perf_counter()
            decided = self.answerer.decide(seen.encoded, [questions])[0]
            passed = time.perf_counter() - start
        except ValueError as error:
            yield problem(str(error)), "", seen
            return
        once = f"looked at the image once: {1000 * looked:.0f} ms" if looked else "image known, not looked at again"
        status = f"{once} · all {len(questions)} questions in one pass: {1000 * passed:.0f} ms"
        share = passed / len(questions)
        rows: list[Any] = [(q, answer, share if answer else None) for q, answer in zip(questions, decided)]
        yield status, table(rows), seen
        for number, answer in enumerate(decided):
            if answer is not None:
                continue
            start = time.perf_counter()
            for grown in self.answerer.stream(seen.encoded, questions[number]):
                rows[number] = (questions[number], grown, time.perf_counter() - start)
                yield status, table(rows), seen

    def words(self, text: str) -> list[tuple[str, str]]:
        """Words of the questions that can be chosen: what is shown, and "column:question"."""
        tokenizer, choices = self.answerer.processor.tokenizer, []
        for question in dict.fromkeys(split_questions(text)):
            for column, word in enumerate(tokenizer.convert_ids_to_tokens(self._ids(question))):
                if word.isalpha():
                    choices.append((f"{word}  ({question})", f"{column}:{question}"))
        return choices

    def first_word(self, text: str) -> str | None:
        """The word that the first question is about."""
        question = split_questions(text)[0]
        found = asked_word(self.answerer.processor, question)
        return f"{found[0]}:{question}" if found else None

    def overlay(self, word: str | None, seen: Seen | None) -> Image.Image | None:
        """The image with the attention of one word, as `words` names it, over it; None for what is no such word."""
        if word is None or seen is None:
            return None
        column, _, question = word.partition(":")
        try:
            is_word = column.isdecimal() and int(column) < len(self._ids(question))
        except ValueError:  # no question that the model can read
            return None
        if not is_word:
            return None
        answerer = self.answerer
        maps = attention_of_question(answerer.model, answerer.processor, seen.encoded, question)
        return heat_over(seen.picture, maps[int(column)])

    def _ids(self, question: str) -> list[int]:
        inputs = self.answerer.processor(text=question, on_unknown="ignore", return_tensors="pt")
        return inputs["input_ids"][0].tolist()


def build_page(answerer: Answerer, examples: Sequence[Path]) -> gr.Blocks:
    """The page for a loaded model, with example images to start from."""
    page = Page(answerer)

    def ask(path: str | None, text: str, seen: Seen | None) -> Iterator[tuple[Any, ...]]:
        keep = gr.skip()
        for status, answers, now in page.answer(path, text, seen):
            yield status, answers, now, keep, keep
        if not answers:
            yield status, answers, now, gr.Dropdown(choices=[], value=None), None
            return
        first = page.first_word(text)
        choices = gr.Dropdown(choices=page.words(text), value=first)
        yield status, answers, now, choices, page.overlay(first, now)

    with gr.Blocks(title="Traffic VLM", analytics_enabled=False) as blocks:
        gr.Markdown(INTRODUCTION)
        seen = gr.State(None, time_to_live=SESSION_SECONDS)
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
                take_any_file(image)
                gr.Examples([[str(path)] for path in examples], image, label="Example scenes")
                questions = gr.Textbox(
                    QUESTIONS, label="Questions, one a line (Shift+Enter asks)", lines=5, elem_id="questions"
                )
                unknown = gr.HTML(elem_id="unknown")
                button = gr.Button("Ask", variant="primary", elem_id="ask")
            with gr.Column():
                status = gr.HTML(elem_id="status")
                answers = gr.HTML(elem_id="answers")
                word = gr.Dropdown([], label="Where does this word look?", elem_id="word")
                overlay = gr.Image(label="Attention", interactive=False, elem_id="overlay")
        outputs = [status, answers, seen, word, overlay]
        asking = gr.on([button.click, questions.submit], ask, [image, questions, seen], outputs)
        questions.change(page.name_unknown_words, questions, unknown, show_progress="hidden")
        word.input(page.overlay, [word, seen], overlay)
        # Answers to another image must not stay beside this one, nor go on growing: the browser handles these events
        # one after the other, so what still answers is stopped before the page is cleared.
        image.change(None, cancels=[asking])
        image.change(
            lambda: ("", "", gr.Dropdown(choices=[], value=None), None), None, [status, answers, word, overlay]
        )
    return blocks


def launch(blocks: gr.Blocks, examples: Sequence[Path], **options: Any) -> tuple[Any, str, str]:
    """Serve the page, to this machine only unless the environment says otherwise; nothing comes from elsewhere."""
    return blocks.queue(max_size=32).launch(
        css=STYLE,
        theme=gr.themes.Default(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace")),
        max_file_size=MAX_FILE_SIZE,
        allowed_paths=[str(path) for path in examples],
        **options,
    )

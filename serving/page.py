"""The demo page: choose an image, write questions, read the answers, and see where each word of a question attends.

    image ── encoded once, when it is chosen, and kept for the session ─┐
    questions, one per line ────────────────────────────────────────────┴→ table
    a word of a question ── its attention ──→ drawn over the image
    classes of objects ── their boxes ──→ drawn on the image, with a center head

All answers come from the pipeline. A problem of a question is shown in its row and does not stop the others; a problem
of the image, or of all questions together, is shown as a notice.
"""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from ..common.answers import answer_notes, answer_text
from ..common.image_files import image_warnings, open_image
from ..images_traffic_vlm import Region
from ..pipeline_traffic_vlm import TrafficVLMPipeline
from ..question_traffic_vlm import NONE
from .options import MAX_QUESTIONS
from .overlay import draw_attention, draw_objects, mapped_words


KEPT_SECONDS = 3600  # uploads and encoded images are deleted after an hour
DELETING = (300, KEPT_SECONDS)  # every 300 seconds, files that are older
MAX_BYTES = 200_000_000  # of an upload: 40 megapixels without compression are 120 million
SHOWN_SIZE = (896, 640)  # at most, pixels
SURE = 0.6  # without thresholds, answers of lower probability are "not sure"

DOCS = Path(__file__).parent.parent / "docs"
EXAMPLES = [path for name in ("crossing", "night", "truck") if (path := DOCS / f"{name}.jpg").exists()]
QUESTIONS = """Is there a car?
Is there a traffic light?
What color is the traffic light?
Is there a stop sign?
What is the speed limit?
What time of day is it?"""
INTRODUCTION = """# Traffic VLM
Encodes a photograph of traffic once and answers many questions about it: vehicles, people, signs, lights, sides,
weather, time of day. Not for decisions that a person's safety depends on: small and distant objects are lost, and
accidents were not taught. The weights are for research and non-commercial use."""
# Without a style the table is a black grid, narrower than its column. `gr.Dataframe` cuts off rows on phones.
TABLE_STYLE = """
table { width: 100%; table-layout: fixed; border: 0; }
tr { background: none; border: 0; }
th, td { border: 0; border-bottom: 1px solid var(--border-color-primary); padding-left: 0;
    text-align: left; vertical-align: top; overflow-wrap: break-word; }
"""


@dataclass(frozen=True, eq=False)
class EncodedPicture:
    """An encoded image of the pipeline, and a small picture of the part that it sees."""

    encoded: Any
    shown: Image.Image


def split_questions(text: str) -> list[str]:
    """The questions in a text, one per line. Raises a ValueError if there are none, or more than MAX_QUESTIONS."""
    questions = [line.strip() for line in text.splitlines() if line.strip()]
    if not 0 < len(questions) <= MAX_QUESTIONS:
        raise ValueError(f"Write 1 to {MAX_QUESTIONS} questions, one per line: these are {len(questions)}.")
    return questions


def table(items: Sequence[Mapping[str, Any]]) -> str:
    """HTML of items of the pipeline: questions with their answers or problems."""
    rows = ["<tr><th>question</th><th>answer and its probability</th></tr>"]
    for item in items:
        notes, score = answer_notes(item), item["score"]
        texts = [html.escape(item["question"]), *(f"<small>{html.escape(note)}</small>" for note in notes)]
        if "problem" in item:
            answer = f"<small>{html.escape(item['problem'])}</small>"
        else:
            answer = html.escape("none seen" if item["answer"] == NONE else item["answer"])
            is_sure = not (notes or item.get("not_sure", score < SURE))
            answer = f"<strong>{answer}</strong>" if is_sure else f"<em>{answer}</em>, not sure"
            answer += f'<br><meter value="{score:.2f}" aria-label="probability"></meter> {score:.2f}'
        rows.append(f"<tr><td>{'<br>'.join(texts)}</td><td>{answer}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


class Page:
    """The actions of the page; `build_page` has its layout.

    Args:
        region: the part of each image that the pipeline is asked about; by default all of it.
    """

    def __init__(self, pipe: TrafficVLMPipeline, region: Region | None = None):
        self.pipe, self.region = pipe, region

    def encode(self, path: str | Path, image_size: int | None = None) -> EncodedPicture:
        """The encoded image of a file, at a side in pixels. Raises a ValueError if it cannot be read."""
        picture = open_image(path)
        encoded = self.pipe.encode(picture, image_size=image_size)
        picture = picture if self.region is None else self.region.crop(picture)
        picture.thumbnail(SHOWN_SIZE)
        return EncodedPicture(encoded, picture)

    def boxes(self, labels: Sequence[str], picture: EncodedPicture | None) -> Image.Image | None:
        """The image with the boxes of objects of these classes; None without an image."""
        if picture is None:
            return None
        return draw_objects(self.pipe, picture.shown, picture.encoded, labels)[0] if labels else picture.shown

    def words(self, items: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """The words of answered questions as choices (label, "column:question"), those that they are about first."""
        answered = dict.fromkeys(item["question"] for item in items if item["answer"] is not None)
        return [
            (f"{word} · {question}", f"{column}:{question}")
            for question in answered
            for column, word in mapped_words(self.pipe, question)
        ]

    def overlay(self, choice: str | None, picture: EncodedPicture | None) -> tuple[Image.Image | None, str]:
        """The image under the attention of a word, one of `words`, and a caption; None and "" without a choice."""
        if choice is None or picture is None:
            return None, ""
        column, _, question = choice.partition(":")
        [item] = self.pipe(picture.encoded, question)
        shown = draw_attention(self.pipe, picture.shown, picture.encoded, item, int(column))
        word = dict(mapped_words(self.pipe, question))[int(column)]
        return shown, f"{question} {answer_text(item)}. Orange: where “{word}” attends; faint where nothing is seen."

    def choose(self, file: Mapping[str, Any] | None, image_size: int | None, labels: Sequence[str]) -> tuple[Any, ...]:
        """Encode the image of {"path": ...}, show it with boxes and a caption, and clear the answers about another."""
        picture, description = None, ""
        if file:
            try:
                with image_warnings() as warnings:
                    picture = self.encode(file["path"], image_size)
                description = self.pipe.describe(picture.encoded)["caption"]
            except ValueError as error:
                warnings = [str(error)]
            for warning in warnings:
                gr.Warning(warning)
        no_words = gr.Column(visible=False), gr.Dropdown(choices=[], value=None)
        return self.boxes(labels, picture), picture, description, "", *no_words

    def ask(self, text: str, picture: EncodedPicture | None) -> tuple[Any, ...]:
        """Show the answers to the questions in a text, and the words of those that have one."""
        try:
            questions = split_questions(text)
            if picture is None:
                raise ValueError("Choose an image first. Images are deleted after an hour.")
        except ValueError as error:
            gr.Warning(str(error))
            return (gr.skip(),) * 3
        items = self.pipe(picture.encoded, questions)
        choices = self.words(items)
        first = choices[0][1] if choices else None
        return table(items), gr.Column(visible=bool(choices)), gr.Dropdown(choices=choices, value=first)


def build_page(pipe: TrafficVLMPipeline, region: Region | None = None) -> gr.Blocks:
    """The page for a loaded model."""
    page = Page(pipe, region)
    with gr.Blocks(title="Traffic VLM", analytics_enabled=False, delete_cache=DELETING) as blocks:
        gr.Markdown(INTRODUCTION)
        encoded = gr.State(None, time_to_live=KEPT_SECONDS)
        with gr.Row():
            with gr.Column():
                image = gr.Image(label="Image", show_label=False, height=320, buttons=[], elem_id="image")
                described = gr.Markdown(elem_id="description")
                samples = [[str(path)] for path in EXAMPLES]
                examples = gr.Dataset(label="Example photographs", components=[image], samples=samples, type="index")
                size = gr.Dropdown(
                    [("fast (256 pixels)", 256), ("as trained (384)", 384), ("small objects (512)", 512)],
                    value=None,
                    label="Size of the next image, as the model looks at it",
                    elem_id="size",
                )
                shown: dict[str, Any] = {"label": "Objects to show in the image", "visible": bool(pipe.located)}
                objects = gr.Dropdown([*pipe.located], value=[], multiselect=True, elem_id="objects", **shown)
                questions = gr.Textbox(
                    QUESTIONS, lines=6, label="Questions, one per line (Shift+Enter asks)", elem_id="questions"
                )
                rules = pipe.processor.rules
                nouns = ", ".join(rules.known_nouns(pipe.processor.taught_words))
                gr.Markdown(f"**What can I ask?** {' '.join(rules.examples.values())} It knows these nouns: {nouns}.")
                button = gr.Button("Ask", variant="primary", elem_id="ask")
            with gr.Column():
                answers = gr.HTML(css_template=TABLE_STYLE, min_height=100, elem_id="answers")
                with gr.Column(visible=False) as words:
                    word = gr.Dropdown([], label="Attention of a word", elem_id="word")
                    overlay = gr.Image(show_label=False, buttons=[], interactive=False, elem_id="overlay")
                    caption = gr.Textbox(show_label=False, container=False, elem_id="caption")
        # One event at a time: an image that has just been chosen is encoded before questions about it are answered.
        queue: dict[str, Any] = {"show_progress_on": answers, "concurrency_id": "model"}
        asked = [answers, words, word]
        asking = gr.on([button.click, questions.submit], page.ask, [questions, encoded], asked, **queue)
        chosen = [image, encoded, described, *asked]
        choosing: dict[str, Any] = {"outputs": chosen, "cancels": [asking], **queue}
        # preprocess=False passes on any file: `open_image` says what is wrong with it, Gradio would not.
        gr.on([image.input, image.clear], page.choose, [image, size, objects], preprocess=False, **choosing)
        given = [examples, size, objects]
        examples.click(lambda index, *more: page.choose({"path": EXAMPLES[index]}, *more), given, **choosing)
        objects.input(page.boxes, [objects, encoded], image, show_progress="hidden")
        word.change(page.overlay, [word, encoded], [overlay, caption], show_progress="hidden")
    return blocks


def launch(blocks: gr.Blocks, **options: Any) -> str:
    """Serve the page until it is interrupted, and return its address. Gradio's GRADIO_SERVER_NAME and _PORT count."""
    # The default theme would load its fonts from a website.
    theme = gr.themes.Default(font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace"))
    return blocks.launch(theme=theme, max_file_size=MAX_BYTES, **options)[1]

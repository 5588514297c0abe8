"""Ask questions about images.

    python scripts/ask.py docs/example.jpg "Is there a pedestrian?" "What color is the traffic light?"
    python scripts/ask.py frames/ "Is there a bus?" --json                # all images of a folder, a line each
    python scripts/ask.py a.jpg b.jpg --ask "Is it raining?" --overlay out.png    # attention maps of each image
    python scripts/ask.py a.jpg "Is the traffic light red?" --region 0.25,0,0.5,0.5    # far objects: a part, larger
    python scripts/ask.py a.jpg --locate bus "traffic light"             # scores and boxes of objects, or of all
    python scripts/ask.py frames/ --describe                             # a caption of each image
    python scripts/ask.py --list                                         # what can I ask?

An image is a file or a folder. Words that exist as a file or folder, or end like an image file, are images, and all
others are questions, in any order; --ask QUESTION is always one.
For several images, --overlay out.png writes out_1_a.png, out_2_b.png and so on.

The number after an answer is its probability. --json prints what the pipeline returns (see README.md). What the model
does not know or was not taught has no answer but a problem; --answer_untaught true gives its guess.
A box is left, top, right and bottom in pixels.
The exit status is 1 if an image or a question had a problem, and 2 if nothing was asked.
"""

import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traffic_vlm.common.answers import answer_notes, answer_text
from traffic_vlm.common.files import atomic_write
from traffic_vlm.common.image_files import IMAGE_SUFFIXES, list_images, open_image
from traffic_vlm.common.options import option, option_parser, silence_libraries
from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
from traffic_vlm.scripts import command
from traffic_vlm.serving.options import ModelOptions, examine
from traffic_vlm.serving.overlay import draw_overlay, name_overlays


@dataclass
class AskOptions(ModelOptions):
    overlay: Path | None = option(None, "PNG to write: attention maps and boxes, a file for each image")
    locate: list[str] = option([], "classes of objects to locate, or all")


def answer_table(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of questions and answers with their notes."""
    width = max((len(item["question"]) for item in items), default=0)
    notes = ("".join(f"   ({note})" for note in answer_notes(item)) for item in items)
    return [f"  {item['question']:<{width}}  {answer_text(item)}{note}" for item, note in zip(items, notes)]


def object_table(objects: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of objects: label, score and box."""
    width = max((len(found["label"]) for found in objects), default=0)
    boxes = (",".join(f"{side:.0f}" for side in found["box"]) for found in objects)
    return [f"  {found['label']:<{width}}  {found['score']:.2f}  box {box}" for found, box in zip(objects, boxes)]


def ask(options: AskOptions, images: Sequence[str], questions: list[str], as_json: bool, captioned: bool) -> int:
    """Answer questions about images, which may be captioned. Returns the number of images with a problem."""
    listed = [list_images(Path(image)) for image in images]
    paths = [path for files, _ in listed for path in files]
    for note in dict.fromkeys(note for _, note in listed if note):
        print(note, file=sys.stderr)
    overlays = name_overlays(options.overlay, paths) if options.overlay else [None] * len(paths)
    pipe, region, failed = options.load(), options.part_of_image, 0
    labels = pipe.read_labels(options.locate) if options.locate else []
    for path, overlay in zip(paths, overlays):
        try:
            image = open_image(path)
            encoded = pipe.encode(image)
            items = pipe(encoded, questions) if questions else []
            found = examine(pipe, encoded, image.size, labels, captioned)
        except (ValueError, OSError, FloatingPointError) as error:
            print(error, file=sys.stderr)
            failed += 1
            continue
        if as_json:
            print(json.dumps({"image": str(path), "answers": items} | found), flush=True)
        else:
            caption, objects = [found["caption"]] if captioned else [], found.get("objects", [])
            print(path, *caption, *answer_table(items), *object_table(objects), sep="\n", flush=True)
        answered = [item for item in items if item["answer"] is not None]
        failed += len(answered) < len(items)
        if overlay and (answered or labels):
            shown = region.crop(image) if region else image
            with atomic_write(overlay) as temporary:
                draw_overlay(pipe, shown, encoded, answered, labels).save(temporary, "PNG")
    return failed


@command()
def main() -> int:
    silence_libraries()
    parser = option_parser([AskOptions], __doc__)
    parser.add_argument("words", metavar="IMAGE/QUESTION", nargs="*", help="files, folders; questions in quotes")
    parser.add_argument("--ask", action="append", default=[], metavar="QUESTION", help="may be given many times")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each image")
    parser.add_argument("--describe", action="store_true", help="print a caption of each image, of what is sure")
    parser.add_argument("--list", action="store_true", help="print what can be asked: kinds of question, and nouns")
    options, asked = parser.parse_args_into_dataclasses()
    if asked.list:
        processor = TrafficVLMProcessor.from_pretrained(options.model)
        for kind, example in processor.rules.examples.items():
            print(f"{kind:<18}{example}")
        nouns = ", ".join(processor.rules.known_nouns(processor.taught_words))
        print(textwrap.fill(f"nouns: {nouns}", 80, subsequent_indent=" " * 7))
        return 0
    images = [word for word in asked.words if os.path.exists(word) or Path(word).suffix.lower() in IMAGE_SUFFIXES]
    questions = [word for word in asked.words if word not in images] + asked.ask
    if not images:
        parser.error("there is no image: neither a file nor a folder has such a name")
    if not (questions or options.locate or asked.describe):
        parser.error("there is no question: write it in quotes after the images, or after --ask")
    return int(ask(options, images, questions, asked.json, asked.describe) > 0)


if __name__ == "__main__":
    sys.exit(main())

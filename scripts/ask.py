"""Ask questions about images.

    python scripts/ask.py docs/example.jpg "Is there a pedestrian?" "What color is the traffic light?"
    python scripts/ask.py frames/ "Is there a bus?" --json                  # all images of a folder, a line each
    python scripts/ask.py "frames/*.jpg" "Is it raining?" --overlay out.png   # with the attention of the asked words

IMAGE is a file, a folder, or a pattern in quotes. The number behind an answer is the probability of that answer, of a
"no" as well.
"""

import argparse
import glob
import json
import sys
import warnings
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ask questions about images.")
    parser.add_argument("image", help="a file, a folder, or a pattern in quotes")
    parser.add_argument("question", nargs="+")
    parser.add_argument("--model", default=str(ROOT), help="model folder (default: this repository)")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each image")
    parser.add_argument("--overlay", type=Path, help="PNG to write: where each asked word looks (one image)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    return parser.parse_args()


def find_images(name: str) -> list[Path]:
    """The files that a name, a folder or a pattern stands for, in order.

    Raises:
        ValueError: there is none.
    """
    path = Path(name)
    if path.is_dir():
        from traffic_vlm.data.formats import IMAGE_SUFFIXES

        suffixes = IMAGE_SUFFIXES | {".gif"}
        found = sorted(file for file in path.iterdir() if file.suffix.lower() in suffixes)
    elif path.exists():
        return [path]
    else:
        found = sorted(Path(file) for file in glob.glob(name, recursive=True) if Path(file).is_file())
    if not found:
        raise ValueError(f"{name}: no such image, no folder with images and no pattern that fits one")
    return found


def check_overlay(output: Path, paths: list[Path]) -> None:
    """Raise a ValueError unless the overlay of these images can be written there."""
    if len(paths) > 1:
        raise ValueError(f"--overlay draws one image, not {len(paths)}")
    if output.suffix.lower() != ".png":
        raise ValueError(f"--overlay must be a PNG file, got {str(output)!r}")
    if not output.parent.is_dir():
        raise ValueError(f"--overlay {output}: there is no folder {output.parent}")
    if output.exists() and output.samefile(paths[0]):
        raise ValueError(f"--overlay {output}: is the image that is asked about")


def print_table(path: Path, answers: list[Any]) -> None:
    width = max(len(answer.question) for answer in answers)
    print(path)
    for answer in answers:
        unknown = f"   (not known: {', '.join(answer.unknown_words)})" if answer.unknown_words else ""
        print(f"  {answer.question:<{width}}  {answer.answer}, {answer.probability:.2f}{unknown}")


def main() -> int:
    arguments = parse()
    try:
        paths = find_images(arguments.image)
        if arguments.overlay:
            check_overlay(arguments.overlay, paths)
        warnings.filterwarnings("ignore")
        # Imported here, as it takes seconds: what is wrong with the command is said at once.
        from transformers.utils import logging

        from traffic_vlm.serving.answerer import Answerer

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        answerer = Answerer(arguments.model, arguments.device)
    except (ValueError, OSError, RuntimeError) as error:  # the last of a device that is not there
        print(error, file=sys.stderr)
        return 2
    failed = 0
    for path in paths:
        try:
            encoded = answerer.look([path])
            [answers] = answerer.ask(encoded, [arguments.question])
        except (ValueError, TypeError) as error:
            print(error, file=sys.stderr)
            failed += 1
            continue
        if arguments.json:
            print(json.dumps({"image": str(path), "answers": [answer.to_dict() for answer in answers]}), flush=True)
        else:
            print_table(path, answers)
        if arguments.overlay:
            try:
                save_overlay(answerer, path, encoded, answers, arguments.overlay)
            except OSError as error:  # the disk is full
                print(error, file=sys.stderr)
                failed += 1
    return 1 if failed else 0


def save_overlay(answerer: Any, path: Path, encoded: Any, answers: list[Any], output: Path) -> None:
    from traffic_vlm.serving.overlay import draw_overlay

    captions = [(answer.question, f"{answer.answer}, {answer.probability:.2f}") for answer in answers]
    sheet = draw_overlay(answerer.model, answerer.processor, path, encoded, captions)
    temporary = output.with_name(f".{output.name}.tmp")
    try:
        sheet.save(temporary, "PNG")
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"wrote {output}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

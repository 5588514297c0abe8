"""The commands of this repository: `python scripts/NAME.py`, and some of them `traffic-vlm NAME`. See `command`."""

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..question_traffic_vlm import answer_notes, answer_text


def command(extra: str | None = None) -> Callable[[Callable[[], int | None]], Callable[[], int]]:
    """Decorate the `main` of a script, which then returns an exit status.

    Errors that people can mend are one line and status 2, Ctrl-C is 130, and otherwise it is what `main` returns, or
    0. Python looks for modules in the folder of a script first, where export.py or evaluate.py would hide packages
    of these names from our code and from libraries. So this folder leaves the path.

    Args:
        extra: optional dependencies that the script needs: those of `pip install "traffic_vlm[EXTRA]"`.
    """

    def decorate(main: Callable[[], int | None]) -> Callable[[], int]:
        folder = os.path.dirname(os.path.realpath(main.__globals__["__file__"]))
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != folder]

        @functools.wraps(main)
        def run() -> int:
            try:
                return main() or 0
            except ModuleNotFoundError as error:
                print(f'{error}: pip install "traffic_vlm[{extra}]"' if extra else error, file=sys.stderr)
            # RuntimeError: a missing device, or no memory on a GPU. FloatingPointError: damaged weights.
            except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
                print(error, file=sys.stderr)
            except KeyboardInterrupt:
                return 130
            return 2

        return run

    return decorate


def print_answers(image: str, items: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Print the answers to questions about an image: a table, or a line of JSON with what the pipeline returns."""
    if as_json:
        print(json.dumps({"image": image, "answers": items}), flush=True)
        return
    width = max(len(item["question"]) for item in items)
    print(image)
    for item in items:
        notes = "".join(f"   ({note})" for note in answer_notes(item))
        print(f"  {item['question']:<{width}}  {answer_text(item)}{notes}")

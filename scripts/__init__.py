"""The commands of this repository: `python scripts/NAME.py`, and some of them `traffic-vlm NAME`. See `command`."""

import errno
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from safetensors import SafetensorError

from ..common.answers import answer_notes, answer_text


FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def command(
    extra: str | None = None, resumes: bool = False
) -> Callable[[Callable[[], int | None]], Callable[[], int]]:
    """Decorate the `main` of a script, which then returns an exit status.

    Exit status: 2 and one line for user errors, 130 for Ctrl-C, otherwise the result of `main` (None is 0). Python
    looks for modules in the folder of a script first, where export.py or evaluate.py would hide packages of these
    names from our code and from libraries. So this folder leaves the path.

    Args:
        extra: optional dependencies that the script needs: those of `pip install "traffic_vlm[EXTRA]"`.
        resumes: the same command continues a stopped run; the lines about Ctrl-C and a full disk say so.
    """

    def decorate(main: Callable[[], int | None]) -> Callable[[], int]:
        folder = os.path.dirname(os.path.realpath(main.__globals__["__file__"]))
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != folder]

        @functools.wraps(main)
        def run() -> int:
            try:
                return main() or 0
            except ModuleNotFoundError as error:
                line = f'{error}: pip install "traffic_vlm[{extra}]"' if extra else str(error)
            except KeyboardInterrupt:
                if resumes:
                    print("stopped; the same command resumes from the last checkpoint", file=sys.stderr)
                return 130
            except Exception as error:
                line = str(error).strip()
                if is_write_error(error):
                    line = f"a file could not be written, the disk is full or the size of files is limited ({line})"
                    line += "; complete checkpoints are kept, and the same command resumes" if resumes else ""
                # RuntimeError: a missing device, or no memory on a GPU. FloatingPointError: damaged weights.
                elif not isinstance(error, ValueError | OSError | RuntimeError | FloatingPointError | SafetensorError):
                    raise
                elif "Original Traceback" in line:  # of a data worker; its last line is the error itself
                    line = line.splitlines()[-1]
            print(line, file=sys.stderr)
            return 2

        return run

    return decorate


def is_write_error(error: BaseException) -> bool:
    """Whether a file could not be written, as on a full disk: torch, safetensors and tokenizers raise no OSError."""
    pattern = rf"inline_container(?!.*StreamReader)|os error ({'|'.join(map(str, FULL_DISK))})\b"
    return getattr(error, "errno", None) in FULL_DISK or re.search(pattern, str(error)) is not None


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

"""The commands of this repository: `python scripts/NAME.py`, and some of them `traffic-vlm NAME`. See `command`."""

import functools
import importlib
import os
import sys
from collections.abc import Callable


COMMANDS = ("ask", "watch", "label", "serve", "train", "evaluate")
USAGE = f"usage: traffic-vlm COMMAND [options], or COMMAND --help; the commands are {', '.join(COMMANDS)}"


def main() -> None:
    """The console command `traffic-vlm`, which runs the script that its first argument names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        sys.argv = [f"traffic-vlm {name}", *sys.argv[2:]]
        sys.exit(importlib.import_module(f"traffic_vlm.scripts.{name}").main())
    if name not in ("-h", "--help"):
        sys.exit(f"traffic-vlm has no command {name!r}\n{USAGE}")
    print(USAGE)


def command(extra: str | None = None) -> Callable[[Callable[[], int | None]], Callable[[], int]]:
    """Decorate the `main` of a script, which then returns an exit status.

    Exit status: 2 and one line for user errors, 130 for Ctrl-C, otherwise the result of `main` (None is 0). Python
    looks for modules in the folder of a script first, where export.py or evaluate.py would hide packages of these
    names. So this folder leaves the path.

    Args:
        extra: optional dependencies that the script needs: `pip install "traffic_vlm[EXTRA]"`.
    """

    def decorate(main: Callable[[], int | None]) -> Callable[[], int]:
        folder = os.path.dirname(os.path.realpath(main.__code__.co_filename))
        sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != folder]

        @functools.wraps(main)
        def run() -> int:
            try:
                return main() or 0
            except KeyboardInterrupt:
                return 130
            except ModuleNotFoundError as error:
                print(f'{error}: pip install "traffic_vlm[{extra}]"' if extra else error, file=sys.stderr)
            except (ValueError, OSError) as error:
                print(error, file=sys.stderr)
            return 2

        return run

    return decorate

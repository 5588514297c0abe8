"""The console command `traffic-vlm`: runs the scripts of the same names.

    traffic-vlm ask frame.jpg "Is there a bus?"
    traffic-vlm train --help

`python -m traffic_vlm.scripts` is the same command.
"""

import importlib
import sys


COMMANDS = ("ask", "watch", "label", "serve", "train", "evaluate")
USAGE = f"usage: traffic-vlm COMMAND [options], or COMMAND --help; the commands are {', '.join(COMMANDS)}"


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        sys.argv = [f"traffic-vlm {name}", *sys.argv[2:]]
        sys.exit(importlib.import_module(f"traffic_vlm.scripts.{name}").main())
    if name not in ("-h", "--help"):
        sys.exit(f"traffic-vlm has no command {name!r}\n{USAGE}")
    print(USAGE)


if __name__ == "__main__":
    main()

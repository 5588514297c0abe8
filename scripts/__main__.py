"""The console command `traffic-vlm`: runs the scripts of the same names.

    traffic-vlm ask frame.jpg "Is there a bus?"
    traffic-vlm train --help

`python -m traffic_vlm.scripts` is the same command.
"""

import importlib
import sys


COMMANDS = {
    "ask": "answer questions about images",
    "watch": "answer questions about every frame of a video or stream",
    "label": "label many images",
    "serve": "answer questions over HTTP",
    "train": "train or fine-tune",
    "evaluate": "measure a model on a dataset",
}
USAGE = "usage: traffic-vlm COMMAND [options]; traffic-vlm COMMAND --help shows its options\n\n" + "\n".join(
    f"  {name:<10}{description}" for name, description in COMMANDS.items()
)


def main() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print(USAGE)
    elif command in COMMANDS:
        sys.argv = [f"traffic-vlm {command}", *sys.argv[2:]]
        sys.exit(importlib.import_module(f"traffic_vlm.scripts.{command}").main())
    else:
        sys.exit(f"traffic-vlm has no command {command!r}; it has {', '.join(COMMANDS)}")


if __name__ == "__main__":
    main()

"""Answer questions about an image like scripts/ask.py, without torch: pip install onnxruntime tokenizers pillow.

    python scripts/export.py --output_dir runs/onnx --format onnx int8
    python scripts/ask_onnx.py runs/onnx docs/example.jpg "Is there a bus?" "What is ahead?"
    python scripts/ask_onnx.py runs/onnx docs/example.jpg "Is there a bus?" --int8 --json

The number after an answer is the probability of that answer, a "no" included; after words, the mean of the words.
"""

import argparse
import sys
from pathlib import Path
from types import ModuleType


# The package itself needs torch, the modules of this script do not.
package = ModuleType("traffic_vlm")
package.__path__ = [str(Path(__file__).resolve().parent.parent)]
sys.modules.setdefault("traffic_vlm", package)

from traffic_vlm.scripts import command, print_answers  # noqa: E402


@command()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder that scripts/export.py wrote")
    parser.add_argument("image", help="image file")
    parser.add_argument("questions", nargs="+", metavar="question", help="questions in quotes")
    parser.add_argument("--int8", action="store_true", help="the graphs with int8 weights")
    parser.add_argument("--json", action="store_true", help="print a line of JSON, as ask.py --json does")
    options = parser.parse_args()

    from traffic_vlm.export.answering import ExportedPipeline

    items = ExportedPipeline(options.folder, options.int8)(options.image, options.questions)
    print_answers(options.image, items, options.json)
    return int(any("problem" in item for item in items))


if __name__ == "__main__":
    sys.exit(main())

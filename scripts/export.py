"""Export a model as ONNX graphs, or as a page for the browser.

    python scripts/export.py --output_dir runs/onnx         # vision, score and decode as .onnx; on a CPU
    python scripts/export.py --output_dir runs/web --web    # a page for the browser; npm is needed
    python -m http.server --directory runs/web              # then open http://localhost:8000

export/onnx.py documents the inputs and outputs of the graphs, and docs/serving.md has a program that asks them. The
folder also gets tokenizer.json, and export.json with sizes, token ids and image preprocessing. It appears when it is
complete.
"""

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

from traffic_vlm.common.files import ROOT
from traffic_vlm.common.loading import parse_size
from traffic_vlm.common.options import choose_threads, option, option_parser, silence_libraries
from traffic_vlm.export.onnx import export
from traffic_vlm.export.web import export_page
from traffic_vlm.scripts import command


@dataclass
class ExportOptions:
    output_dir: Path = field(metadata={"help": "new folder"})
    model: Path = option(ROOT, "model folder")
    image_size: str | None = option(None, "side of the pixels, or height,width, of the graphs; default: the model's")
    web: bool = option(False, "write a page for the browser instead")


@command("export")
def main() -> None:
    [options] = option_parser([ExportOptions], __doc__).parse_args_into_dataclasses()
    silence_libraries()
    choose_threads()
    logging.disable(logging.WARNING)  # the exporters warn about packages that they do not need, and advise experts
    size = parse_size(options.image_size) if options.image_size else None
    for path in (export_page if options.web else export)(options.model, options.output_dir, size):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    sys.exit(main())

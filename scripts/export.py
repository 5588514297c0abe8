"""Export a model as graphs that run without Python: ONNX, torch.export.

    python scripts/export.py --output runs/onnx                      # vision, score and decode as .onnx
    python scripts/export.py --output runs/onnx --format onnx int8   # and with int8 weights, a third of the size
    python scripts/export.py --output runs/pt2 --format torch        # as .pt2, for torch.export.load
    python scripts/ask_onnx.py runs/onnx docs/example.jpg "Is there a bus?"

What the graphs take and give stands in publishing/export.py. Beside them lie tokenizer.json and export.json, which has
the sizes and the preprocessing of images. The folder appears whole, or not at all.
"""

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
FORMATS = ("onnx", "int8", "torch")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT), help="model folder (default: this repository)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new folder to write to")
    parser.add_argument("--format", nargs="+", choices=FORMATS, default=["onnx"])
    arguments = parser.parse_args()
    if "int8" in arguments.format and "onnx" not in arguments.format:
        parser.error("--format int8 is made from onnx: ask for both")
    return arguments


def export(arguments: argparse.Namespace) -> None:
    from transformers.utils import logging

    from traffic_vlm.processing_traffic_vlm import TrafficVLMProcessor
    from traffic_vlm.publishing import export as exporting

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, processor = exporting.load(arguments.model), TrafficVLMProcessor.from_pretrained(arguments.model)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.output.parent) as draft:
        folder = Path(draft) / "export"
        folder.mkdir()
        about = exporting.describe(model, processor)
        (folder / "export.json").write_text(json.dumps(about, indent=1) + "\n")
        (folder / "tokenizer.json").write_text(processor.tokenizer.backend_tokenizer.to_str())
        steps = {"torch": exporting.export_torch, "onnx": exporting.export_onnx, "int8": exporting.quantise}
        for name, step in steps.items():
            if name in arguments.format:
                print(f"exporting: {name}", flush=True)
                step(folder) if name == "int8" else step(model, folder)
        shutil.move(folder, arguments.output)


def main() -> int:
    arguments = parse()
    if arguments.output.exists():
        print(f"{arguments.output}: exists; choose another folder", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore")  # the exporter's own, about itself
    try:
        export(arguments)
    except ModuleNotFoundError as error:
        print(f'{error}; exporting needs: pip install "traffic_vlm[export]"', file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for path in sorted(arguments.output.iterdir()):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

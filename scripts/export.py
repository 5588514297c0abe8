"""Export a model as graphs that run without Python code: ONNX or torch.export.

    python scripts/export.py --output_dir runs/onnx                       # vision, score and decode as .onnx; on a CPU
    python scripts/export.py --output_dir runs/onnx --format onnx int8    # also with int8 weights, a third of the size
    python scripts/export.py --output_dir runs/torch --format torch       # as .pt2, for torch.export.load
    python scripts/ask_onnx.py runs/onnx docs/example.jpg "Is there a bus?"

export/onnx.py documents the inputs and outputs of the graphs. The folder also gets tokenizer.json, and export.json
with sizes, token ids and image preprocessing. It appears when it is complete.
"""

import json
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from transformers.utils import logging

from traffic_vlm.export import onnx
from traffic_vlm.loading import load_processor
from traffic_vlm.options import option_parser


FORMATS = ("onnx", "int8", "torch")


@dataclass
class Options:
    output_dir: Path = field(metadata={"help": "new folder"})
    model: Path = field(default=Path(__file__).resolve().parent.parent, metadata={"help": "model folder"})
    format: list[str] = field(
        default_factory=lambda: ["onnx"], metadata={"choices": FORMATS, "help": "int8 is made from onnx"}
    )


def export(model_folder: Path, output_dir: Path, formats: list[str]) -> None:
    """Write the graphs.

    Raises:
        ValueError, OSError: the options or the model cannot be used. ModuleNotFoundError: a package is missing.
    """
    if output_dir.exists():
        raise ValueError(f"{output_dir} exists; choose another --output_dir")
    if "int8" in formats and "onnx" not in formats:
        raise ValueError("--format int8 is made from onnx: pass --format onnx int8")
    model, processor = onnx.load(model_folder), load_processor(model_folder)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir.parent) as temporary:
        folder = Path(temporary) / "export"
        folder.mkdir()
        (folder / "export.json").write_text(json.dumps(onnx.describe(model, processor), indent=1) + "\n")
        (folder / "tokenizer.json").write_text(processor.tokenizer.backend_tokenizer.to_str())
        if "torch" in formats:
            onnx.export_torch(model, folder)
        if "onnx" in formats:
            onnx.export_onnx(model, folder)
        if "int8" in formats:
            onnx.quantize(folder)
        shutil.move(folder, output_dir)


def main() -> int:
    options = option_parser([Options], __doc__).parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")  # the exporter warns about its own internals
    try:
        export(options.model, options.output_dir, options.format)
    except ModuleNotFoundError as error:
        print(f'{error}; exporting needs: pip install "traffic_vlm[export]"', file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for path in sorted(options.output_dir.iterdir()):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

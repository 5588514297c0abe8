"""The demo page: `make demo` on this machine, and what a Hugging Face Space runs.

    python app.py                                # the weights in this folder, on http://127.0.0.1:7860
    python app.py --model username/traffic-vlm   # others, from the Hub or a folder

In a Space the package need not be installed, and the environment variable MODEL can replace --model.
"""

import importlib.util
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent


def find_package() -> None:
    """Make this folder importable as `traffic_vlm` if it is not installed."""
    if importlib.util.find_spec("traffic_vlm") is None:
        spec = importlib.util.spec_from_file_location("traffic_vlm", ROOT / "__init__.py")
        package = importlib.util.module_from_spec(spec)
        sys.modules["traffic_vlm"] = package
        spec.loader.exec_module(package)


def main() -> None:
    find_package()
    from traffic_vlm.options import option_parser
    from traffic_vlm.serving.options import ModelOptions

    parser = option_parser([ModelOptions], __doc__)
    parser.set_defaults(model=os.environ.get("MODEL", str(ROOT)))
    try:
        [options] = parser.parse_args_into_dataclasses()
    except ValueError as error:
        sys.exit(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that a supervisor's end deletes uploads, too
    parent = os.environ.get("GRADIO_TEMP_DIR")
    if parent:
        os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="traffic_vlm-", dir=parent, ignore_cleanup_errors=True) as uploads:
        os.environ["GRADIO_TEMP_DIR"] = os.path.realpath(uploads)  # Gradio reads it when it is imported
        serve(options)


def serve(options: Any) -> None:
    """Load the model, and serve the page until the process is stopped."""
    try:
        from traffic_vlm.serving.page import EXAMPLES, build_page, launch
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        sys.exit('the page needs gradio: pip install "traffic_vlm[demo]"')
    examples = [path for name in EXAMPLES if (path := ROOT / "docs" / name).exists()]
    try:
        pipe = options.load()
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    launch(build_page(pipe, examples, options.part_of_image), examples)


if __name__ == "__main__":
    main()

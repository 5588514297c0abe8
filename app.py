"""The page on which people try the model: `make demo` here, and what a Hugging Face Space runs.

    python app.py                                # serves this folder's weights on http://127.0.0.1:7860
    MODEL=username/traffic-vlm python app.py     # or others, of the Hub or of a folder

A Space holds this repository as it is; the package need not be installed.
"""

import importlib.util
import os
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parent


def find_package() -> None:
    """Make this folder importable as `traffic_vlm` where it is not installed."""
    if importlib.util.find_spec("traffic_vlm") is None:
        spec = importlib.util.spec_from_file_location("traffic_vlm", ROOT / "__init__.py")
        package = importlib.util.module_from_spec(spec)
        sys.modules["traffic_vlm"] = package
        spec.loader.exec_module(package)


def main() -> None:
    find_package()
    try:
        from traffic_vlm.serving.answerer import Answerer
        from traffic_vlm.serving.page import build_page, launch
    except ModuleNotFoundError as error:
        if error.name != "gradio":
            raise
        sys.exit('the page needs gradio: pip install "traffic_vlm[demo]"')
    examples = sorted((ROOT / "docs").glob("example*.jpg"))
    try:
        answerer = Answerer(os.environ.get("MODEL", ROOT))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    launch(build_page(answerer, examples), examples)


if __name__ == "__main__":
    main()

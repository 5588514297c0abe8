"""The demo page: `make demo` on this machine, and what a Hugging Face Space runs.

    python app.py                                # the weights in this folder, on http://127.0.0.1:7860
    python app.py --model username/traffic-vlm   # others, from the Hub or a folder

In a Space the package need not be installed.
"""

import importlib.util
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parent
if importlib.util.find_spec("traffic_vlm") is None:  # make this folder importable
    spec = importlib.util.spec_from_file_location("traffic_vlm", ROOT / "__init__.py")
    sys.modules["traffic_vlm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["traffic_vlm"])

from traffic_vlm.common.options import handle_signals, option_parser  # noqa: E402
from traffic_vlm.scripts import command  # noqa: E402
from traffic_vlm.serving.options import ModelOptions  # noqa: E402


@command("demo")
def main() -> None:
    from traffic_vlm.serving.page import build_page, launch

    handle_signals()
    [options] = option_parser([ModelOptions], __doc__).parse_args_into_dataclasses()
    launch(build_page(options.load(), options.part_of_image))


if __name__ == "__main__":
    sys.exit(main())

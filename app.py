"""The demo page: `make demo` on this machine, and what a Hugging Face Space runs.

    python app.py                                # the weights in this folder, on http://127.0.0.1:7860
    python app.py --model username/traffic-vlm   # others, from the Hub or a folder

In a Space the package need not be installed, and the environment variable MODEL can replace --model.
"""

import contextlib
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path


ROOT = Path(__file__).resolve().parent


def find_package() -> None:
    """Make this folder importable as `traffic_vlm` if it is not installed."""
    if importlib.util.find_spec("traffic_vlm") is None:
        spec = importlib.util.spec_from_file_location("traffic_vlm", ROOT / "__init__.py")
        sys.modules["traffic_vlm"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["traffic_vlm"])


def main() -> None:
    find_package()
    from traffic_vlm.common.options import option_parser
    from traffic_vlm.serving.options import ModelOptions

    parser = option_parser([ModelOptions], __doc__)
    parser.set_defaults(model=os.environ.get("MODEL", str(ROOT)))
    try:
        [options] = parser.parse_args_into_dataclasses()
        from traffic_vlm.serving.page import build_page, launch

        blocks = build_page(options.load(), options.part_of_image)
        try:
            launch(blocks)
            while True:
                time.sleep(3600)
        finally:  # also if it was interrupted while it started
            blocks.close()  # deletes uploads, and prints that the page ends
    except ModuleNotFoundError as error:
        sys.exit('the page needs gradio: pip install "traffic_vlm[demo]"' if error.name == "gradio" else str(error))
    except (OSError, ValueError, RuntimeError) as error:  # a wrong option, model or device, or no free port
        sys.exit(str(error))


if __name__ == "__main__":
    # Ctrl+C and SIGTERM end the page in order, and so does SIGINT in background jobs, which ignore it by default.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        main()

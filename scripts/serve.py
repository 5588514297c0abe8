"""Serve answers over HTTP: images and questions in, answers with probabilities out.

    python scripts/serve.py                        # http://127.0.0.1:8000, described at /docs
    curl -F image=@frame.jpg -F "questions=Is there a bus?" -F "questions=Is it raining?" localhost:8000/v1/answer

Runs on Ray Serve, on this machine or on a cluster (--address), until Ctrl-C or SIGTERM. If the environment variable
TRAFFIC_VLM_API_KEY is set, requests for answers must send that key. docs/serving.md explains the routes.
"""

import sys

from traffic_vlm.common.options import option_parser, silence_libraries
from traffic_vlm.scripts import command


@command("scale")
def main() -> int:
    from traffic_vlm.serving.deployment import ServeOptions, serve

    silence_libraries()
    [options] = option_parser([ServeOptions], __doc__).parse_args_into_dataclasses()
    try:
        serve(options)
    except KeyboardInterrupt:
        print("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Serve answers over HTTP: images and questions in, answers with probabilities out.

    python scripts/serve.py                        # http://127.0.0.1:8000, its description at /docs
    curl -F image=@frame.jpg -F "questions=Is there a bus?" -F "questions=Is it raining?" localhost:8000/v1/answer
    curl -F image=@frame.jpg -F "question=What is ahead?" localhost:8000/v1/generate     # words as they come

On Ray Serve: `--replicas 4` holds four models, `--address` runs them on a cluster. Requests that come together are
answered in one pass, an image asked about again within a while is not looked at again. /metrics is for Prometheus,
/healthz for whoever starts and stops it. It listens on this machine only unless --host says otherwise; the environment
variable TRAFFIC_VLM_API_KEY makes it ask for a key. Put a proxy with TLS before it where strangers can reach it.
"""

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent
NAME = "traffic_vlm"  # of the application


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT), help="model folder (default: this repository)")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 for all of the network")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--address", help="of a Ray cluster (auto, ray://host:10001); by default Ray on this machine")
    parser.add_argument("--replicas", type=int, default=1, help="that hold a model each")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of a replica's model")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 (default on a GPU)")
    parser.add_argument("--max_bytes", type=int, default=20_000_000, help="of a request")
    parser.add_argument("--max_pixels", type=int, default=40_000_000, help="of an image")
    parser.add_argument("--max_questions", type=int, default=64, help="of a request")
    parser.add_argument("--seconds", type=float, default=30.0, help="that a request may take")
    parser.add_argument("--max_waiting", type=int, default=256, help="requests of a replica at a time; then 503")
    parser.add_argument("--batch_size", type=int, default=16, help="requests in a pass of the model")
    parser.add_argument("--cached_images", type=int, default=256, help="that need not be looked at again")
    parser.add_argument("--cache_seconds", type=float, default=600.0, help="for so long")
    parser.add_argument("--allow_urls", action="store_true", help="fetch image_url from public addresses")
    arguments = parser.parse_args()
    for name, value in vars(arguments).items():
        least = 0 if name in ("cached_images", "cache_seconds") else 1e-9
        if isinstance(value, int | float) and not isinstance(value, bool) and value < least:
            parser.error(f"--{name} must be {'at least' if least == 0 else 'above'} 0, got {value}")
    return arguments


def run(arguments: argparse.Namespace) -> None:
    from traffic_vlm.serving.cluster import load_ray, share_machines, start_ray

    ray = load_ray("serving")
    from ray import serve

    from traffic_vlm.serving.api import API_KEY, build_app
    from traffic_vlm.serving.service import Settings

    key = os.environ.get(API_KEY)
    if key == "":
        raise ValueError(f"{API_KEY} is set, but empty: unset it to ask for no key")
    chosen = {name: value for name, value in vars(arguments).items() if name in Settings.__dataclass_fields__}
    settings = Settings(**chosen, dtype="bfloat16" if arguments.bf16 else None, api_key=key)
    start_ray(ray, arguments.address)
    signal.signal(signal.SIGTERM, interrupt)  # Ray has put its own in this place
    try:
        options, room = share_machines(ray.nodes(), arguments.device, arguments.threads)
        if arguments.replicas > room:
            asked = " and ".join(f"{name} {number}" for name, number in options.items())
            raise ValueError(f"--replicas {arguments.replicas}: there is room for {room} ({asked} each)")
        serve.start(http_options={"host": arguments.host, "port": arguments.port})
        deployment: Any = serve.deployment(
            name=NAME,
            num_replicas=arguments.replicas,
            ray_actor_options=options,
            max_ongoing_requests=2 * arguments.max_waiting,  # the app refuses by itself, with Retry-After
        )(serve.ingress(lambda: build_app(settings))())
        try:
            serve.run(deployment.bind(), name=NAME)
            print(
                f"serving on http://{arguments.host}:{arguments.port}, described at /docs; Ctrl-C ends it", flush=True
            )
            threading.Event().wait()
        finally:  # not where it was refused before: then a service of that name is another's
            if arguments.address is None:
                serve.shutdown()
            else:  # others may serve on that cluster
                serve.delete(NAME)
    except ray.exceptions.RayError as error:
        raise OSError(f"Ray Serve does not start: {error}") from error
    finally:
        ray.shutdown()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    arguments = parse()
    signal.signal(signal.SIGTERM, interrupt)  # as Ctrl-C, at any moment
    try:
        run(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

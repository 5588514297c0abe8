"""Serve answers over HTTP: images and questions in, answers with probabilities out.

    python scripts/serve.py                        # http://127.0.0.1:8000, described at /docs
    curl -F image=@frame.jpg -F "questions=Is there a bus?" -F "questions=Is it raining?" localhost:8000/v1/answer
    curl -F image=@frame.jpg -F "questions=What is ahead?" localhost:8000/v1/generate    # words as they are generated

With --thresholds an answer is yes from the threshold of its question type, and has a field not_sure.

Runs on Ray Serve, on this machine or on a cluster (--address), until Ctrl-C or SIGTERM. /metrics is for Prometheus.
/healthz is for a supervisor: 200 once a replica has loaded the model. If the environment variable TRAFFIC_VLM_API_KEY
is set, requests for answers and metrics must send that key. Put a proxy with TLS in front of it where strangers can
reach it.
"""

import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass, fields
from typing import Any

from traffic_vlm.options import option, option_parser
from traffic_vlm.serving.cluster import load_ray, require_ray, share_machines, start_ray


require_ray("serving")

from traffic_vlm.serving.api import API_KEY, build_app  # noqa: E402
from traffic_vlm.serving.service import Settings  # noqa: E402


NAME = "traffic_vlm"  # of the Ray Serve application
MAX_CONNECTIONS = 10_000  # of a replica; most can be slow


@dataclass
class ServeOptions(Settings):
    host: str = option("127.0.0.1", "0.0.0.0 to listen on all networks")
    port: int = 8000
    address: str | None = option(None, "Ray cluster: auto, or ray://host:10001; by default Ray on this machine")
    replicas: int = option(1, "processes, each with a model, a cache and its own metrics")


def handle_signals() -> None:
    """End on Ctrl-C and SIGTERM. A shell without job control starts background jobs with SIGINT ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def hold_port(host: str, port: int) -> socket.socket:
    """A socket that no other server can share a port with, except for Ray Serve, which allows sharing (SO_REUSEPORT).

    Two of our servers would else share the port, and each would get half of the requests.

    Raises:
        OSError: the port is in use or above 65535, or the address is not one of this machine.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server do not matter
        holder.bind((host, port))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except (OSError, OverflowError) as error:
        holder.close()
        raise OSError(f"--host {host} --port {port}: {error}") from error
    return holder


def run(options: ServeOptions) -> None:
    """Serve until interrupted.

    Raises:
        ValueError: an empty API key, too many replicas for the machines, or a cluster that already has this service.
        OSError: the port is in use, or Ray does not start.
    """
    api_key = os.environ.get(API_KEY)
    if api_key == "":
        raise ValueError(f"{API_KEY} is set, but empty: unset it to require no key")
    settings = Settings(**{one.name: getattr(options, one.name) for one in fields(Settings)})
    holder = hold_port(options.host, options.port) if options.address is None else None
    ray = load_ray(options.address)
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # not each step of starting and stopping
    start_ray(ray, options.address)
    handle_signals()  # Ray has replaced that of SIGTERM
    try:
        resources, room = share_machines(ray.nodes(), options.device, options.threads)
        if options.replicas > room:
            each = " and ".join(f"{name} {amount}" for name, amount in resources.items())
            raise ValueError(f"--replicas {options.replicas}: there is room for {room} ({each} each)")
        if NAME in serve.status().applications:
            raise ValueError(
                f"--address {options.address}: the cluster already runs the application {NAME}, which would be "
                f"replaced. Stop its server; if that was killed, ray.serve.delete({NAME!r}) removes it"
            )
        serve.start(http_options={"host": options.host, "port": options.port})
        deployment: Any = serve.deployment(
            name=NAME,
            num_replicas=options.replicas,
            ray_actor_options=resources,
            max_ongoing_requests=MAX_CONNECTIONS,  # the app itself refuses requests, with Retry-After
        )(serve.ingress(lambda: build_app(settings, api_key))())
        try:
            serve.run(deployment.bind(), name=NAME)
            print(f"serving on http://{options.host}:{options.port}, described at /docs; Ctrl-C stops it", flush=True)
            threading.Event().wait()
        finally:  # not serve.shutdown(): other applications may run on a cluster, and here it prints errors of its own
            serve.delete(NAME)
    except ray.exceptions.RayError as error:
        raise OSError(f"Ray Serve does not start: {error}") from error
    finally:
        ray.shutdown()
        if holder is not None:
            holder.close()


def main() -> int:
    handle_signals()
    parser = option_parser([ServeOptions], __doc__)
    try:
        [options] = parser.parse_args_into_dataclasses()
        run(options)
    except (ValueError, OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())

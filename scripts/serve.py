"""Serve answers over HTTP: images and questions in, answers with probabilities out.

    python scripts/serve.py                        # http://127.0.0.1:8000, its description at /docs
    curl -F image=@frame.jpg -F "questions=Is there a bus?" -F "questions=Is it raining?" localhost:8000/v1/answer
    curl -F image=@frame.jpg -F "questions=What is ahead?" localhost:8000/v1/generate    # words as they are generated

With --thresholds an answer is yes from the threshold of its question type, and has a field not_sure.

Runs on Ray Serve, on this machine or on a cluster (--address). Ctrl-C stops it. /metrics is for Prometheus. /healthz
is for a supervisor: 503 until a replica has loaded the model. If the environment variable TRAFFIC_VLM_API_KEY is set,
all requests but /healthz must send that key. Put a proxy with TLS in front of it where strangers can reach it.
"""

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, fields
from typing import Any

from traffic_vlm.options import option, option_parser
from traffic_vlm.serving.cluster import load_ray, require_ray, share_machines, start_ray


require_ray("serving")

from starlette.responses import JSONResponse  # noqa: E402

from traffic_vlm.serving.api import API_KEY, build_app  # noqa: E402
from traffic_vlm.serving.service import Settings  # noqa: E402


NAME = "traffic_vlm"  # of the Ray Serve application
HEALTH = "traffic_vlm_health"
MAX_CONNECTIONS = 10_000  # of a replica; most can be slow


@dataclass
class ServeOptions(Settings):
    host: str = option("127.0.0.1", "0.0.0.0 to listen on all networks")
    port: int = 8000
    address: str | None = option(None, "Ray cluster: auto, or ray://host:10001; by default Ray on this machine")
    replicas: int = option(1, "processes, each with a model, a cache and its own metrics")


def health_application(serve: Any) -> Any:
    """The application of /healthz: 200 if a replica of the service runs, else 503.

    It is separate because replicas cannot answer while they load the model.
    """

    class Health:  # defined here, so that its process does not import this module and with it the model's code
        def __init__(self) -> None:
            self.checked, self.is_up = -math.inf, False

        def __call__(self, request: Any) -> JSONResponse:
            if time.monotonic() - self.checked > 1:  # seconds: many requests must not occupy the controller
                service = serve.status().applications.get(NAME)
                deployment = service and service.deployments.get(NAME)
                self.is_up = bool(deployment and "RUNNING" in deployment.replica_states)
                self.checked = time.monotonic()
            if self.is_up:
                return JSONResponse({"status": "ok"})
            return JSONResponse({"status": "no replica runs; starting"}, 503, {"Retry-After": "1"})

    return serve.deployment(name=HEALTH, ray_actor_options={"num_cpus": 0})(Health).bind()


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def reserve_port(host: str, port: int) -> socket.socket:
    """Check that a port is free: Ray Serve would share it with any other process of the same user.

    Returns:
        a lock, held while it is open, against a second server that starts before this one listens.

    Raises:
        OSError: the port is in use or above 65535, or the address is not one of this machine.
    """
    lock = socket.socket(socket.AF_UNIX)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections do not matter
            probe.bind((host, port))
        if sys.platform == "linux":
            lock.bind(f"\0traffic_vlm {host} {port}")  # a name without a file: it ends with the process
    except (OSError, OverflowError) as error:
        lock.close()
        raise OSError(f"--host {host} --port {port}: {error}") from error
    return lock


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
    lock = reserve_port(options.host, options.port) if options.address is None else None
    ray = load_ray(options.address)
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # not each step of starting and stopping
    start_ray(ray, options.address)
    signal.signal(signal.SIGTERM, interrupt)  # Ray has replaced it
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
            serve.run(health_application(serve), name=HEALTH, route_prefix="/healthz")
            serve.run(deployment.bind(), name=NAME)
            print(f"serving on http://{options.host}:{options.port}, described at /docs; Ctrl-C stops it", flush=True)
            threading.Event().wait()
        finally:  # not serve.shutdown(): other applications may run on a cluster, and here it prints errors of its own
            serve.delete(NAME)
            serve.delete(HEALTH)
    except ray.exceptions.RayError as error:
        raise OSError(f"Ray Serve does not start: {error}") from error
    finally:
        ray.shutdown()
        if lock is not None:
            lock.close()


def main() -> int:
    signal.signal(signal.SIGTERM, interrupt)  # like Ctrl-C
    parser = option_parser([ServeOptions], __doc__)
    try:
        [options] = parser.parse_args_into_dataclasses()
        run(options)
    except (ValueError, OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

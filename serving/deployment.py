"""The service on Ray Serve: its options, its port, and its life from the start to Ctrl-C."""

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..common.options import option
from .cluster import running_ray, share_machines
from .service import API_KEY, Settings, build_app


NAME = "traffic_vlm"  # of the Ray Serve application


@dataclass
class DeploymentOptions(Settings):
    host: str = option("127.0.0.1", "0.0.0.0 to listen on all networks")
    port: int = 8000
    address: str | None = option(None, "Ray cluster: auto, or ray://host:10001; by default Ray on this machine")
    replicas: int = option(1, "processes, each with a model and a cache")
    seconds: float = option(30.0, "time to receive and answer a request; above: 408")
    max_waiting: int = option(256, "requests in a replica, and as many more before it; above: 503")


def check_port(host: str, port: int) -> None:
    """Raise an OSError if the port is in use, or the address is not one of this machine.

    Ray Serve opens ports for sharing (SO_REUSEPORT): two servers on one port would each get half of the requests.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # in spite of closed connections that linger
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise OSError(f"--host {host} --port {port}: {error}") from error


def serve(options: DeploymentOptions, on_start: Callable[[], None]) -> None:
    """Serve until interrupted.

    Args:
        on_start: called once Ray has started, whose signal handlers it can replace.

    Raises:
        ValueError: an empty API key, or too many replicas for the machines.
        OSError: the port is in use, or Ray does not start.
    """
    api_key = os.environ.get(API_KEY)
    if api_key == "":
        raise ValueError(f"{API_KEY} is set, but empty: unset it to require no key")
    if options.address is None:
        check_port(options.host, options.port)
    with running_ray(options.address) as ray:
        from ray import serve as ray_serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # not each step of starting and stopping
        on_start()
        resources, room = share_machines(ray.cluster_resources(), options.device, options.threads)
        if options.replicas > room:
            raise ValueError(f"--replicas {options.replicas}: there is room for {room}, each with {resources}")
        http = {"host": options.host, "port": options.port, "request_timeout_s": options.seconds}
        ray_serve.start(http_options=http)
        deployment: Any = ray_serve.deployment(
            name=NAME,
            num_replicas=options.replicas,
            ray_actor_options=resources,
            max_ongoing_requests=options.max_waiting,
            max_queued_requests=options.max_waiting,
        )(ray_serve.ingress(lambda: build_app(options, api_key))())
        try:
            ray_serve.run(deployment.bind(), name=NAME)
            print(f"serving on http://{options.host}:{options.port}, described at /docs; Ctrl-C stops it", flush=True)
            threading.Event().wait()
        finally:  # not serve.shutdown(): a cluster may run other applications, and on this machine it prints errors
            ray_serve.delete(NAME)

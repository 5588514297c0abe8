"""The service on Ray Serve: its port, and its life from the start to Ctrl-C."""

import logging
import os
import socket
import threading
from dataclasses import replace
from typing import Any

from ..common.options import handle_signals
from .cluster import running_ray, share_machines
from .service import ServeOptions, build_app


NAME = "traffic_vlm"  # of the Ray Serve application
API_KEY = "TRAFFIC_VLM_API_KEY"  # environment variable


def check_port(host: str, port: int) -> None:
    """Raise an OSError if the port is in use, or the address is not one of this machine.

    Ray Serve opens ports for sharing (SO_REUSEPORT): two servers on one port would each get half of the requests.
    """
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError) as error:
        raise OSError(f"--host {host} --port {port}: {error}") from error


def serve(options: ServeOptions) -> None:
    """Serve until Ctrl-C or SIGTERM, which is a KeyboardInterrupt.

    Raises:
        ValueError: an empty API key, or too many replicas for the machines.
        OSError: the port is in use, or Ray does not start.
    """
    api_key = os.environ.get(API_KEY)
    if api_key == "":
        raise ValueError(f"{API_KEY} is set, but empty: unset it to require no key")
    if options.address is None:
        check_port(options.host, options.port)
    replace(options, device="cpu").load()  # a wrong model is refused here, with its reason
    handle_signals()
    with running_ray(options.address) as ray:
        from ray import serve as ray_serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # not each step of starting and stopping
        handle_signals()  # Ray has replaced the handlers
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
            ray_serve.run(deployment.bind(), name=NAME, route_prefix=options.root_path)
            url = f"http://{options.host}:{options.port}{options.root_path}"
            print(f"serving on {url}, described at its /docs; Ctrl-C stops it", flush=True)
            threading.Event().wait()
        except RuntimeError as error:  # a replica cannot start
            raise OSError(f"the service does not start: {error}") from error
        finally:  # not serve.shutdown(): a cluster may run other applications, and on this machine it prints errors
            ray_serve.delete(NAME)

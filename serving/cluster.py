"""Ray: start it, share the machines among processes that hold a model each, and give these work."""

import atexit
import importlib.util
import math
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


# The proxy of a cluster sometimes dies while a client connects: https://github.com/ray-project/ray/issues/63202
MAX_CONNECTIONS = 3


def require_ray(task: str) -> None:
    """Exit with a message if Ray, and so the extra "scale", is not installed. `task` is what needs it."""
    if importlib.util.find_spec("ray") is None:
        raise SystemExit(f'{task} needs Ray: pip install "traffic_vlm[scale]"')


def load_ray(address: str | None) -> Any:
    """Import Ray with our settings, which it reads when it is imported. Those of the user's environment come first.

    Without an address, Ray will run on this machine for this command alone: it listens on the loopback interface, and
    asks for a token that only the processes of the command know.
    """
    settings = {
        "RAY_BACKEND_LOG_LEVEL": "fatal",
        # The default of 5 s (three times that in all) is too short for the proxy to start on a busy machine.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "traffic_vlm.serving.proxy.middlewares",
    }
    if address is None:
        settings |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # Without clusters of several machines, as on macOS, Ray uses the loopback address only.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    import ray

    return ray


def start_ray(ray: Any, address: str | None) -> None:
    """Start Ray on this machine, or connect to the cluster at an address.

    Ray on this machine has a temporary folder of its own, which is removed when the process ends.

    Raises:
        OSError: Ray does not start, or there is no cluster.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        # Ray's own choice. On macOS, the path of Python's is too long for a socket.
        parent = os.environ.get("RAY_TMPDIR") or ("/tmp" if sys.platform == "darwin" else None)
        options["_temp_dir"] = tempfile.mkdtemp(prefix="ray_", dir=parent)
        atexit.register(shutil.rmtree, options["_temp_dir"], ignore_errors=True)
    for attempt in range(1, MAX_CONNECTIONS + 1):
        try:
            ray.init(address=address or "local", **options)
            return
        except Exception as error:  # Ray raises many types, `Exception` itself among them
            if isinstance(error, ConnectionAbortedError) and attempt < MAX_CONNECTIONS:
                continue
            if address is None:
                raise OSError(f"Ray does not start on this machine: {error}") from error
            hint = "a cluster that asks for a token needs RAY_AUTH_MODE=token in the environment"
            raise OSError(f"Ray does not start at {address}: {error} ({hint})") from error


def share_machines(
    nodes: list[dict[str, Any]], device: str | None, threads: int, wanted: int = 0
) -> tuple[dict[str, float], int]:
    """Ray's resources for one process (a GPU if there are any, else cores), and how many processes have room.

    Args:
        nodes: `ray.nodes()`.
        device: "cpu", "cuda", or None for GPUs if there are any.
        threads: CPU cores of a process.
        wanted: number of processes; if there are fewer GPUs, several processes share one.

    Raises:
        ValueError: "cuda" without a GPU, or no CPU core.
    """
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = sum(int(available.get("GPU", 0)) for available in resources)
    cores = [int(available.get("CPU", 0)) for available in resources]
    if device == "cuda" and not gpus:
        raise ValueError("--device cuda: the machines have no GPU")
    if device != "cpu" and gpus:
        per_gpu = max(1, math.ceil(wanted / gpus))
        return {"num_gpus": 1 / per_gpu}, gpus * per_gpu
    if not any(cores):
        raise ValueError("the machines have no CPU core to spare")
    threads = min(threads, max(cores))
    return {"num_cpus": threads}, sum(count // threads for count in cores)


def process_with_actors(ray: Any, actors: Sequence[Any], items: Iterable[Any]) -> Iterator[Any]:
    """Yield what the `process` method of Ray actors makes of each item, in the order in which they finish.

    An actor gets one item at a time, and none before its `ready` method has returned: on a busy cluster, some actors
    may wait for room until the others have done all the work.

    Raises:
        ray.exceptions.RayError: an actor cannot start, or `process` raised an error.
    """
    items = iter(items)
    starting = {actor.ready.remote(): actor for actor in actors}
    working: dict[Any, Any] = {}
    item = next(items, None)
    while working or item is not None:
        [reference], _ = ray.wait([*working, *starting])
        result = ray.get(reference)
        if reference in starting:
            actor = starting.pop(reference)
        else:
            actor = working.pop(reference)
            yield result
        if item is not None:
            working[actor.process.remote(item)] = actor
            item = next(items, None)

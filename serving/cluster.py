"""How Ray is started, and how its machines are shared among processes with a model each."""

import atexit
import logging
import math
import os
import secrets
import shutil
import sys
import tempfile
from typing import Any


def load_ray(address: str | None) -> Any:
    """The module `ray`. On import it reads our settings from the environment; what the user has set there comes first.

    Without an address, Ray runs on this machine for this command alone: it listens on the loopback interface, and
    asks for a token that only the processes of the command know.
    """
    settings = {
        # On a busy machine the proxy needs longer to start than the default of 5 s, which it gets three times.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
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


def load_data() -> Any:
    """The module `ray.data`, without its messages and progress bars."""
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # the errors that it logs are raised, too
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data


def start_ray(ray: Any, address: str | None) -> None:
    """Start Ray on this machine, or connect to the cluster at an address.

    On this machine, Ray gets a new temporary folder, which is removed when the process ends.

    Raises:
        OSError: Ray does not start, or there is no cluster.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        # As Ray chooses it: on macOS, the path of Python's temporary folder is too long for a socket.
        parent = os.environ.get("RAY_TMPDIR") or ("/tmp" if sys.platform == "darwin" else None)
        options["include_dashboard"] = False  # would be eleven more processes
        options["_temp_dir"] = tempfile.mkdtemp(prefix="ray_", dir=parent)
        atexit.register(shutil.rmtree, options["_temp_dir"], ignore_errors=True)
    where = "on this machine" if address is None else f"at {address}"
    hint = "" if address is None else " (a cluster that asks for a token needs RAY_AUTH_MODE=token in the environment)"
    try:
        ray.init(address=address or "local", **options)
    except Exception as error:  # Ray raises many types, `Exception` itself among them
        raise OSError(f"Ray does not start {where}: {error}{hint}") from error


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

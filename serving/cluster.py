"""Ray, and what each process that holds a model asks of its machines."""

import math
import os
from typing import Any


def load_ray(task: str) -> Any:
    """The module, set to say little. `task` is what needs it, for the message where it is not installed."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # read when Ray is imported
    try:
        import ray
    except ModuleNotFoundError:
        raise SystemExit(f'{task} needs Ray: pip install "traffic_vlm[scale]"') from None
    return ray


def start_ray(ray: Any, address: str | None) -> None:
    """Ray on this machine, or the cluster at an address.

    Raises:
        OSError: it does not start, or there is no cluster.
    """
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises many kinds, `Exception` itself among them
        place = "on this machine" if address is None else f"at {address}"
        raise OSError(f"Ray does not start {place}: {error}") from error


def share_machines(
    nodes: list[dict[str, Any]], device: str | None, threads: int, wanted: int = 0
) -> tuple[dict[str, float], int]:
    """What a process asks for, a GPU if there are some, else cores for its threads; and how many find room.

    Args:
        nodes: as `ray.nodes()` tells them.
        device: "cpu", "cuda", or None for whatever is there.
        wanted: processes; where there are fewer GPUs, several share one.

    Raises:
        ValueError: no GPU where one is wanted, or no core at all.
    """
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    gpus = sum(int(there.get("GPU", 0)) for there in resources)
    cores = [int(there.get("CPU", 0)) for there in resources]
    if device == "cuda" and not gpus:
        raise ValueError("--device cuda: the machines have no GPU")
    if device != "cpu" and gpus:
        each = max(1, math.ceil(wanted / gpus))  # on a GPU
        return {"num_gpus": 1 / each}, gpus * each
    if not any(cores):
        raise ValueError("the machines have no CPU core to spare")
    threads = min(threads, max(cores))
    return {"num_cpus": threads}, sum(number // threads for number in cores)

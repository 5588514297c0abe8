"""Ray, and what each process that holds a model asks of its machines."""

import logging
import math
import os
from collections.abc import Iterator
from typing import Any


MAX_BLOCKS = 10_000  # of Ray Data; a block holds several rows where there are more
# A cluster's proxy forks a server for each client while gRPC's threads run, and now and then the server dies of it:
# https://github.com/ray-project/ray/issues/63202
MAX_CONNECTIONS = 3


def load_ray(task: str) -> Any:
    """The module, set to say little. `task` is what needs it, for the message where it is not installed."""
    # Both are read when Ray is imported. Ray Serve kills a proxy that has not started within three times the second,
    # 15 s as it comes: too little for a machine that is busy.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "20")
    try:
        import ray
    except ModuleNotFoundError:
        raise SystemExit(f'{task} needs Ray: pip install "traffic_vlm[scale]"') from None
    return ray


def start_ray(ray: Any, address: str | None) -> None:
    """Ray on this machine, or the cluster at an address, which is tried again where it breaks a connection off.

    Raises:
        OSError: it does not start, or there is no cluster.
    """
    for left in reversed(range(MAX_CONNECTIONS)):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            return
        except Exception as error:  # Ray raises many kinds, `Exception` itself among them
            if isinstance(error, ConnectionAbortedError) and left:
                continue
            if address is None:
                raise OSError(f"Ray does not start on this machine: {error}") from error
            hint = "a cluster that asks for a token needs RAY_AUTH_MODE=token in the environment"
            raise OSError(f"Ray does not start at {address}: {error} ({hint})") from error


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


class Driver:
    """An actor that reads from Ray Data inside the cluster: from outside, through ray://, that does not work."""

    def __init__(self, rows: list[dict[str, Any]], actors: int, map_options: dict[str, Any]):
        import ray

        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        data = ray.data.from_items(rows, override_num_blocks=min(len(rows), MAX_BLOCKS))
        self.results = iter(data.map(compute=ray.data.ActorPoolStrategy(size=actors), **map_options).iter_rows())

    def next(self) -> dict[str, Any] | None:
        return next(self.results, None)


def map_rows(ray: Any, rows: list[dict[str, Any]], actors: int, **map_options: Any) -> Iterator[dict[str, Any]]:
    """What each row becomes, as it comes, by so many actors; `map_options` as Ray Data's `Dataset.map` takes them.

    Raises:
        ray.exceptions.RayError: the cluster or too many of its actors have died.
    """
    driver = ray.remote(num_cpus=0)(Driver).remote(rows, actors, map_options)
    while (said := ray.get(driver.next.remote())) is not None:
        yield said

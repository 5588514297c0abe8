"""Ray: how it is started and stopped, and how its machines are shared among processes with a model each."""

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def running_ray(address: str | None) -> Iterator[Any]:
    """Yield the module `ray`, connected to the cluster at an address or started on this machine; stop it at the end.

    Ray on this machine listens on the loopback interface, and asks for a token that only its processes know.

    Raises:
        OSError: Ray does not start, there is no cluster, or Ray has failed inside the block.
    """
    # On import Ray reads its settings from the environment; those of the user come first.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "20")  # a busy machine needs more than 5
    settings: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Without clusters of several machines, as on macOS, Ray uses the loopback address only.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        settings |= {"address": "local", "include_dashboard": False}  # which would be eleven more processes
    import ray

    try:
        ray.init(**settings)
    except Exception as error:  # Ray raises many types, `Exception` itself among them
        raise OSError(f"Ray does not start: {error}") from error
    try:
        yield ray
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines()  # Ray's advice follows; the first of chained errors is the cause
        causes = [line for line in lines if re.match(r"[A-Za-z_][\w.]*: ", line)]
        raise OSError(f"Ray has failed: {(causes or lines[-1:])[0]}") from error
    finally:
        ray.shutdown()


def share_machines(available: Mapping[str, float], device: str | None, threads: int) -> tuple[dict[str, int], int]:
    """(Ray's resources for one process, the number of processes that have room): a GPU each, otherwise CPU cores.

    Args:
        available: `ray.cluster_resources()`.
        device: "cpu", "cuda", or None for GPUs if there are any.
        threads: CPU cores of a process.

    Raises:
        ValueError: "cuda" without a GPU.
    """
    gpus, cores = (int(available.get(name, 0)) for name in ("GPU", "CPU"))
    if device == "cuda" and not gpus:
        raise ValueError("--device cuda: the machines have no GPU")
    if device != "cpu" and gpus:
        return {"num_gpus": 1}, gpus
    threads = max(1, min(threads, cores))
    return {"num_cpus": threads}, cores // threads

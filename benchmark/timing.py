"""Taking time: alternating runs, lines through points, counted operations, and the time of kernels alone."""

import gc
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


Run = Callable[[], Any]  # one run of a work, with everything prepared

LEAST_ROUNDS = 3  # a median of fewer says nothing


@dataclass
class Timings:
    """Seconds of every round of runs that took turns.

    Attributes:
        seconds: for each name the seconds of its rounds, in order.
        errors: for each name that could not be run, why.
    """

    seconds: dict[str, list[float]]
    errors: dict[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, base: str) -> float:
        """How many times as long as `base` the median run of `name` takes."""
        return self.median(name) / self.median(base)

    def to_dict(self, base: str) -> dict[str, Any]:
        """Medians, quartiles and rounds of all runs in seconds, and the ratios of their medians to that of `base`."""
        runs = {}
        for name, seconds in self.seconds.items():
            low, _, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
            runs[name] = {"seconds": self.median(name), "quartiles": [low, high], "rounds": len(seconds)}
            if base in self.seconds:
                runs[name]["ratio"] = self.ratio(name, base)
        return runs | {name: {"error": error} for name, error in self.errors.items()}


def synchronise(device: str) -> None:
    """Wait until the device has done all it was asked for; a CPU always has."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def alternate(
    runs: Mapping[str, Run],
    device: str = "cpu",
    rounds: int = 11,
    max_seconds: float = 60.0,
    warm_up: int = 1,
    errors: type[Exception] = torch.OutOfMemoryError,
) -> Timings:
    """Let runs take turns, so that whatever else the machine does meanwhile is shared by all.

    Args:
        rounds: runs of each, but none are begun after `max_seconds` once there are `LEAST_ROUNDS`.
        warm_up: runs of each before, not counted: they compile, choose kernels and ask for memory.
        errors: a run that raises one of these while warming up is left out, and its message kept.
    """
    gc.collect()
    timings = Timings({})
    for name, run in runs.items():
        try:
            for _ in range(warm_up):
                run()
            timings.seconds[name] = []
        except errors as error:
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            timings.errors[name] = re.sub(r"/\S*/", "", line)[:200]  # folders of temporary files say nothing
    synchronise(device)
    start = time.perf_counter()
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.perf_counter() - start > max_seconds:
            break
        for name, seconds in timings.seconds.items():
            begin = time.perf_counter()
            runs[name]()
            synchronise(device)
            seconds.append(time.perf_counter() - begin)
    return timings


def fit_line(x: Sequence[float], y: Sequence[float]) -> dict[str, float]:
    """The line of least squares: slope, intercept, and the share R² of the variance of y that it explains."""
    if len(x) != len(y) or len(set(x)) < 2:
        raise ValueError(f"a line needs two different points, got x={list(x)} and y={list(y)}")
    slope, intercept = statistics.linear_regression(x, y)
    mean = statistics.fmean(y)
    rest = sum((b - slope * a - intercept) ** 2 for a, b in zip(x, y))
    variance = sum((b - mean) ** 2 for b in y)
    return {"slope": slope, "intercept": intercept, "r_squared": 1 - rest / variance if variance else 1.0}


def count_flops(run: Run) -> int:
    """Floating-point operations of matrix products, convolutions and attention; a multiply-add counts as two."""
    # The counter does not know the CPU's fused attention: written out, it is two matrix products that it knows.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


class Kernels(TorchDispatchMode):
    """Records the tensor operations of a run with their inputs, to do the same work again without the code around it.

    Views are left out: they compute nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs in self.calls:
            func(*args, **kwargs)


def record_kernels(run: Run) -> Kernels:
    """The operations of one run; the tensors that they read stay in memory as long as the result."""
    with torch.no_grad(), Kernels() as kernels:
        run()
    return kernels


def device_seconds(run: Run) -> float:
    """Seconds in which a GPU computes during a run, launching and waiting left out."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6

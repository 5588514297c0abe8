"""The most memory that works take, each contestant in a process of its own.

A process keeps memory that it once had, so in one that has run anything else the peak says little.
"""

import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from .contestants import CONTESTANTS, Setup
from .works import Work


STATUS = Path("/proc/self/status")


def measure(name: str, setup: Setup, works: Sequence[Work]) -> list[dict[str, int]]:
    """Peak memory in bytes of works done one after the other by a contestant in a new process.

    Returns:
        for each work "before", what the process held when all was prepared, Python and the libraries included, and
        "peak". On a GPU both count what torch allocated there.

    Raises:
        MemoryError: the process was killed, as happens where memory runs out.
        RuntimeError: the process failed; with the last line that it wrote.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", f"{__package__}.memory", str(torch.get_num_threads())]
    child = subprocess.run(command, input=pickle.dumps((name, setup, works)), env=environment, capture_output=True)
    if child.returncode < 0:
        raise MemoryError(f"{name}: the process was killed by signal {-child.returncode}")
    if child.returncode:
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"{name}: {lines[-1] if lines else 'the process failed'}")
    return json.loads(child.stdout.splitlines()[-1])


def measure_here(name: str, setup: Setup, works: Sequence[Work]) -> list[dict[str, int]]:
    """What `measure` does in its process."""
    found = []
    contestant = CONTESTANTS[name](setup)
    for work in works:
        run = work.prepare(contestant)
        restart_peak(setup.device)
        before = memory_now(setup.device)
        run()
        found.append({"before": before, "peak": memory_peak(setup.device)})
    return found


def restart_peak(device: str) -> None:
    """Forget the peak until now, where the system can."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # then it is the peak since the process began
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5)


def memory_now(device: str) -> int:
    """Bytes in use: of the GPU by tensors, or resident ones of this process."""
    return torch.cuda.memory_allocated(device) if device.startswith("cuda") else _resident("VmRSS")


def memory_peak(device: str) -> int:
    """The most bytes that were in use since `restart_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else _resident("VmHWM")


def _resident(entry: str) -> int:
    # Linux begins the count of ru_maxrss in a child with what its parent held; these entries are of this process.
    if STATUS.exists():
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        return int(lines[entry].split()[0]) * 1024  # given in kB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    found = measure_here(*pickle.load(sys.stdin.buffer))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Make a dataset of images with true questions and answers that `datasets.load_dataset(folder)` loads.

    python scripts/make_dataset.py --source synthetic --num_images 1000 --output_dir runs/synthetic
    python scripts/make_dataset.py --source camvid=/data/camvid synthetic --num_images 300 --output_dir runs/mix
    python scripts/make_dataset.py --source highway=DATA/highway --scene_labels DATA/scene_labels --output_dir runs/hw
    python scripts/make_dataset.py --source /data/city --output_dir runs/mine    # with data.yaml, COCO or Pascal VOC
    python scripts/make_dataset.py --source my_map.json=/data/mine --split val --output_dir runs/mine_val

A source is "synthetic"; NAME=FOLDER, where NAME is a file of data/formats/mappings or the path of your own mapping; or
a FOLDER, for which a mapping is drafted next to --output_dir. --num_images is the maximum for each of them.
A run that was stopped continues when the same command is given again. report.json has the counts and all problems.
"""

import ctypes
import os
import signal
import sys
from typing import Any

from traffic_vlm.common.options import option_parser
from traffic_vlm.data.dataset import DatasetOptions, make_dataset
from traffic_vlm.scripts import command


PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def stop_on_signals() -> None:
    """End this process on Ctrl-C and SIGTERM: the pool of `datasets` can swallow KeyboardInterrupt."""

    def stop(number: int, _: Any) -> None:
        print("stopped; the same command continues this run", file=sys.stderr, flush=True)
        os._exit(128 + number)

    for name in SIGNALS:  # a background job of a shell ignores SIGINT otherwise
        signal.signal(name, stop)


def prepare_workers() -> None:
    """Give forked processes the default handlers, and let Linux kill them when their parent ends.

    A pool ends its workers by SIGTERM and waits for them. A handler in Python would not run if the worker has just
    started to wait for a lock, and a signal that comes during the fork would be forgotten: it is blocked until then.
    The list of workers lacks one that is just starting, so the parent cannot end them all by itself.
    """
    parent = 0

    def before_fork() -> None:
        nonlocal parent
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def after_fork() -> None:
        for name in SIGNALS:
            signal.signal(name, signal.SIG_DFL)
        unblock()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    if sys.platform == "linux":  # elsewhere workers are not forked
        os.register_at_fork(before=before_fork, after_in_parent=unblock, after_in_child=after_fork)


@command("data")
def main() -> None:
    stop_on_signals()
    prepare_workers()
    [options] = option_parser([DatasetOptions], __doc__).parse_args_into_dataclasses()
    try:
        report = make_dataset(options)
    except OSError as error:
        raise OSError(f"{error}; complete files are kept, and the same command continues this run") from error
    print(f"images: {report['images']}, questions: {report['questions'].total()}")
    for question_type, count in report["questions"].most_common():
        print(f"  {question_type:<14}{count:>8}")
    for name in ("skipped", "left_out"):
        for reason, count in report[name].most_common():
            print(f"  {name.replace('_', ' ')}: {reason} ({count})")
    print(f"wrote {options.output_dir}; report.json has the fraction of yes for each class")


if __name__ == "__main__":
    sys.exit(main())

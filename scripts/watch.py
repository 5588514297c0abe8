"""Ask questions about every frame of a video: a timeline of answers, events, a picture of both, an annotated video.

    python scripts/watch.py street.mp4 --ask "Is there a pedestrian?" --ask "Is there a bus?" --output_dir runs/street
    python scripts/watch.py frames/ --frame_rate 10 --ask "Is it raining?" --output_dir runs/frames --video seen.mp4
    python scripts/watch.py 0 --fps 5 --bf16 --ask "Is there a dog?" --output_dir runs/camera      # until Ctrl-C
    python scripts/watch.py docs/example.jpg --ask "Is there a bus?" --output_dir runs/one         # seconds on a CPU

SOURCE is a video file, an image, a folder of images, a camera (its number or device) or the URL of a stream.
OUTPUT_DIR gets timeline.csv, events.csv, timeline.png and summary.json, which docs/serving.md explains.

An event begins where P(yes) reaches --on, ends where it falls below --off, and lasts at least --shortest seconds; with
--fps 1, one frame counts as one second. With --thresholds, both are the threshold of the question's type, and
timeline.csv gets a column not_sure.

The first Ctrl-C or SIGTERM ends the run after the current frames, the second one at once. The exit status is 0; 1 if
frames are missing (a broken file, a lost camera); 2 if the run could not start or failed; 130 after a signal.
"""

import signal
import sys
import threading
from typing import Any

from traffic_vlm.common.options import handle_signals, option_parser, silence_libraries
from traffic_vlm.scripts import command


@command("video")
def main() -> int:
    from traffic_vlm.serving.watcher import WatchOptions, watch

    silence_libraries()
    parser = option_parser([WatchOptions], __doc__)
    parser.add_argument("source", metavar="SOURCE", help="a video, an image, a folder, a camera or a stream")
    parser.add_argument("--ask", action="append", required=True, metavar="QUESTION", help="may be repeated")
    options, what = parser.parse_args_into_dataclasses()
    stop = threading.Event()

    def complete(*_: Any) -> None:
        stop.set()
        handle_signals()  # the second signal ends the run at once

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, complete)  # a shell lets its background jobs ignore SIGINT: `watch.py ... &`
    problems = watch(what.source, what.ask, options, stop)
    return 130 if stop.is_set() else int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

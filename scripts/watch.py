"""Ask questions about every frame of a video: a timeline of answers, events, a picture of both, videos.

    python scripts/watch.py street.mp4 --ask "Is there a pedestrian?" --ask "Is there a bus?" --output_dir runs/street
    python scripts/watch.py frames/ --frame_rate 10 --ask "Is it raining?" --output_dir runs/frames --video seen.mp4
    python scripts/watch.py 0 --fps 5 --bf16 --ask "Is there a dog?" --output_dir runs/camera      # until Ctrl-C
    python scripts/watch.py docs/example.jpg --ask "Is there a bus?" --output_dir runs/one         # seconds on a CPU

SOURCE is a video file, a folder of images, a camera (its number or device) or the URL of a stream. OUTPUT_DIR gets
timeline.parquet (frame, time, question, answer, score, p_yes), events.csv, timeline.png and summary.json; --video and
--clips write an annotated video and a clip of each event. During the run, and after a kill, the timeline is in
timeline.csv: one line per answer, written at once. Every frame of a file is answered; frames of a live source are
dropped, and counted, when the model is late.

A question that asks for words ("What color is the traffic light?") gets words: each period of one answer is an event.

An event begins where P(yes) reaches --on, ends where it falls below --off, and lasts at least --shortest seconds; with
--fps 1, one frame counts as one second. With --thresholds both are the threshold of the question's type, timeline and
events get a column not_sure.

The exit status is 0; 1 if frames are missing (a broken file, a lost camera); 2 if the run could not start or failed;
130 after Ctrl-C.
"""

import signal
import sys
from typing import Any

from traffic_vlm.options import option_parser, silence_libraries


class StopSignal:
    """The first Ctrl-C or SIGTERM ends the run after the current frames; the second one ends it at once."""

    def __init__(self) -> None:
        self.number = 0
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, self._on_signal)

    def _on_signal(self, number: int, _: Any) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
        print("\nstopping: completing the files", file=sys.stderr, flush=True)

    def __call__(self) -> int:
        return self.number


def main() -> int:
    try:
        from traffic_vlm.serving.watcher import WatchOptions, watch
    except ModuleNotFoundError as error:
        print(f'{error}: pip install ".[video]" in the repository', file=sys.stderr)
        return 2
    silence_libraries()
    parser = option_parser([WatchOptions], __doc__)
    parser.add_argument("source", metavar="SOURCE", help="a video, a folder of images, a camera or a stream")
    parser.add_argument("--ask", action="append", required=True, metavar="QUESTION", help="may be given many times")
    try:
        options, what = parser.parse_args_into_dataclasses()
        stop = StopSignal()
        problems = watch(what.source, what.ask, options, stop)
    # RuntimeError for a missing device, or memory of a GPU; FloatingPointError for damaged weights.
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if stop.number:
        return 128 + stop.number
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

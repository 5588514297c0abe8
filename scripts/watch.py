"""Watch a video with standing questions: a timeline of P(yes), events, a picture of both, an annotated video.

    python scripts/watch.py street.mp4 --ask "Is there a pedestrian?" --ask "Is there a bus?" --output runs/street
    python scripts/watch.py frames/ --frame_rate 10 --ask "Is it raining?" --output runs/frames --video runs/frames.mp4
    python scripts/watch.py 0 --fps 5 --bf16 --ask "Is there a dog?" --output runs/camera      # until Ctrl-C

SOURCE is a video file, a folder of images, a camera (its number or device) or the URL of a stream. DIR gets
timeline.parquet (frame, time, question, probability), events.csv, timeline.png and summary.json. While it runs, and
should it be killed, the timeline is in DIR/timeline/. A file is answered frame by frame; of a live source, frames are
dropped, and counted, when the model is late.

An event begins where P(yes) reaches --on, ends where it falls below --off, and lasts --shortest seconds at least; with
--fps 1, say, one frame stands for a second. The exit status is 0, or 1 where frames are missing (a broken file, a
camera that vanished: what was seen is kept), 2 where nothing could be watched, 130 after Ctrl-C.
"""

import argparse
import signal
import sys
import warnings
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent


def positive(kind: type) -> Any:
    def read(text: str) -> Any:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    read.__name__ = f"{kind.__name__} above 0"  # argparse puts it into its message
    return read


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s SOURCE --ask ..."
    )
    parser.add_argument("source", metavar="SOURCE", help="a video, a folder of images, a camera or a stream")
    parser.add_argument("--ask", action="append", required=True, metavar="QUESTION", help="may be given many times")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier run wrote")
    parser.add_argument("--video", type=Path, help="annotated video to write: .mp4, .mov or .mkv")
    parser.add_argument("--fps", type=positive(float), help="ask about so many frames a second (default: all)")
    parser.add_argument("--frame_rate", type=positive(float), help="of images, and of videos without time stamps")
    parser.add_argument("--on", type=float, default=0.6, help="P(yes) from which an event begins")
    parser.add_argument("--off", type=float, default=0.4, help="P(yes) below which it ends")
    parser.add_argument("--shortest", type=float, default=0.5, help="seconds; what lasts less is flicker")
    parser.add_argument("--model", default=str(ROOT), help="model folder (default: this repository)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 (default on a GPU)")
    parser.add_argument("--batch_size", type=positive(int), default=8, help="frames at once, of files")
    parser.add_argument("--threads", type=positive(int), help="of the CPU, for the model")
    return parser.parse_args()


class Stop:
    """Ctrl-C, or SIGTERM, ends the watching after the frames in work; a second one at once."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> "Stop":
        names = (signal.SIGINT, signal.SIGTERM)
        self.before = {name: signal.signal(name, self._on_signal) for name in names}
        return self

    def __exit__(self, *_: Any) -> None:
        for name, handler in self.before.items():
            signal.signal(name, handler)

    def _on_signal(self, number: int, _: Any) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
        print("\nstopping: writing what was seen", file=sys.stderr, flush=True)

    def __call__(self) -> bool:
        return self.number > 0


def load_model(arguments: argparse.Namespace) -> Any:
    import torch
    from transformers.utils import logging

    from traffic_vlm.serving.answerer import Answerer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        return Answerer(arguments.model, arguments.device, torch.bfloat16 if arguments.bf16 else None)
    except RuntimeError as error:  # there is no such device
        where = f" on {arguments.device}" if arguments.device else ""
        raise ValueError(f"{arguments.model} cannot be loaded{where}: {error}") from error


def check_video(arguments: argparse.Namespace) -> None:
    from traffic_vlm.serving.annotation import check_path
    from traffic_vlm.utils import DataError

    video = arguments.video
    if video is None:
        return
    check_path(video)
    if video.exists() and Path(arguments.source).exists() and video.samefile(arguments.source):
        raise DataError(f"--video {video}: is the video to watch")
    if video.exists() and not arguments.overwrite:
        raise DataError(f"--video {video}: exists; choose another name, or --overwrite")


def run(arguments: argparse.Namespace) -> int:
    from traffic_vlm.serving import watcher
    from traffic_vlm.serving.annotation import AnnotatedVideo, video_size
    from traffic_vlm.serving.events import EventDetector
    from traffic_vlm.serving.timeline import import_parquet
    from traffic_vlm.serving.video import Notes, looks_live, open_source, read_frames

    notes = Notes()
    questions = watcher.check_questions(arguments.ask)
    EventDetector(arguments.on, arguments.off, arguments.shortest)  # says what is wrong with them
    check_video(arguments)
    # A file is opened before the model is loaded, which takes seconds; a camera after that, or it would run full.
    live = looks_live(arguments.source)
    source = None if live else open_source(arguments.source, notes, arguments.frame_rate)
    import_parquet()
    watcher.check_folder(arguments.output, arguments.overwrite)
    scorer = watcher.QuestionScorer(load_model(arguments), questions, notes)
    source = source or open_source(arguments.source, notes, arguments.frame_rate)

    rate = min(source.rate, arguments.fps or source.rate)
    video = AnnotatedVideo(arguments.video, questions, rate) if arguments.video else None
    if arguments.overwrite:  # only now that all is open: a run that cannot start costs nothing of the one before
        watcher.clear_folder(arguments.output)
    options = watcher.Options(arguments.on, arguments.off, arguments.shortest, arguments.batch_size)
    progress = watcher.Progress(source.duration, sys.stderr)
    notes.say = lambda text: progress.tell(text, sys.stderr)
    recorder = watcher.Recorder(arguments.output, questions, options, rate, video, progress.tell)
    frames = read_frames(source, scorer.size, arguments.fps, video_size if video else None)
    capacity = watcher.LIVE_WAITING if source.is_live else 2 * arguments.batch_size
    reader = watcher.FrameReader(frames, capacity, source.is_live)
    ended_by = "an error"
    with Stop() as stop:
        try:
            watcher.watch(reader, scorer, recorder, progress, notes, stop)
            ended_by = signal.Signals(stop.number).name if stop.number else "end of the source"
        finally:
            recorder.close()
            write_summary(arguments, recorder, progress, reader, notes, ended_by)
    if stop.number:
        return 128 + stop.number
    return 1 if notes.problems else 0


def write_summary(
    arguments: argparse.Namespace, recorder: Any, progress: Any, reader: Any, notes: Any, ended_by: str
) -> None:
    recorder.write_summary(
        source=arguments.source,
        model=arguments.model,
        started=progress.started.isoformat(timespec="seconds"),
        ended_by=ended_by,
        seconds=progress.seconds,
        elapsed=round(progress.elapsed(), 3),
        frames_per_second=round(progress.frames / progress.elapsed(), 2),
        real_time=round(progress.seconds / progress.elapsed(), 3),
        dropped=reader.dropped,
        notes=notes.notes,
        problems=notes.problems,
    )
    print(f"{recorder.frames:,} frames, {recorder.events:,} events; wrote {arguments.output}", file=sys.stderr)


def main() -> int:
    arguments = parse()
    warnings.filterwarnings("ignore")
    try:
        return run(arguments)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

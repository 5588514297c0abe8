"""Answer questions about very many images: Parquet files of labels, by as many machines as there are.

    python scripts/label.py frames/ --ask "Is there a pedestrian?" --ask "Is there a bus?" --output runs/labels
    python scripts/label.py 's3://bucket/2026/*.tar' --ask "Is it raining?" --output s3://bucket/labels --address auto
    python scripts/label.py frames.parquet --column image --key_column id --ask "Is it night?" --output runs/labels

INPUT is a folder or a glob of images, of Parquet files with a column of images, or of WebDataset tars, local or on any
file system of fsspec. DIR gets part-*.parquet with a row for each image and question: key, question, probability
(P(yes); of an answer in words, its own), answer, and for an image that cannot be read its error. Stopped or killed,
the same command goes on; each image is there once. On several machines (--address) all must have this package, and see
INPUT, DIR and the model; if the cluster asks for a token, set RAY_AUTH_MODE=token and have it in ~/.ray/auth_token.

The exit status is 0, also where some images have errors (their number is printed), 2 where something cannot be
labelled now (a disk that is full or away, a network; the same command tries again), 130 after Ctrl-C.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parent.parent


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


at_least_one.__name__ = "whole number above 0"  # argparse puts it into its message


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s INPUT --ask ..."
    )
    parser.add_argument("input", metavar="INPUT", help="images, Parquet files or tars: a folder, a glob or one file")
    parser.add_argument("--ask", action="append", required=True, metavar="QUESTION", help="may be given many times")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--address", help="of a Ray cluster (ray://host:10001, auto); by default Ray on this machine")
    parser.add_argument("--model", default=str(ROOT), help="model folder (default: this repository)")
    parser.add_argument("--column", default="image", help="of Parquet files: the images")
    parser.add_argument("--key_column", help="of Parquet files: what names an image (default: file and row)")
    parser.add_argument("--images_per_part", type=at_least_one, default=1000, help="single images in a file of labels")
    parser.add_argument("--actors", type=at_least_one, help="that hold a model each (default: what fits the machines)")
    parser.add_argument("--threads", type=at_least_one, default=2, help="CPU cores of an actor")
    parser.add_argument("--batch_size", type=at_least_one, default=32, help="images in a pass of the model")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: GPUs if the machines have some")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 (default on a GPU)")
    return parser.parse_args()


def absolute(place: str) -> str:
    """A local path as seen from any folder; URLs as they are."""
    return place if "://" in place else os.path.abspath(place)


def label(arguments: argparse.Namespace) -> None:
    from traffic_vlm.serving.cluster import load_ray, start_ray

    ray = load_ray("labelling")
    from traffic_vlm.serving.labelling import Job, Output, fingerprint, parts_to_do
    from traffic_vlm.serving.questions import check_questions

    is_folder = os.path.isdir(arguments.model)
    model = absolute(arguments.model) if is_folder else arguments.model
    job = Job(
        absolute(arguments.input),
        tuple(check_questions(arguments.ask)),
        model,
        arguments.column,
        arguments.key_column,
        arguments.images_per_part,
        "bfloat16" if arguments.bf16 else None,
        fingerprint(model) if is_folder else None,
    )
    output = Output(absolute(arguments.output))
    plan = output.open_plan(job)
    done = output.done()
    todo = parts_to_do(plan, done)
    output.remove_drafts()
    if not todo:
        print(f"all {len(done)} parts are labelled", file=sys.stderr)
        return
    check_model(job)
    start_ray(ray, arguments.address)
    try:
        undone = follow(start(job, arguments, todo), len(todo), len(done))
    except ray.exceptions.RayError as error:
        raise OSError(f"Ray gave up; the same command goes on from here: {error}") from error
    finally:
        ray.shutdown()
    output.remove_drafts()  # of actors that were killed
    if undone:
        raise OSError(f"{undone:,} of {len(todo):,} parts are not done; the same command tries them again")


def check_model(job: Any) -> None:
    """Load it here once: what is wrong with it or with the questions is said now, not by every actor."""
    import torch
    from PIL import Image
    from transformers.utils import logging as library_logging

    from traffic_vlm.serving.answerer import Answerer

    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    answerer = Answerer(job.model, "cpu", torch.float32)
    for answer in answerer([Image.new("RGB", (64, 64))], [job.questions])[0]:
        if answer.unknown_words:
            print(f"{answer.question!r}: unknown words {', '.join(answer.unknown_words)}", file=sys.stderr)


def start(job: Any, arguments: argparse.Namespace, todo: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Make actors label the parts; gives what each said of its own."""
    import ray

    from traffic_vlm.serving.cluster import map_rows, share_machines
    from traffic_vlm.serving.labelling import Labeller

    needs: dict[str, Any]
    needs, room = share_machines(ray.nodes(), arguments.device, arguments.threads, arguments.actors or 0)
    actors = min(arguments.actors or room, len(todo))
    return map_rows(
        ray,
        todo,
        actors,
        fn=Labeller,
        fn_constructor_args=(job, absolute(arguments.output), arguments.batch_size),
        fn_constructor_kwargs={"device": "cuda" if "num_gpus" in needs else "cpu", "threads": needs.get("num_cpus")},
        **needs,
    )


def follow(results: Iterator[dict[str, Any]], parts: int, before: int) -> int:
    """Print how far it is after each part; how many parts could not be done."""
    begin = time.monotonic()
    images = errors = undone = 0
    for number, row in enumerate(results, 1):
        images += row["images"]
        errors += row["errors"]
        if row["problem"]:
            undone += 1
            print(f"part {row['part']} is not done: {row['problem']}", file=sys.stderr)
        seconds = time.monotonic() - begin
        left = seconds / number * (parts - number)
        print(
            f"{before + number - undone:,} of {before + parts:,} parts, {images:,} images, {errors:,} broken, "
            f"{images / seconds:.1f} images/s, {left / 60:.0f} min left",
            file=sys.stderr,
            flush=True,
        )
    return undone


def main() -> int:
    arguments = parse()
    try:
        label(arguments)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

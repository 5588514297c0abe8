"""From rows of a dataset to the batches of a training: augment → truth → questions → processor → targets.

    row {image, scene, questions, answers} → augmented image and scene → GroundTruth → questions
        → processor(packed=True, suffix=...) → packed batch, and tensors of the auxiliary losses

Image and scene are mirrored and cropped together, and questions are generated afterwards. So left, right, near and
counts match the image that the model sees. Changes of light keep the names of colors: "red" stays red.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import cv2
import numpy as np
import torch

from ..data.augment import augment, change_light
from ..data.questions import Balancer, Question, ask
from ..data.scene import parse_scene, scene_of
from ..data.truth import GroundTruth
from ..images_traffic_vlm import to_rgb


Span = tuple[int, int, int]  # row, first and last column of a question in a batch


@dataclass
class Prepared:
    """An image [H,W,3] as the model will see it, its questions, and the truth about it."""

    image: np.ndarray
    questions: list[Question]
    truth: GroundTruth | None  # None for hand-written questions
    source: str
    spans: list[Span] = field(default_factory=list)  # places of the questions, once the batch is packed


# Tensors of one auxiliary loss, of the images of a batch and the batch itself.
Target = Callable[[Sequence[Prepared], Mapping[str, Any]], Mapping[str, torch.Tensor]]


@dataclass
class TrafficCollator:
    """Turns rows of datasets into one batch of a training.

    A batch holds what the processor returns for packed questions with their answers (pixels stay uint8, to be
    normalized on the device: a quarter of the bytes between processes and devices), and `targets`: {name: tensors} of
    the auxiliary losses.

    Args:
        processor: a `TrafficVLMProcessor`.
        questions_per_image: maximum number of questions about each image. With 0, rows are those of `Drawing`, and a
            batch has images and targets alone, to train the tower without a decoder.
        seed: seed of all random choices, together with the seed of the worker.
        targets: of the auxiliary losses, by name; see `auxiliary/losses.py`.
        sizes: sides of the images in pixels, with weights; one is drawn for each batch. Empty: that of the processor.

    Yes and no are balanced for each question type and class over all rows that a worker collates, within each source:
    otherwise the style of a source with many cars would be evidence for a yes. A row without `scene` (hand-written
    questions) is never mirrored or cropped, as its answers could change. Others of the batch are repeated in place of
    rows without any possible question. If no row is left, questions are asked that are not balanced.
    """

    processor: Any
    questions_per_image: int = 16
    seed: int = 0
    targets: Mapping[str, Target] = field(default_factory=dict)
    sizes: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Reset random numbers and balancers, so that an epoch does not depend on the epochs before it."""
        self.epoch = epoch
        self.rng: random.Random | None = None  # made by the worker
        self.balancers: defaultdict[str, Balancer] = defaultdict(Balancer)

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The batch of rows, see the class. A ValueError if no row has a possible question."""
        cv2.setNumThreads(1)  # the data loader has as many processes as there shall be
        if not self.questions_per_image:
            images = [self.augmented(row) for row in rows]
            pixels = torch.from_numpy(np.stack([item.image for item in images]))
            return self.add_targets(images, {"pixel_values": pixels.permute(0, 3, 1, 2)})
        if self.rng is None:
            worker = torch.utils.data.get_worker_info()
            self.rng = random.Random(f"{self.seed}/{self.epoch}/{0 if worker is None else worker.seed}")
        images = [self.asked(row, self.rng) for row in rows]
        if not any(item.questions for item in images):
            images = [self.asked(row, self.rng, is_balanced=False) for row in rows]
        images = [item for item in images if item.questions]
        if not images:
            raise ValueError("no image of this batch has a question or a scene to ask about")
        # Batches of one size: cuDNN plans the convolutions anew for each number of images.
        images = [replace(item) for item in islice(cycle(images), len(rows))]
        side = self.rng.choices([*self.sizes], [*self.sizes.values()])[0] if self.sizes else None
        batch = self.processor(
            images=[item.image for item in images],
            text=[[question.text for question in item.questions] for item in images],
            suffix=[[question.answer for question in item.questions] for item in images],
            packed=True,
            row_tokens="fit",
            on_unknown="raise",
            do_rescale=False,
            do_normalize=False,
            image_size=side,
            return_tensors="pt",
        )
        ends = batch.pop("question_ends")  # the model needs them only for scoring
        rows_of, questions_of = (ends >= 0).nonzero(as_tuple=True)
        last = ends[rows_of, questions_of]
        first = last - batch["position_ids"][rows_of, last]
        spans = zip(rows_of.tolist(), first.tolist(), last.tolist())
        for item in images:
            item.spans = list(islice(spans, len(item.questions)))
        return self.add_targets(images, dict(batch))

    def augmented(self, row: Mapping[str, Any]) -> Prepared:
        """An augmented image of a row of `Drawing`, without questions."""
        whole = np.asarray(to_rgb(row["image"]))
        image, scene = augment(whole, parse_scene(row["scene"]), row["rng"], size=row["size"])
        return Prepared(image, [], GroundTruth(scene), row["source"])

    def asked(self, row: Mapping[str, Any], rng: random.Random, is_balanced: bool = True) -> Prepared:
        """An augmented image with new questions, or with some of the row's own, in the words in which they are asked.

        It is not cropped if a crop has no question.
        """
        scene, whole, source = scene_of(row), np.asarray(to_rgb(row["image"])), str(row.get("source", ""))
        if scene is None:
            pairs = zip(row.get("questions") or (), row.get("answers") or (), strict=True)
            questions = [Question(self.processor.rules.as_asked(text), answer, "", "", "") for text, answer in pairs]
            if len(questions) > self.questions_per_image:
                questions = rng.sample(questions, self.questions_per_image)
            image = change_light(whole, np.random.default_rng(rng.getrandbits(64)))
            return Prepared(image, questions, None, source)
        for crops in (is_balanced, False):
            image, seen = augment(whole, scene, np.random.default_rng(rng.getrandbits(64)), crops)
            truth = GroundTruth(seen)
            questions = ask(truth, rng, self.questions_per_image, self.balancers[seen.source] if is_balanced else None)
            if questions:
                break
        return Prepared(image, questions, truth, source)

    def add_targets(self, images: Sequence[Prepared], batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with the tensors of each target."""
        return batch | {"targets": {name: target(images, batch) for name, target in self.targets.items()}}

"""From drawn rows to the batches of a training: augment → truth → questions → processor → targets.

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
from ..data.grammar import in_other_words
from ..data.questions import Balancer, Question, ask
from ..data.scene import parse_scene, scene_of
from ..data.truth import GroundTruth
from ..images_traffic_vlm import to_rgb
from .drawing import Drawn


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
    """Turns rows that a `Drawing` drew into a batch of a training.

    A batch holds what the processor returns for packed questions with their answers (pixels stay uint8, to be
    normalized on the device: a quarter of the bytes between processes and devices), and `targets`: {name: tensors} of
    the auxiliary losses.

    Args:
        processor: a `TrafficVLMProcessor`.
        questions_per_image: maximum number of questions about each image. With 0, a batch has images and targets
            alone, to train the tower without a decoder.
        targets: of the auxiliary losses, by name; see `auxiliary/losses.py`.

    Yes and no are balanced for each question type and class over all rows that a worker collates in an epoch, within
    each source: otherwise the style of a source with many cars would be evidence for a yes. A row without `scene`
    (hand-written questions) is never mirrored or cropped, as its answers could change. Others of the batch are
    repeated in place of rows without any possible question. If no row is left, questions are asked that are not
    balanced.
    """

    processor: Any
    questions_per_image: int = 16
    targets: Mapping[str, Target] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.balancers: defaultdict[tuple[int, str], Balancer] = defaultdict(Balancer)  # by epoch and source

    def __call__(self, drawn: Drawn) -> dict[str, Any]:
        """The batch of drawn rows, see the class. A ValueError if no row has a possible question."""
        cv2.setNumThreads(1)  # the data loader has as many processes as there shall be
        if not self.questions_per_image:
            images = [self.augmented(row, drawn) for row in drawn.rows]
            pixels = torch.from_numpy(np.stack([item.image for item in images]))
            return self.add_targets(images, {"pixel_values": pixels.permute(0, 3, 1, 2)})
        images = [self.asked(row, drawn) for row in drawn.rows]
        if not any(item.questions for item in images):
            images = [self.asked(row, drawn, is_balanced=False) for row in drawn.rows]
        images = [item for item in images if item.questions]
        if not images:
            raise ValueError("no image of this batch has a question or a scene to ask about")
        # Batches of one size: cuDNN plans the convolutions anew for each number of images.
        images = [replace(item) for item in islice(cycle(images), len(drawn.rows))]
        default = self.processor.image_processor.size  # of other towers it may be no multiple of 32
        is_default = drawn.size == (default["height"], default["width"])
        batch = self.processor(
            images=[item.image for item in images],
            text=[[question.text for question in item.questions] for item in images],
            suffix=[[question.answer for question in item.questions] for item in images],
            packed=True,
            row_tokens="fit",
            on_unknown="ignore",
            do_rescale=False,
            do_normalize=False,
            image_size=None if is_default else drawn.size,
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

    def augmented(self, row: Mapping[str, Any], drawn: Drawn) -> Prepared:
        """An augmented image of a row, in the size of its batch and without questions."""
        whole, scene = np.asarray(to_rgb(row["image"])), parse_scene(row["scene"])
        image, scene = augment(whole, scene, drawn.rng, size=drawn.size)
        return Prepared(image, [], GroundTruth(scene), row["source"])

    def asked(self, row: Mapping[str, Any], drawn: Drawn, is_balanced: bool = True) -> Prepared:
        """An augmented image with new questions, or with some of the row's own, in the words in which they are asked.

        It is not cropped if a crop has no question.
        """
        scene, whole, source = scene_of(row), np.asarray(to_rgb(row["image"])), str(row.get("source", ""))
        rng = random.Random(int(drawn.rng.integers(1 << 62)))
        if scene is None:
            pairs = self.processor.rules.all_as_asked(row.get("questions") or (), row.get("answers") or ())
            questions = [Question(text, answer, "", "", "") for text, answer in pairs]
            if len(questions) > self.questions_per_image:
                questions = rng.sample(questions, self.questions_per_image)
            return Prepared(change_light(whole, drawn.rng), questions, None, source)
        balancer = self.balancers[drawn.epoch, scene.source] if is_balanced else None
        for crops in (is_balanced, False):
            image, seen = augment(whole, scene, drawn.rng, crops)
            truth = GroundTruth(seen)
            questions = ask(truth, rng, self.questions_per_image, balancer)
            questions = [replace(one, text=in_other_words(one.text, rng)) for one in questions]
            if questions:
                break
        return Prepared(image, questions, truth, source)

    def add_targets(self, images: Sequence[Prepared], batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with the tensors of each target."""
        return batch | {"targets": {name: target(images, batch) for name, target in self.targets.items()}}

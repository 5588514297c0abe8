"""Options of a training run, beside those of the library's `TrainingArguments`."""

import math
from dataclasses import dataclass

from ..common.options import option
from ..configuration_traffic_vlm import check_image_size
from ..data.scene import CLASSES, SYNTHETIC


LOSSES = ("presence", "grounding", "agreement", "centers")  # auxiliary; `auxiliary/losses.py` has them


@dataclass
class TrainOptions:
    """What to train, and on what.

    Raises:
        ValueError: a number is out of range, or options exclude or require each other.
    """

    # The model
    model_name_or_path: str | None = option(None, "weights to start from; without them --from_scratch true is needed")
    from_scratch: bool = option(
        False, "start from random weights, or with --vision_tower from that tower and a random decoder"
    )
    config: str | None = option(None, "folder with the config.json of other sizes, for training from scratch")
    vision_tower: str | None = option(
        None, "vision tower to start from: a folder, or the name or folder of a vision model of transformers"
    )
    freeze_vision: bool = option(False, "do not train the vision tower")
    freeze_blocks: int = option(0, "freeze the stem and this many of the 16 convolution blocks of our vision tower")
    average_decay: float = option(
        0.0, "save averaged weights (EMA) with this decay per step, such as 0.999; 0: the last or best ones"
    )
    hidden_dropout: float | None = option(None, "dropout of the decoder; default: as in the model's configuration")
    add_words: list[str] = option(
        [],
        "up to 20 new words of your questions, as WORD or WORD:KIN; each starts from KIN, a word of the vocabulary or "
        "the mean of a category's words",
    )
    image_size: int | None = option(None, "side of the images in pixels; training on small images first saves time")

    # The data
    train_dataset: list[str] = option(
        [SYNTHETIC], "folders of make_dataset.py or of your own images, or synthetic: scenes rendered while training"
    )
    train_weights: list[float] = option(
        [],
        "weight of each train_dataset; default: square root of its images. A tower draws each 12 times at most",
    )
    eval_dataset: list[str] = option(
        [], "folders for evaluation, or synthetic; default: 10 %% of each train_dataset, or 64 synthetic images"
    )
    max_eval_images: int = option(500, "maximum number of images for evaluation, evenly spread over the datasets")
    images_per_epoch: int = option(8192, "images between two checkpoints")
    questions_per_image: int = option(8, "questions asked about each image; 0 trains the tower and its head alone")

    # The auxiliary losses
    presence_weight: float = option(1.0, "weight of the presence loss: categories by region")
    grounding_weight: float = option(0.5, "weight of the grounding loss: attention of question words to their objects")
    agreement_weight: float = option(0.5, "weight of the agreement loss: no answers that contradict each other")
    centers_weight: float = option(0.1, "weight of the center loss: points and boxes, if the tower has a center head")

    # The size of images, and the tower alone (--questions_per_image 0)
    sizes: list[int] = option(
        [], "sides of the images in pixels, one drawn for each batch; in the last tenth of a run: --image_size"
    )
    size_weights: list[float] = option([], "weight of each of --sizes; default: equal weights")
    pool_above: int | None = option(None, "larger images have one token for 2 × 2 patches; default: as the start")
    locate: list[str] = option([], "classes to locate: the tower gets a new center head; default: as the start")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = int(name == "images_per_epoch")
            if isinstance(value, int | float) and value < least:
                raise ValueError(f"--{name} must be at least {least}, got {value}")
        for name, of in (("train_weights", "train_dataset"), ("size_weights", "sizes")):
            weights, weighted = getattr(self, name), getattr(self, of)
            if weights and (len(weights) != len(weighted) or not all(0 < weight < math.inf for weight in weights)):
                raise ValueError(f"--{name} must be positive, one for each of --{of} {weighted}, got {weights}")
        for side in self.sizes:
            check_image_size(side)
        if unknown := [name for name in self.locate if name not in CLASSES]:
            raise ValueError(f"--locate {unknown[0]}: is not one of {', '.join(CLASSES)}")
        if self.average_decay >= 1:
            raise ValueError(f"--average_decay must be below 1, got {self.average_decay}")
        if bool(self.model_name_or_path) == self.from_scratch:
            raise ValueError(
                "pass either --model_name_or_path, such as . for the weights of this folder, or --from_scratch true, "
                "which takes many more images and hours"
            )
        if self.model_name_or_path and self.config:
            raise ValueError("the weights of --model_name_or_path have their own sizes: leave out --config")

    def loss_weights(self) -> dict[str, float]:
        """Weights of the auxiliary losses that are not 0, by name; a tower has presence and centers."""
        weights = {name: getattr(self, f"{name}_weight") for name in LOSSES}
        if not self.questions_per_image:
            weights = {"presence": 1.0, "centers": self.centers_weight}
        return {name: weight for name, weight in weights.items() if weight}

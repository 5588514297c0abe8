"""Options of a training run: the model, the data, and which combinations are refused."""

import os
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from ..common.options import option
from ..configuration_traffic_vlm import MEDIUM_TEXT
from ..data.questions import QUESTION_TYPES
from ..data.scene import SYNTHETIC


LOSSES = ("presence", "grounding", "intermediate", "consistency", "agreement")  # auxiliary
SAVE_DTYPES = ("bfloat16", "float32")
PATCH = "patch"  # a --vision_tower that starts from random weights
TEXT_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "kv_latent_size"),
)


@dataclass
class SizeOptions:
    """Sizes of a new decoder, for training from scratch and for building the JSON files."""

    medium: bool = option(False, "the medium decoder, 6 layers of width 768: 60.6 M parameters in place of 18.1")
    hidden_size: int | None = option(None, "width of the decoder")
    intermediate_size: int | None = option(None, "width of its feed-forward layers")
    num_hidden_layers: int | None = option(None, "number of its layers")
    num_attention_heads: int | None = option(None, "number of its query heads")
    num_key_value_heads: int | None = option(None, "number of its key/value heads: 1 is multi-query attention")
    kv_latent_size: int | None = option(None, "multi-head latent attention with a latent of this size")

    def text_fields(self) -> dict[str, Any]:
        """Fields of the text configuration that were chosen, by name; {} for the default sizes."""
        given = {name: getattr(self, name) for name in TEXT_SIZES}
        chosen = {name: value for name, value in given.items() if value is not None}
        return (MEDIUM_TEXT if self.medium else {}) | chosen


@dataclass
class ModelOptions(SizeOptions):
    model_name_or_path: str | None = option(None, "weights to start from; without them --from_scratch true is needed")
    from_scratch: bool = option(
        False, "start from random weights, or with --vision_tower from that tower and a random decoder"
    )
    vision_tower: str | None = option(
        None,
        "vision tower to start from: a folder of train_tower.py, or the name or folder of a vision model of "
        "transformers; patch: a new vision transformer on 16x16 patches",
    )
    freeze_vision: bool = option(False, "do not train the vision tower")
    freeze_blocks: int | None = option(
        None, "freeze this many of the 16 convolution blocks of our vision tower (16: all convolutions)"
    )
    lora_rank: int = option(0, "train only LoRA matrices of this rank; 0 trains all weights")
    average_decay: float = option(
        0.0, "save averaged weights (EMA) with this decay per step, such as 0.999; 0: the last ones"
    )
    hidden_dropout: float | None = option(None, "dropout of the decoder; default: as in the model's configuration")
    add_words: list[str] = option(
        [],
        "up to 20 new words of your questions, as WORD or WORD:KIN; each starts from KIN, a word of the vocabulary or "
        "the mean of a category's words",
    )
    attn_implementation: str = option(
        "sdpa", "attention of the decoder; on a CPU in bfloat16, eager trains 20 %% faster than sdpa"
    )
    image_size: int | None = option(None, "side of the images in pixels; training on small images first saves time")
    compile_decoder: bool = option(
        False, "torch.compile the decoder: 25 %% less time per step, after half a minute of compilation"
    )
    save_dtype: str = option(
        "bfloat16", "dtype of the finished weights, bfloat16 or float32; checkpoints are in float32"
    )

    @property
    def trained_tower(self) -> str | None:
        """The vision tower to load; None if it starts from random weights or from those of the model."""
        return None if self.vision_tower == PATCH else self.vision_tower


@dataclass
class DataOptions:
    train_dataset: list[str] = option(
        [SYNTHETIC], "folders of make_dataset.py or of your own images, or synthetic: scenes rendered while training"
    )
    train_weights: list[float] | None = option(None, "sampling weight of each train_dataset, any positive numbers")
    eval_dataset: list[str] = option(
        [], "folders for evaluation, or synthetic; default: 10 %% of each train_dataset, or 64 synthetic images"
    )
    max_eval_images: int = option(500, "maximum number of images for evaluation, evenly spread over the datasets")
    images_per_epoch: int = option(8192, "images between two checkpoints")
    questions_per_image: int = option(8, "questions asked about each image")
    question_types: list[str] = option([*QUESTION_TYPES], f"question types to learn, of {' '.join(QUESTION_TYPES)}")
    presence_weight: float = option(1.0, "weight of the presence loss: categories by region and patch")
    grounding_weight: float = option(0.5, "weight of the grounding loss: attention of question words to their objects")
    intermediate_weight: float = option(
        0.5, "weight of the intermediate loss: the true value, predicted from mid-layer states"
    )
    consistency_weight: float = option(
        1.0, "weight of the consistency loss: equal answers to paraphrases, one in five questions; 0 asks none"
    )
    agreement_weight: float = option(0.5, "weight of the agreement loss: no answers that contradict each other")

    def loss_weights(self) -> dict[str, float]:
        """Weights of the auxiliary losses, by name."""
        return {name: getattr(self, f"{name}_weight") for name in LOSSES}


def check_options(model: ModelOptions, data: DataOptions, arguments: TrainingArguments) -> None:
    """Raise a ValueError for options that exclude or require each other, or that do not work with this model."""
    unknown = ", ".join(sorted(set(data.question_types) - set(QUESTION_TYPES)))
    sizes = ", ".join(f"{name}={value}" for name, value in model.text_fields().items())
    base, gpus = model.model_name_or_path, arguments.n_gpu
    refused = [
        # DataParallel would separate rows of text from their images.
        (gpus > 1, f"start one process for each GPU: torchrun --nproc_per_node {gpus}, or set CUDA_VISIBLE_DEVICES=0"),
        (
            arguments.dataloader_persistent_workers,
            "--dataloader_persistent_workers must be false: such workers would draw the first epoch in every epoch",
        ),
        (unknown, f"unknown --question_types {unknown}; expected some of {', '.join(QUESTION_TYPES)}"),
        (base and model.from_scratch, f"pass --model_name_or_path {base} or --from_scratch true, not both"),
        (
            not base and not model.from_scratch,
            "training needs weights to start from: --model_name_or_path . for those of this folder. --from_scratch "
            "true starts from random ones, which takes many more images and hours",
        ),
        (
            base and model.vision_tower == PATCH,
            f"--vision_tower {PATCH} starts from random weights: it needs --from_scratch true",
        ),
        (
            base and sizes,
            f"the weights of --model_name_or_path {base} have their own sizes: leave out {sizes}, or train with "
            "--from_scratch true",
        ),
        (
            model.save_dtype not in SAVE_DTYPES,
            f"--save_dtype must be one of {', '.join(SAVE_DTYPES)}, got {model.save_dtype!r}",
        ),
        (not 0 <= model.average_decay < 1, f"--average_decay must be in [0, 1), got {model.average_decay}"),
        (
            model.average_decay and arguments.load_best_model_at_end,
            "--average_decay averages the weights of the whole run: add --load_best_model_at_end false",
        ),
        (model.add_words and model.lora_rank, "--lora_rank trains no new words: leave out --add_words"),
        (
            model.lora_rank and (model.vision_tower or model.image_size or not base),
            "an adapter of --lora_rank is for the weights of --model_name_or_path as they are: leave out "
            "--vision_tower, --image_size and --from_scratch",
        ),
        (
            base and os.path.realpath(base) == os.path.realpath(arguments.output_dir),
            f"--output_dir {arguments.output_dir} is the folder of --model_name_or_path, whose weights would be lost",
        ),
        (
            arguments.num_train_epochs <= 0 and arguments.max_steps <= 0,
            f"--num_train_epochs must be above 0, got {arguments.num_train_epochs:g}",
        ),
        *[
            (value < limit, f"--{name} must be at least {limit}, got {value}")
            for name, value, limit in (
                ("lora_rank", model.lora_rank, 0),
                ("images_per_epoch", data.images_per_epoch, 1),
                ("max_eval_images", data.max_eval_images, 1),
                *((f"{loss}_weight", weight, 0) for loss, weight in data.loss_weights().items()),
            )
        ],
        (
            data.questions_per_image < 1,
            f"--questions_per_image must be at least 1, got {data.questions_per_image}; scripts/train_tower.py trains "
            "a vision tower without questions",
        ),
    ]
    for is_wrong, message in refused:
        if is_wrong:
            raise ValueError(message)

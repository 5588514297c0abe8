"""Options of a training run: the model, the data, and which combinations are refused."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from ..data.questions import QUESTION_TYPES
from ..data.scene import SYNTHETIC
from .sizes import SizeOptions
from .tower import is_tower_folder


LOSSES = ("presence", "grounding", "intermediate", "consistency", "agreement", "distillation")  # auxiliary
SAVE_DTYPES = ("bfloat16", "float32")
PATCH = "patch"  # a --vision_tower that starts from random weights


@dataclass
class ModelOptions(SizeOptions):
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "weights to start from; without them --from_scratch true is needed"}
    )
    from_scratch: bool = field(
        default=False,
        metadata={"help": "start from random weights, or with --vision_tower from that tower and a random decoder"},
    )
    vision_tower: str | None = field(
        default=None,
        metadata={
            "help": "vision tower to start from: a folder of train_tower.py, or the name or folder of a vision model "
            "of transformers; patch: a new vision transformer on 16x16 patches"
        },
    )
    freeze_vision: bool = field(default=False, metadata={"help": "do not train the vision tower"})
    freeze_blocks: int | None = field(
        default=None,
        metadata={"help": "freeze this many of the 16 convolution blocks of our vision tower (16: all convolutions)"},
    )
    thaw_after_epochs: float | None = field(
        default=None, metadata={"help": "with freeze_vision: train the tower after this many epochs"}
    )
    lora_rank: int = field(default=0, metadata={"help": "train only LoRA matrices of this rank; 0 trains all weights"})
    average_decay: float = field(
        default=0.0,
        metadata={"help": "save averaged weights (EMA) with this decay per step, such as 0.999; 0: the last ones"},
    )
    hidden_dropout: float | None = field(
        default=None, metadata={"help": "dropout of the decoder; default: as in the model's configuration"}
    )
    add_words: list[str] = field(
        default_factory=list,
        metadata={
            "help": "new words of your questions, as WORD or WORD:KIN; each gets the entry of a word that was not "
            "taught, and starts from the mean of a category or word that is its kin"
        },
    )
    attn_implementation: str = field(
        default="sdpa",
        metadata={"help": "attention of the decoder; on a CPU in bfloat16, eager trains 20 %% faster than sdpa"},
    )
    image_size: int | None = field(
        default=None, metadata={"help": "side of the images in pixels; training on small images first saves time"}
    )
    compile_decoder: bool = field(
        default=False,
        metadata={"help": "torch.compile the decoder: 25 %% less time per step, after half a minute of compilation"},
    )
    save_dtype: str = field(
        default="bfloat16",
        metadata={"help": "dtype of the finished weights, bfloat16 or float32; checkpoints are in float32"},
    )

    @property
    def trained_tower(self) -> str | None:
        """The vision tower to load; None if it starts from random weights or from those of the model."""
        return None if self.vision_tower == PATCH else self.vision_tower


@dataclass
class DataOptions:
    train_dataset: list[str] = field(
        default_factory=lambda: [SYNTHETIC],
        metadata={
            "help": "folders of make_dataset.py or of your own images, or synthetic for scenes rendered while training"
        },
    )
    train_weights: list[float] | None = field(
        default=None, metadata={"help": "sampling weight of each train_dataset, any positive numbers"}
    )
    eval_dataset: list[str] = field(
        default_factory=list,
        metadata={
            "help": "folders of images for evaluation; default: 10 %% of each train_dataset, or 64 synthetic images"
        },
    )
    max_eval_images: int = field(
        default=500, metadata={"help": "maximum number of images for evaluation, evenly spread over the datasets"}
    )
    images_per_epoch: int = field(default=8192, metadata={"help": "images between two checkpoints"})
    questions_per_image: int = field(default=8, metadata={"help": "questions asked about each image"})
    question_types: list[str] = field(
        default_factory=lambda: list(QUESTION_TYPES),
        metadata={"help": f"question types to learn, of {' '.join(QUESTION_TYPES)}"},
    )
    presence_weight: float = field(
        default=1.0, metadata={"help": "weight of the presence loss: categories by region and patch"}
    )
    grounding_weight: float = field(
        default=0.5, metadata={"help": "weight of the grounding loss: attention of question words to their objects"}
    )
    intermediate_weight: float = field(
        default=0.5,
        metadata={"help": "weight of the intermediate loss: the true value, predicted from mid-layer states"},
    )
    consistency_weight: float = field(
        default=1.0,
        metadata={
            "help": "weight of the consistency loss: equal answers to paraphrases, which are one in five questions; "
            "0 asks no paraphrases"
        },
    )
    distillation_weight: float = field(
        default=0.0,
        metadata={
            "help": "weight of the distillation loss: the probabilities of a trained query head, also where the true "
            "answer is unknown, which is one in four questions"
        },
    )
    agreement_weight: float = field(
        default=0.5, metadata={"help": "weight of the agreement loss: no answers that contradict each other"}
    )


def check_arguments(arguments: TrainingArguments) -> None:
    """Raise a ValueError for options of the library that do not work with this model or its data."""
    if arguments.n_gpu > 1:  # DataParallel would separate rows of text from their images
        raise ValueError(
            f"one process cannot train on {arguments.n_gpu} GPUs: start it with torchrun --nproc_per_node "
            f"{arguments.n_gpu}, or select one GPU with CUDA_VISIBLE_DEVICES=0"
        )
    if arguments.dataloader_persistent_workers:
        raise ValueError(
            "--dataloader_persistent_workers must be false: persistent workers would draw the images of the first "
            "epoch in every epoch"
        )


def check_options(model: ModelOptions, data: DataOptions) -> None:
    """Raise a ValueError for options that exclude or require each other."""
    if unknown := set(data.question_types) - set(QUESTION_TYPES):
        raise ValueError(
            f"unknown --question_types {', '.join(sorted(unknown))}; expected some of {', '.join(QUESTION_TYPES)}"
        )
    if model.model_name_or_path and model.vision_tower and not is_tower_folder(model.vision_tower):
        raise ValueError(
            f"with --model_name_or_path {model.model_name_or_path}, --vision_tower must be a folder of "
            f"train_tower.py, got {model.vision_tower}"
        )
    if data.distillation_weight and model.lora_rank:
        raise ValueError("--lora_rank keeps no query head: leave out --distillation_weight")
    if model.model_name_or_path and model.from_scratch:
        raise ValueError(
            f"pass either --model_name_or_path {model.model_name_or_path} or --from_scratch true, not both"
        )
    if not model.model_name_or_path and not model.from_scratch:
        raise ValueError(
            "training needs weights to start from: --model_name_or_path . for those of this folder. --from_scratch "
            "true starts from random ones, which takes many more images and hours"
        )
    if model.model_name_or_path and (sizes := model.text_fields()):
        named = ", ".join(f"{name}={value}" for name, value in sizes.items())
        raise ValueError(
            f"the weights of --model_name_or_path {model.model_name_or_path} have their own sizes: leave out {named}, "
            "or train with --from_scratch true"
        )
    if model.save_dtype not in SAVE_DTYPES:
        raise ValueError(f"--save_dtype must be one of {', '.join(SAVE_DTYPES)}, got {model.save_dtype!r}")
    if model.thaw_after_epochs is not None and not model.freeze_vision:
        raise ValueError("--thaw_after_epochs needs --freeze_vision true")
    if model.thaw_after_epochs is not None and model.lora_rank:
        raise ValueError("--lora_rank trains only LoRA matrices and never the tower: leave out --thaw_after_epochs")
    if not 0 <= model.average_decay < 1:
        raise ValueError(f"--average_decay must be in [0, 1), got {model.average_decay}")
    if model.add_words and model.lora_rank:
        raise ValueError("--lora_rank trains only LoRA matrices and no new words: leave out --add_words")
    if data.questions_per_image < 1:
        raise ValueError(
            f"--questions_per_image must be at least 1, got {data.questions_per_image}; scripts/train_tower.py trains "
            "a vision tower without questions"
        )

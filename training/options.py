"""Options of a training run: the model, the data, and which combinations are refused."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from ..data.questions import KINDS


@dataclass
class ModelOptions:
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "weights to start from; without them training starts from scratch"}
    )
    vision_tower: str | None = field(
        default=None,
        metadata={
            "help": "vision tower to start from: a folder of train_tower.py, or the name or folder of a vision model "
            "of transformers"
        },
    )
    freeze_vision: bool = field(default=False, metadata={"help": "do not train the vision tower"})
    freeze_blocks: int | None = field(
        default=None,
        metadata={"help": "do not train the first blocks of our vision tower, of 16 (16: no convolution)"},
    )
    thaw_after_epochs: float | None = field(
        default=None, metadata={"help": "with freeze_vision: train the tower after this many epochs"}
    )
    lora_rank: int = field(default=0, metadata={"help": "train only LoRA matrices of this rank; 0 trains all weights"})
    hidden_dropout: float | None = field(
        default=None, metadata={"help": "dropout of the decoder; default: as configured"}
    )
    attn_implementation: str = field(
        default="sdpa", metadata={"help": "of the decoder; on a CPU in bfloat16 eager trains a fifth faster"}
    )
    image_size: int | None = field(default=None, metadata={"help": "pixels; small images first saves time"})
    compile_decoder: bool = field(
        default=False, metadata={"help": "torch.compile the decoder: steps take a quarter less, after half a minute"}
    )


@dataclass
class DataOptions:
    train_dataset: list[str] = field(
        default_factory=lambda: ["synthetic"],
        metadata={"help": "folders of make_dataset.py or of your own, or synthetic: rendered while training"},
    )
    train_weights: list[float] | None = field(
        default=None, metadata={"help": "fraction of each train_dataset, any positive numbers"}
    )
    eval_dataset: list[str] = field(
        default_factory=list,
        metadata={"help": "folders; default: 10 %% of each train_dataset is held back, or 64 new synthetic images"},
    )
    max_eval_images: int = field(default=500, metadata={"help": "evaluate at most this many, evenly chosen"})
    images_per_epoch: int = field(default=8192, metadata={"help": "images between two checkpoints"})
    questions_per_image: int = field(default=8, metadata={"help": "questions asked about each image"})
    question_types: list[str] = field(
        default_factory=lambda: list(KINDS), metadata={"help": f"question types to learn, of {' '.join(KINDS)}"}
    )
    presence_weight: float = field(
        default=1.0, metadata={"help": "weight of the query head's loss: which categories are where"}
    )
    grounding_weight: float = field(
        default=0.5, metadata={"help": "weight of the loss on which patches question words attend to"}
    )
    intermediate_weight: float = field(
        default=0.5,
        metadata={"help": "weight of the loss on mid-layer states, where a question compares a value with one given"},
    )
    consistency_weight: float = field(
        default=1.0,
        metadata={
            "help": "weight of the loss on how far the answers to two paraphrases differ: of five questions about an "
            "image one may be a paraphrase; 0 asks none"
        },
    )


RENAMED = {
    "--kinds": "--question_types",
    "--cell_weight": "--presence_weight",
    "--attention_weight": "--grounding_weight",
    "--value_weight": "--intermediate_weight",
    "--wording_weight": "--consistency_weight",
    "--annotated_steps": "--vision_tower tower, trained by scripts/train_tower.py before",
}


def check_arguments(arguments: TrainingArguments) -> None:
    """Raise a ValueError for options of the library that would not do here what they do elsewhere."""
    if arguments.n_gpu > 1:  # DataParallel would separate rows of text from their images
        raise ValueError(
            f"one process cannot train on {arguments.n_gpu} GPUs: start it with torchrun --nproc_per_node "
            f"{arguments.n_gpu}, or show it one GPU by CUDA_VISIBLE_DEVICES=0"
        )
    if arguments.dataloader_persistent_workers:
        raise ValueError(
            "--dataloader_persistent_workers must stay false: workers that live on would draw the images of the first "
            "epoch in each of them"
        )
    if arguments.label_smoothing_factor:
        raise ValueError(
            f"--label_smoothing_factor must stay 0, got {arguments.label_smoothing_factor}: [PAD] has no probability, "
            "and smoothing would give it some"
        )


def check_options(model: ModelOptions, data: DataOptions) -> None:
    """Raise a ValueError for options that exclude or require each other."""
    if unknown := set(data.question_types) - set(KINDS):
        raise ValueError(f"--question_types has {', '.join(sorted(unknown))}; known are {', '.join(KINDS)}")
    if model.model_name_or_path and model.vision_tower:
        raise ValueError(
            f"--model_name_or_path {model.model_name_or_path} has a vision tower: either it or "
            f"--vision_tower {model.vision_tower}"
        )
    if model.thaw_after_epochs is not None and not model.freeze_vision:
        raise ValueError("--thaw_after_epochs needs --freeze_vision true, else nothing is frozen before")
    if model.thaw_after_epochs is not None and model.lora_rank:
        raise ValueError("--lora_rank trains its own matrices only: nothing can thaw, leave out --thaw_after_epochs")
    if data.questions_per_image < 1:
        raise ValueError(
            f"--questions_per_image must be at least 1, got {data.questions_per_image}; scripts/train_tower.py trains "
            "a vision tower without questions"
        )

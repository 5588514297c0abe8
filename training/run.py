"""A training run: datasets and a model from options, the Trainer, and a finished folder."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset
from transformers import BaseImageProcessor, PreTrainedConfig, TrainerState, TrainingArguments

from ..configuration_traffic_vlm import TrafficVLMConfig
from ..data.dataset import Mixture, SyntheticRows, synthetic_rows
from ..data.questions import KINDS
from ..evaluation.folders import load_rows, source_names
from ..evaluation.report import quick_metrics, spread
from ..modeling_traffic_vlm import (
    TrafficVLMAttention,
    TrafficVLMForConditionalGeneration,
    TrafficVLMMLP,
    TrafficVLMRMSNorm,
)
from ..processing_traffic_vlm import TrafficVLMProcessor
from ..publishing.card import write_card
from ..publishing.hub import publish
from ..utils import atomic_write_text, load_weights
from . import annotated
from .auxiliary import add_cell_head, presence_accuracy
from .collator import SupervisedCollator
from .trainer import FreezeTower, RefuseBrokenGradients, StartEpoch, TrafficTrainer, freeze_blocks, unwrap


ROOT = Path(__file__).resolve().parent.parent
FITTED_IMAGES = 1024  # whose tokens tell what a tower makes of annotated cells
JOB = "training_options.json"  # beside the checkpoints
HOW = ("attn_implementation", "compile_decoder")  # change how a run computes, not what
WHAT = ("learning_rate", "seed")  # of the library's options those that make it another run, and not a longer one
HELD_BACK = 0.1  # of the images are for evaluation, where no others are given for it
REWORDED = 5  # of so many questions about an image one may be another in other words: 1 of 8, 3 of 16, none of 4


@dataclass
class ModelOptions:
    model_name_or_path: str | None = field(default=None, metadata={"help": "weights to start from; else from nothing"})
    vision_tower: str | None = field(
        default=None,
        metadata={"help": "name or folder of a vision model of transformers, or of our own, to start from"},
    )
    freeze_vision: bool = field(default=False, metadata={"help": "do not train the vision tower"})
    freeze_blocks: int | None = field(
        default=None,
        metadata={"help": "do not train the first so many of the 16 blocks of our vision tower (16: no convolution)"},
    )
    thaw_after_epochs: float | None = field(
        default=None, metadata={"help": "with freeze_vision: train it after these"}
    )
    lora_rank: int = field(default=0, metadata={"help": "train LoRA matrices of this rank only; 0 trains all weights"})
    hidden_dropout: float | None = field(default=None, metadata={"help": "of the decoder; by default as configured"})
    attn_implementation: str = field(
        default="sdpa", metadata={"help": "of the decoder; on a CPU in bfloat16 eager trains a fifth faster"}
    )
    image_size: int | None = field(default=None, metadata={"help": "pixels; small images first saves time"})
    compile_decoder: bool = field(
        default=False, metadata={"help": "with torch.compile: its steps take a quarter less, after half a minute"}
    )


@dataclass
class DataOptions:
    train_dataset: list[str] = field(
        default_factory=lambda: ["synthetic"],
        metadata={"help": "folders of make_dataset.py or of your own, or synthetic: rendered while training"},
    )
    train_weights: list[float] | None = field(default=None, metadata={"help": "share of each train_dataset"})
    eval_dataset: list[str] = field(
        default_factory=list,
        metadata={
            "help": "folders; by default a tenth of each train_dataset is held back, or 64 new synthetic images"
        },
    )
    max_eval_images: int = field(default=500, metadata={"help": "at most so many of them all, evenly chosen"})
    images_per_epoch: int = field(default=8192, metadata={"help": "images between two checkpoints"})
    questions_per_image: int = field(default=8, metadata={"help": "0 trains the vision tower by its cells alone"})
    kinds: list[str] = field(
        default_factory=lambda: list(KINDS), metadata={"help": f"of questions to learn, of {' '.join(KINDS)}"}
    )
    cell_weight: float = field(default=1.0, metadata={"help": "of the losses on what each cell, and the image, shows"})
    attention_weight: float = field(default=0.5, metadata={"help": "of the loss on where asked words look"})
    value_weight: float = field(
        default=0.5, metadata={"help": "of the loss on what is there, where a question compares it with a value"}
    )
    wording_weight: float = field(
        default=1.0,
        metadata={
            "help": "of the loss on how far answers to two wordings are apart: of every whole five questions about an "
            "image one may be another in other words; 0 asks none"
        },
    )
    annotated_steps: list[int] = field(
        default_factory=list,
        metadata={
            "help": "two steps: until the first the decoder reads annotations in place of what a frozen tower sees, "
            "until the second less and less"
        },
    )


def open_datasets(folders: Sequence[str], prefer: str | None = None) -> list[Any]:
    """Rows of dataset folders, or scenes that are rendered when they are asked for."""
    sources = source_names([Path(folder) for folder in folders])
    return [
        SyntheticRows() if folder == "synthetic" else load_rows([Path(folder)], prefer=prefer, sources=[source])
        for folder, source in zip(folders, sources)
    ]


def choose_rows(parts: list[Any], most: int) -> Any:
    """At most so many rows, the same number of each dataset, at even distances; images are read when they are used."""
    chosen: list[Any] = [spread(part, max(1, most // len(parts))) for part in parts]
    return ConcatDataset(chosen)


def hold_back(rows: list[Any]) -> tuple[list[Any], list[Any]]:
    """Datasets without a tenth of their rows, and these; rendered scenes, of which there are always more, stay whole.

    The same rows whenever it is done.
    """
    kept, held = [], []
    for part in rows:
        if not isinstance(part, SyntheticRows):
            split = part.train_test_split(HELD_BACK, seed=0)
            part = split["train"]
            held.append(split["test"])
        kept.append(part)
    return kept, held


def check_rows(rows: Any, folder: str, processor: Any, needs_scenes: bool) -> None:
    """Raise a ValueError if questions written by people cannot be read, or if scenes are needed beside them."""
    if "scene" in getattr(rows, "column_names", ("scene",)):
        return  # asked by the grammar, which knows the words
    if needs_scenes:
        raise ValueError(
            f"{folder} has questions, but no scenes, which --annotated_steps and --questions_per_image 0 learn from"
        )
    texts = rows.select_columns(["questions", "answers"])
    pairs = list({pair: None for row in texts for pair in zip(row["questions"], row["answers"])})
    if unknown := processor.unknown_words(sorted({text for pair in pairs for text in pair})):
        raise ValueError(
            f"{len(unknown)} words of the questions and answers are not among the 500 of the vocabulary: "
            f"{', '.join(unknown[:20])}"
        )
    if pairs:  # one that is empty or too long is refused now, not in the midst of an epoch
        questions, answers = zip(*pairs)
        processor(text=list(questions), suffix=list(answers))


def check_arguments(arguments: TrainingArguments) -> None:
    """Raise a ValueError for options of the library that would train something else than they say."""
    if arguments.n_gpu > 1:  # DataParallel would part the rows of text from their images
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
    """Raise a ValueError for options that exclude or need each other."""
    if unknown := set(data.kinds) - set(KINDS):
        raise ValueError(f"--kinds has {', '.join(sorted(unknown))}; known are {', '.join(KINDS)}")
    if model.model_name_or_path and model.vision_tower:
        raise ValueError(
            f"--model_name_or_path {model.model_name_or_path} has a vision tower: either it or "
            f"--vision_tower {model.vision_tower}"
        )
    if model.thaw_after_epochs is not None and not model.freeze_vision:
        raise ValueError("--thaw_after_epochs needs --freeze_vision true, else nothing is frozen before")
    if model.thaw_after_epochs is not None and model.lora_rank:
        raise ValueError("--lora_rank trains its own matrices only: nothing can thaw, leave out --thaw_after_epochs")
    if not data.questions_per_image and (model.lora_rank or not data.cell_weight):
        raise ValueError("--questions_per_image 0 learns cells alone: it needs --cell_weight above 0 and no LoRA")


def build_model(options: ModelOptions) -> Any:
    """The model to train: from nothing, from weights, or around a vision tower of transformers or of our own."""
    vision: dict[str, Any] = {} if options.image_size is None else {"image_size": options.image_size}
    text = {} if options.hidden_dropout is None else {"hidden_dropout": options.hidden_dropout}
    how = {"attn_implementation": options.attn_implementation}
    if options.model_name_or_path:
        config = TrafficVLMConfig.from_pretrained(options.model_name_or_path)
        for name, value in vision.items():
            setattr(config.vision_config, name, value)
        for name, value in text.items():
            setattr(config.text_config, name, value)
        return load_weights(options.model_name_or_path, config=config, dtype=torch.float32, **how)
    tower_fields = vision
    if options.vision_tower:
        tower_fields = PreTrainedConfig.get_config_dict(options.vision_tower)[0]
        if "vision_config" in tower_fields:  # of a model of texts and images
            tower_fields["vision_config"] |= vision
        else:
            tower_fields |= vision
        if "model_type" not in tower_fields:
            raise ValueError(f"--vision_tower {options.vision_tower}: its config.json names no model_type")
    config = TrafficVLMConfig(vision_config=tower_fields, text_config=text)
    model = TrafficVLMForConditionalGeneration._from_config(config, **how)
    if options.vision_tower:
        tower = model.model.vision_tower
        model.model.vision_tower = type(tower).from_pretrained(
            options.vision_tower, config=tower.config, dtype=torch.float32
        )
    return model


def read_normalisation(vision_tower: str | None) -> dict[str, list[float]]:
    """The mean and standard deviation of pixels that a named tower was trained with, where its folder tells them."""
    try:
        fields, _ = BaseImageProcessor.get_image_processor_dict(vision_tower) if vision_tower else ({}, None)
    except OSError:  # a tower that was saved alone
        return {}
    return {name: fields[name] for name in ("image_mean", "image_std") if name in fields}


def compile_decoder(model: Any) -> None:
    """Compile the parts of each decoder layer, for rows of any length; what hooks into them still works.

    They stay bound to this model: a copy of it would compute with its weights.
    """
    kinds = (TrafficVLMAttention, TrafficVLMMLP, TrafficVLMRMSNorm)
    parts: list[Any] = [module for module in model.get_decoder().modules() if isinstance(module, kinds)]
    for part in parts:
        part.forward = torch.compile(part.forward, dynamic=True)


def add_lora(model: Any, rank: int) -> Any:
    """The model with LoRA matrices beside every linear layer of the decoder; only they are trained."""
    from peft import LoraConfig, get_peft_model

    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith("model.text_model")
    ]
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names))


def fit_annotated(
    tower: Any,
    processor: Any,
    mixture: Mixture,
    grid: tuple[int, int],
    options: DataOptions,
    arguments: TrainingArguments,
) -> annotated.AnnotatedTokens | None:
    """What the tower makes of annotated cells, where `annotated_steps` ask for it; the same whenever it is fitted."""
    if not options.annotated_steps:
        return None
    steps = options.annotated_steps
    if len(steps) != 2 or not 0 <= steps[0] <= steps[1]:
        raise ValueError(f"--annotated_steps are two steps, the second not before the first; got {steps}")
    if any(weight.requires_grad for weight in tower.parameters()):
        raise ValueError("--annotated_steps needs --freeze_vision true: it is fitted to a tower that stays as it is")
    collator = SupervisedCollator(processor, 0, seed=arguments.seed, grid=grid)
    size = arguments.per_device_train_batch_size
    numbers = range(min(FITTED_IMAGES, len(mixture)))
    parts = (numbers[start : start + size] for start in numbers[::size])
    batches = (collator([mixture[number] for number in part]) for part in parts)
    with torch.autocast(arguments.device.type, torch.bfloat16, enabled=arguments.bf16):
        return annotated.fit(tower, batches, grid)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written whole; the library writes `trainer_state.json` at its end."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if _is_json(path)]
    return max(whole, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def check_job(folder: Path, options: dict[str, Any]) -> None:
    """Raise a ValueError if checkpoints in a folder are of a run with other options; keep those of this one there."""
    path, options = folder / JOB, {name: value for name, value in options.items() if name not in HOW}
    if last_checkpoint(folder) and path.is_file():
        before = json.loads(path.read_text())
        for name, value in options.items():
            if before.get(name, value) != value:  # an option that the code did not have then may be anything
                raise ValueError(
                    f"{folder} holds a run with --{name} {before.get(name)}, not {value}: take another --output_dir, "
                    "or delete that run"
                )
    atomic_write_text(path, json.dumps(options, indent=1))


def save_folder(model: Any, processor: Any, folder: Path) -> None:
    """Write the finished model with its code and processor; each file is whole or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".save-") as temporary:
        model.save_pretrained(temporary)
        processor.save_pretrained(temporary)
        for path in Path(temporary).iterdir():
            shutil.move(path, folder / path.name)


def prepare_model(model_options: ModelOptions, data_options: DataOptions, processes: int) -> tuple[Any, Any]:
    """The model with its extra layers, frozen and compiled as asked for, and the processor for its image size."""
    model = build_model(model_options)
    processor = TrafficVLMProcessor.from_pretrained(model_options.model_name_or_path or ROOT)
    size = model.config.vision_config.image_size
    processor.image_processor.size = {"height": size, "width": size}
    for name, value in read_normalisation(model_options.vision_tower).items():
        setattr(processor.image_processor, name, value)
    if model_options.lora_rank:
        model = add_lora(model, model_options.lora_rank)
    elif data_options.cell_weight:
        add_cell_head(model, model_options.model_name_or_path)
    full = unwrap(model)
    if model_options.compile_decoder:
        compile_decoder(full)
    if not data_options.questions_per_image:
        full.requires_grad_(False)
        for part in (full.model.vision_tower, full.cell_head):
            part.requires_grad_(True)
    if model_options.freeze_vision and model_options.thaw_after_epochs is None:
        full.model.vision_tower.requires_grad_(False)
    elif model_options.freeze_vision and processes > 1:
        raise ValueError(
            "--thaw_after_epochs needs one process; on several, train twice: frozen, then from the result"
        )
    if model_options.freeze_blocks is not None:
        freeze_blocks(full.model.vision_tower, model_options.freeze_blocks)
    return model, processor


def prepare_rows(processor: Any, options: DataOptions, arguments: TrainingArguments) -> tuple[Mixture, Any]:
    """What to train on, and the rows to evaluate on, if that is to be done."""
    rows = open_datasets(options.train_dataset, prefer="train")
    held = open_datasets(options.eval_dataset) if arguments.eval_strategy != "no" else []
    cells_alone = not options.questions_per_image
    for part, folder in zip(rows, options.train_dataset):
        check_rows(part, folder, processor, cells_alone or bool(options.annotated_steps))
    for part, folder in zip(held, options.eval_dataset):
        check_rows(part, folder, processor, cells_alone)
    eval_rows = None
    if arguments.eval_strategy != "no":
        if not held:
            rows, held = hold_back(rows)
            if held and arguments.should_log:
                print(
                    f"{sum(map(len, held))} images, a tenth, are held back for evaluation; frames of one drive are "
                    "alike, so those of another one tell more: --eval_dataset"
                )
        held = held or [synthetic_rows(first_seed=1 << 40, num_images=min(options.max_eval_images, 64))]
        eval_rows = choose_rows(held, options.max_eval_images)
    return Mixture(rows, options.train_weights, options.images_per_epoch, arguments.seed), eval_rows


def final_figures(state: TrainerState, is_best: bool) -> dict[str, float]:
    """The figures of the last evaluation, or of that which chose the best checkpoint."""
    logged = [entry for entry in state.log_history if any(name.startswith("eval_") for name in entry)]
    best = [entry for entry in logged if is_best and entry["step"] == state.best_global_step]
    chosen = (best or logged or [{}])[-1]
    return {name.removeprefix("eval_"): value for name, value in chosen.items() if name.startswith("eval_")}


def train(arguments: TrainingArguments, model_options: ModelOptions, data_options: DataOptions) -> dict[str, float]:
    """Run or go on with a training run; returns the last figures.

    Raises:
        ValueError: options, data or weights that do not fit. FloatingPointError: the loss or a gradient is NaN.
        OSError: disk full.
        PublishError: the finished folder could not be pushed; it is there, and scripts/push_to_hub.py tries again.
    """
    check_arguments(arguments)
    check_options(model_options, data_options)
    folder = Path(arguments.output_dir)
    same = {name: getattr(arguments, name) for name in WHAT}
    check_job(folder, asdict(model_options) | asdict(data_options) | same)
    torch.manual_seed(arguments.seed)
    push, arguments.push_to_hub = arguments.push_to_hub, False  # the finished folder goes up, not each checkpoint
    arguments.eval_on_start = arguments.eval_strategy != "no"  # figures to compare with, or why there are none
    model, processor = prepare_model(model_options, data_options, arguments.world_size)
    vision = model.config.vision_config
    grid = (vision.image_size // vision.patch_size,) * 2
    mixture, eval_rows = prepare_rows(processor, data_options, arguments)
    asked = data_options.questions_per_image
    collator = SupervisedCollator(
        processor,
        asked,
        data_options.kinds,
        seed=arguments.seed,
        grid=grid,
        rewordings=asked // REWORDED if data_options.wording_weight else 0,
    )

    def figures(model: Any, rows: Any) -> dict[str, float]:
        if not data_options.questions_per_image:
            return presence_accuracy(model, processor, rows, grid, arguments.per_device_eval_batch_size)
        return quick_metrics(model, processor, rows, arguments.per_device_eval_batch_size)

    callbacks: list[Any] = [StartEpoch(mixture, collator), RefuseBrokenGradients()]
    if model_options.thaw_after_epochs is not None:
        callbacks.append(FreezeTower(model_options.thaw_after_epochs, model_options.freeze_blocks))
    trainer = TrafficTrainer(
        model,
        arguments,
        data_collator=collator,
        train_dataset=mixture,
        eval_dataset=eval_rows,
        cell_weight=0.0 if model_options.lora_rank else data_options.cell_weight,
        attention_weight=data_options.attention_weight,
        value_weight=data_options.value_weight,
        wording_weight=data_options.wording_weight,
        annotated=fit_annotated(unwrap(model).model.vision_tower, processor, mixture, grid, data_options, arguments),
        annotated_steps=data_options.annotated_steps or (0, 0),
        evaluator=figures,
        processing_class=processor,
        callbacks=callbacks,
    )
    checkpoint = arguments.resume_from_checkpoint or last_checkpoint(folder)
    if checkpoint and arguments.should_log:
        print(f"goes on from {checkpoint}")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if trainer.is_world_process_zero():
        finished = trainer.accelerator.unwrap_model(trainer.model)
        finished = finished.merge_and_unload() if model_options.lora_rank else finished
        save_folder(finished, processor, folder)
        final = final_figures(trainer.state, arguments.load_best_model_at_end)
        base, datasets = model_options.model_name_or_path, data_options.train_dataset
        write_card(folder, base, datasets, trainer.state.global_step, final)
        if push:
            token, private = arguments.hub_token, arguments.hub_private_repo
            publish(folder, arguments.hub_model_id or folder.name, report=print, token=token, private=private)
    return trainer.state.log_history[-1]

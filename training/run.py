"""A training run: rows → model → Trainer → verdict → folder."""

import math
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import concatenate_datasets
from transformers import TrainingArguments

from ..common.files import atomic_write
from ..data.datasets import Mixture
from ..evaluation.compare import compare
from ..tokenization_traffic_vlm import ANSWER_TOKENS
from .collator import TrafficCollator
from .drawing import Drawing
from .model import prepare_model
from .options import TrainOptions
from .publish import publish, write_card
from .rows import check_scenes, open_datasets, own_questions, shared_groups_note, sources_of, split_for_evaluation
from .trainer import BEFORE_FILE, AveragingTrainer, StartEpoch, TrafficTrainer, check_options, last_checkpoint
from .words import add_words


# Arguments of the library that a resumed run must have in common with the run that was stopped.
KEPT = ("learning_rate", "per_device_train_batch_size", "seed")


def train(arguments: TrainingArguments, options: TrainOptions) -> None:
    """Start or resume a training run, and save the finished folder.

    Raises:
        ValueError: options, data or weights are invalid. FloatingPointError: the loss or a weight is NaN.
        OSError: a file cannot be read or written; or the Hub does not take the finished folder, which is complete by
            then: scripts/push_to_hub.py pushes it.
    """
    if arguments.n_gpu > 1:  # DataParallel would separate rows of text from their images
        raise ValueError(f"start one process for each GPU: torchrun --nproc_per_node {arguments.n_gpu}")
    if arguments.dataloader_persistent_workers:
        raise ValueError("--dataloader_persistent_workers must be false: they would repeat the first epoch")
    base, folder = options.model_name_or_path, Path(arguments.output_dir)
    if base and Path(base).resolve() == folder.resolve():
        raise ValueError(f"--output_dir {folder} has the weights to start from: choose another folder")
    rows = open_datasets(options.train_dataset, prefer="train")
    held = open_datasets(options.eval_dataset) if arguments.eval_strategy != "no" else []
    check_options(folder, vars(options) | {name: getattr(arguments, name) for name in KEPT})
    push, arguments.push_to_hub = arguments.push_to_hub, False  # the finished folder is pushed, not each checkpoint
    arguments.load_best_model_at_end &= not options.average_decay
    arguments.dataloader_pin_memory &= arguments.device.type != "cpu"  # torch warns that it does nothing there

    torch.manual_seed(arguments.seed)
    make = train_on_questions if options.questions_per_image else train_tower
    trainer, finish = make(arguments, options, rows, held)
    checkpoint = arguments.resume_from_checkpoint or last_checkpoint(folder)
    if checkpoint and arguments.should_log:
        print(f"resuming from {checkpoint}")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.check_weights()
    trainer.average.swap()
    if trainer.is_world_process_zero():
        finish()
        if push and options.questions_per_image:
            token, private = arguments.hub_token, arguments.hub_private_repo
            publish(folder, arguments.hub_model_id or folder.name, token=token, private=private)
    trainer.accelerator.wait_for_everyone()  # a process that ends first would abort the others
    trainer.accelerator.end_training()


def train_on_questions(
    arguments: TrainingArguments, options: TrainOptions, rows: list[Any], held: list[Any]
) -> tuple[TrafficTrainer, Callable[[], None]]:
    """(Trainer of a full model, function that saves it): some of `rows` are held back if `held` is empty."""
    sources = sources_of(rows)
    model, processor = prepare_model(options, len(sources))
    processor.tokenizer = add_words(model, processor.tokenizer, options.add_words)
    own_questions(held, processor)
    own = own_questions(rows, processor)
    processor.own_questions |= any(processor.tokenizer.tokenize(text)[0] not in ANSWER_TOKENS for _, text in own)
    eval_rows, note = None, ""
    if arguments.eval_strategy != "no":
        rows, eval_rows, note = split_for_evaluation(rows, held, options.max_eval_images)
        arguments.eval_on_start = True  # a baseline for later evaluations
    if note and arguments.should_log:
        print(note)
    mixture = Mixture(rows, options.train_weights, options.images_per_epoch, arguments.seed)
    weights, targets = options.loss_weights(), {}
    if weights:  # a training without auxiliary losses loads none of their code
        from .auxiliary.losses import make_targets

        targets = make_targets(weights, processor, model.config.vision_config, sources)
    collator = TrafficCollator(
        processor, options.questions_per_image, arguments.seed, targets=targets, sizes=options.weighted_sizes
    )
    parts = (model, arguments, collator, mixture, eval_rows, processor)
    trainer = TrafficTrainer(*parts, average_decay=options.average_decay, loss_weights=weights)
    trainer.add_callback(StartEpoch(mixture, collator))
    return trainer, partial(finish_model, trainer, options, note, own)


def train_tower(
    arguments: TrainingArguments, options: TrainOptions, rows: list[Any], held: list[Any]
) -> tuple[AveragingTrainer, Callable[[], None]]:
    """(Trainer of a tower alone, function that saves it): the tower is evaluated on `held`, if there are any rows."""
    from .auxiliary.losses import make_targets

    sources = sources_of(rows)
    model, processor = prepare_model(options, len(sources))
    check_scenes([*options.train_dataset, *options.eval_dataset], [*rows, *held])
    size, pictures = model.tower.config.image_size, arguments.per_device_train_batch_size
    batches = arguments.world_size * arguments.gradient_accumulation_steps  # of a step
    if arguments.max_steps <= 0:  # the run is one epoch
        images = arguments.num_train_epochs * options.images_per_epoch
        arguments.max_steps = math.ceil(images / (batches * pictures))
    drawing = Drawing(rows, options, size, pictures, arguments.max_steps * batches, arguments.seed)
    eval_rows = concatenate_datasets(held) if held else None
    if held and (note := shared_groups_note(rows, eval_rows)) and arguments.should_log:
        print(note)
    targets = make_targets(options.loss_weights(), processor, model.tower.config, sources)
    parts = (model, arguments, TrafficCollator(processor, 0, targets=targets), drawing, eval_rows, processor)
    trainer = AveragingTrainer(*parts, average_decay=options.average_decay)
    return trainer, partial(finish_tower, trainer, options.eval_sizes or [size])


def finish_model(trainer: TrafficTrainer, options: TrainOptions, note: str, own: list[tuple[str, str]]) -> None:
    """Save the finished model with its card, and print the verdict."""
    folder, model, processor = Path(trainer.args.output_dir), trainer.model, trainer.processing_class
    model.config.use_cache = True  # the library's Trainer turns it off
    verdict = None
    if trainer.eval_dataset is not None and (folder / BEFORE_FILE).is_file():
        verdict = compare(pd.read_parquet(folder / BEFORE_FILE), trainer.answers(trainer.eval_dataset))
    verdict = verdict or "Whether training made the model better was not measured."
    if processor.taught is not None:  # else it is not known what the weights were taught before
        taught = model.training_head["words"].taught(processor.tokenizer, chain.from_iterable(own))
        processor.taught = sorted({*processor.taught, *taught})
    save_folder(model, processor, folder)
    story, steps = f"{verdict}\n{note}".strip(), trainer.state.global_step
    write_card(folder, options.model_name_or_path, options.train_dataset, steps, story)
    print(f"{verdict}\nThe model is in {folder}. Ask it:")
    print(f'    python scripts/ask.py docs/crossing.jpg "Is there a car?" --model {folder}')
    print("checkpoint-* (to resume this training) and runs (logs) in it can be deleted.")


def save_folder(model: Any, processor: Any, folder: Path) -> None:
    """Write the finished model with its code, its processor and the training head; each file is complete or absent.

    The model is converted to bfloat16; the training head stays in float32.
    """
    training_head = model._modules.pop("training_head")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        if "head" in training_head:
            from .auxiliary.presence import save_training_head

            save_training_head(training_head["head"], Path(temporary))
        model.bfloat16().save_pretrained(temporary)
        processor.save_pretrained(temporary)
        for path in Path(temporary).iterdir():
            with atomic_write(folder / path.name) as complete:
                shutil.move(path, complete)


def finish_tower(trainer: AveragingTrainer, sizes: list[int]) -> None:
    """Write the finished tower, and evaluate it at all sizes."""
    from .auxiliary.tower import answer_presence, write_tower

    folder, answers = Path(trainer.args.output_dir), None
    if trainer.eval_dataset is not None:
        with trainer.accelerator.autocast():
            answers = answer_presence(trainer.model, trainer.eval_dataset, sizes)
    write_tower(trainer.model, answers, folder)
    print(f"The tower is in {folder / 'tower'}. checkpoint-* (to resume this training) in {folder} can be deleted.")

"""A training run: rows → model → Trainer → verdict → folder."""

import math
import shutil
import tempfile
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
from .trainer import BEFORE_FILE, StartEpoch, TrafficTrainer, check_options, last_checkpoint
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
    evaluates, asks = arguments.eval_strategy != "no", options.questions_per_image > 0
    rows = open_datasets(options.train_dataset, prefer="train")
    held = open_datasets(options.eval_dataset) if evaluates else []
    sources, loss_weights = sources_of(rows), options.loss_weights()
    check_options(folder, vars(options) | {name: getattr(arguments, name) for name in KEPT})

    torch.manual_seed(arguments.seed)
    model, processor = prepare_model(options, len(sources))
    vision = model.config.vision_config if asks else model.tower.config
    if not getattr(vision, "located", None):
        loss_weights.pop("centers", None)  # the tower has no center head
    train_rows: Any
    eval_rows, note = None, ""
    if asks:
        processor.tokenizer = add_words(model, processor.tokenizer, options.add_words)
        own_questions(held, processor)
        own = own_questions(rows, processor)
        processor.own_questions |= any(processor.tokenizer.tokenize(text)[0] not in ANSWER_TOKENS for _, text in own)
        if evaluates:
            rows, eval_rows, note = split_for_evaluation(rows, held, options.max_eval_images)
        train_rows = Mixture(rows, options.train_weights, options.images_per_epoch, arguments.seed)
    else:
        check_scenes([*options.train_dataset, *options.eval_dataset], [*rows, *held])
        pictures, batches = arguments.per_device_train_batch_size, arguments.world_size  # of a pass
        batches *= arguments.gradient_accumulation_steps
        if arguments.max_steps <= 0:  # the run is one epoch
            images = arguments.num_train_epochs * options.images_per_epoch
            arguments.max_steps = math.ceil(images / (batches * pictures))
        steps = arguments.max_steps * batches
        train_rows = Drawing(rows, options, vision.image_size, pictures, steps, arguments.seed)
        if held:
            eval_rows = concatenate_datasets(held)
            note = shared_groups_note(rows, eval_rows)
    if note and arguments.should_log:
        print(note)

    targets = {}
    if loss_weights:  # a training without auxiliary losses loads none of their code
        from .auxiliary.targets import make_targets

        targets = make_targets(loss_weights, processor, vision, sources)
    asked, sizes = options.questions_per_image, options.weighted_sizes
    collator = TrafficCollator(processor, asked, arguments.seed, targets=targets, sizes=sizes)
    push, arguments.push_to_hub = arguments.push_to_hub, False  # the finished folder is pushed, not each checkpoint
    arguments.eval_on_start = evaluates and asks  # a baseline for later evaluations
    arguments.load_best_model_at_end &= not options.average_decay
    arguments.dataloader_pin_memory &= arguments.device.type != "cpu"  # torch warns that it does nothing there
    parts = (model, arguments, collator, train_rows, eval_rows, processor)
    if asks:
        trainer = TrafficTrainer(*parts, average_decay=options.average_decay, loss_weights=loss_weights)
        trainer.add_callback(StartEpoch(train_rows, collator))
    else:
        from .auxiliary.tower import TowerTrainer

        eval_sizes = options.eval_sizes or [vision.image_size]
        trainer = TowerTrainer(*parts, average_decay=options.average_decay, eval_sizes=eval_sizes)

    checkpoint = arguments.resume_from_checkpoint or last_checkpoint(folder)
    if checkpoint and arguments.should_log:
        print(f"resuming from {checkpoint}")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.check_weights()
    trainer.average.swap()
    if trainer.is_world_process_zero():
        if asks:
            finish(trainer, options, note, own)
        else:
            trainer.finish()
        if asks and push:
            token, private = arguments.hub_token, arguments.hub_private_repo
            publish(folder, arguments.hub_model_id or folder.name, token=token, private=private)
    trainer.accelerator.wait_for_everyone()  # a process that ends first would abort the others
    trainer.accelerator.end_training()


def finish(trainer: TrafficTrainer, options: TrainOptions, note: str, own: list[tuple[str, str]]) -> None:
    """Save the finished model with its card, and print the verdict."""
    folder = Path(trainer.args.output_dir)
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    processor: Any = trainer.processing_class
    model.config.use_cache = True  # the library's Trainer turns it off
    comparison = None
    if trainer.eval_dataset is not None and (folder / BEFORE_FILE).is_file():
        comparison = compare(pd.read_parquet(folder / BEFORE_FILE), trainer.answers(model, trainer.eval_dataset))
    verdict = comparison.verdict() if comparison else "Whether training made the model better was not measured."
    if processor.taught is not None:  # else it is not known what the weights were taught before
        taught = trainer.asked.taught(processor.tokenizer, chain.from_iterable(own))
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
    training_head = model._modules.pop("training_head", None)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        if training_head is not None:
            from .auxiliary.head import save_training_head

            save_training_head(training_head["head"], Path(temporary))
        model.bfloat16().save_pretrained(temporary)
        processor.save_pretrained(temporary)
        for path in Path(temporary).iterdir():
            with atomic_write(folder / path.name) as complete:
                shutil.move(path, complete)

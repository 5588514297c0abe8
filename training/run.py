"""A training run: rows → model → Trainer → verdict → folder."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import TrainingArguments

from ..common.files import atomic_write
from ..evaluation.compare import compare
from ..evaluation.report import answer_metrics
from ..tokenization_traffic_vlm import ANSWER_TOKENS
from .collator import TrafficCollator
from .model import prepare_model
from .options import TrainOptions
from .publish import publish, write_card
from .rows import draw_rows, mix_rows, open_datasets, own_questions, sources_of
from .trainer import BEFORE_FILE, StartEpoch, TrafficTrainer, last_checkpoint, record_options
from .words import add_words, content_words


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
    base = options.model_name_or_path
    if base and Path(base).resolve() == Path(arguments.output_dir).resolve():
        raise ValueError(f"--output_dir {arguments.output_dir} has the weights to start from: choose another folder")
    folder, evaluates, asks = Path(arguments.output_dir), arguments.eval_strategy != "no", options.questions_per_image
    rows = open_datasets(options.train_dataset, prefer="train")
    held = open_datasets(options.eval_dataset) if evaluates else []
    sources, loss_weights = sources_of(rows), options.loss_weights()
    record_options(folder, vars(options) | {name: getattr(arguments, name) for name in KEPT})

    torch.manual_seed(arguments.seed)
    model, processor = prepare_model(options, len(sources))
    vision, own = model.config.vision_config if asks else model.tower.config, []
    if not getattr(vision, "located", None):
        loss_weights.pop("centers", None)  # the tower has no center head
    if asks:
        processor.tokenizer = add_words(model, processor.tokenizer, options.add_words)
        own_questions(held, processor)
        own = own_questions(rows, processor)
        processor.own_questions |= any(processor.tokenizer.tokenize(text)[0] not in ANSWER_TOKENS for _, text in own)
        mixture, eval_rows, note = mix_rows(rows, held, arguments, options)
    else:
        mixture, eval_rows, note = draw_rows(rows, held, arguments, options, vision.image_size)
    if note and arguments.should_log:
        print(note)

    targets = {}
    if loss_weights:  # a training without auxiliary losses loads none of their code
        from .auxiliary.targets import make_targets

        targets = make_targets(loss_weights, processor, vision, sources)
    sizes = dict(zip(options.sizes, options.size_weights or [1.0] * len(options.sizes), strict=True))
    collator = TrafficCollator(processor, asks, arguments.seed, targets=targets, sizes=sizes)
    push, arguments.push_to_hub = arguments.push_to_hub, False  # the finished folder is pushed, not each checkpoint
    arguments.eval_on_start = evaluates and asks > 0  # a baseline for later evaluations
    arguments.load_best_model_at_end &= not options.average_decay
    arguments.dataloader_pin_memory &= arguments.device.type != "cpu"  # torch warns that it does nothing there
    parts = (model, arguments, collator, mixture, eval_rows, processor)
    if asks:
        trainer = TrafficTrainer(*parts, average_decay=options.average_decay, loss_weights=loss_weights)
        trainer.add_callback(StartEpoch(mixture, collator))
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
    if asks and trainer.is_world_process_zero():
        finish(trainer, options, note, content_words((text for pair in own for text in pair), processor.tokenizer))
        if push:
            token, private = arguments.hub_token, arguments.hub_private_repo
            publish(folder, arguments.hub_model_id or folder.name, token=token, private=private)
    elif trainer.is_world_process_zero():
        trainer.finish()
    trainer.accelerator.wait_for_everyone()  # a process that ends first would abort the others
    trainer.accelerator.end_training()


def finish(trainer: TrafficTrainer, options: TrainOptions, note: str, own_words: set[str]) -> None:
    """Save the finished model with its card, and print the verdict."""
    folder, base = Path(trainer.args.output_dir), options.model_name_or_path
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    processor: Any = trainer.processing_class
    model.config.use_cache = True  # the library's Trainer turns it off
    answers = None if trainer.eval_dataset is None else trainer.answers(model, trainer.eval_dataset)
    if processor.taught is not None:  # else it is not known what the weights were taught before
        # Without the words of the user's own questions, these would have no answer.
        processor.taught = sorted({*processor.taught, *trainer.asked.often(processor.tokenizer), *own_words})
    save_folder(model, processor, folder)
    named = "the model with the new tower" if base and options.vision_tower else "the model"
    verdict, before, after = judge(folder / BEFORE_FILE, answers, named)
    story = f"{verdict}\n{note}." if note else verdict
    write_card(folder, base, options.train_dataset, trainer.state.global_step, story, before, after)
    print(f"{verdict}\nThe model is in {folder}. Ask it:")
    print(f'    python scripts/ask.py docs/crossing.jpg "Is there a car?" --model {folder}')
    print("checkpoint-* (to resume this training) and runs (logs) in it can be deleted.")


def judge(path: Path, answers: pd.DataFrame | None, name: str) -> tuple[str, dict[str, float], dict[str, float]]:
    """(verdict, metrics before, metrics after) of a training; the metrics are empty without an evaluation.

    Args:
        path: table of the answers before training.
        answers: of the finished model.
        name: of the model in the verdict, such as "the model".
    """
    if answers is not None and path.is_file():
        before = pd.read_parquet(path)
        comparison = compare(before, answers)
        if comparison is not None:
            return comparison.verdict(name), answer_metrics(before), answer_metrics(answers)
    reason = "it was not evaluated, or all true answers are the same"
    return f"Whether training made {name} better is not known: {reason}.", {}, {}


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

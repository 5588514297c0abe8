"""A training run: rows → model → Trainer → verdict → folder."""

import os
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import TrainingArguments

from ..common.files import FILE_MODE
from ..data.scene import SYNTHETIC
from ..evaluation.compare import compare
from ..evaluation.report import answer_metrics
from .collator import TrafficCollator
from .model import prepare_model, start_message
from .options import TrainOptions
from .publish import publish, write_card
from .rows import check_rows, draw_rows, has_answers_in_words, mix_rows, open_datasets, own_words, sources_of
from .trainer import BEFORE_FILE, StartEpoch, TrafficTrainer, claim_run, last_checkpoint
from .words import add_words


MAY_CHANGE = ("attn_implementation", "from_scratch", "eval_sizes")  # when a run is resumed


def train(arguments: TrainingArguments, options: TrainOptions) -> None:
    """Start or resume a training run, and save the finished folder.

    Raises:
        ValueError: options, data or weights are invalid. FloatingPointError: the loss or a weight is NaN.
        OSError: the disk is full, or the Hub does not take the finished folder, for example. That folder is complete
            by then; scripts/push_to_hub.py pushes it.
    """
    check_arguments(arguments, options)
    folder, evaluates, asks = Path(arguments.output_dir), arguments.eval_strategy != "no", options.questions_per_image
    report = print if arguments.should_log else lambda line: None
    report(start_message(options))
    rows = open_datasets(options.train_dataset, prefer="train")
    held = open_datasets(options.eval_dataset) if evaluates else []
    claim_run(folder, options_to_keep(arguments, options) | {"images": list(map(len, rows))})
    torch.manual_seed(arguments.seed)

    sources, loss_weights = sources_of(rows), options.loss_weights()
    model, processor = prepare_model(options, len(sources))
    vision = model.config.vision_config if asks else model.tower.config
    checkpoint, own = arguments.resume_from_checkpoint or last_checkpoint(folder), set()
    if asks:
        processor.tokenizer = add_words(model, processor.tokenizer, options.add_words)
        for dataset in (*rows, *held):
            check_rows(dataset, processor)
        own = set().union(*(own_words(dataset, processor) for dataset in rows))
        processor.own_questions |= any(has_answers_in_words(dataset, processor) for dataset in rows)
        mixture, eval_rows, note = mix_rows(rows, held, arguments, options)
    else:
        mixture, eval_rows, note = draw_rows(rows, held, arguments, options, vision.image_size)
    if note:
        report(note)
    targets = {}
    if loss_weights:  # a training without auxiliary losses loads none of their code
        from .auxiliary.targets import make_targets

        targets = make_targets(loss_weights, processor, vision, sources)
    collator = TrafficCollator(
        processor, asks, options.question_types, arguments.seed, paraphrases=options.paraphrases, targets=targets
    )

    push, arguments.push_to_hub = arguments.push_to_hub, False  # the finished folder is pushed, not each checkpoint
    arguments.eval_on_start = evaluates and asks > 0  # a baseline for later evaluations
    arguments.dataloader_pin_memory &= arguments.device.type != "cpu"  # torch warns that it does nothing there
    trainer = TrafficTrainer(
        model,
        arguments,
        collator,
        mixture,
        eval_rows,
        processor,
        loss_weights=loss_weights,
        average_decay=options.average_decay,
        eval_sizes=() if asks else options.eval_sizes or (vision.image_size,),
        callbacks=[StartEpoch(mixture, collator)] if asks else [],
    )
    if checkpoint:
        report(f"resuming from {checkpoint}")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.check_weights()
    if not asks:
        finish_tower(trainer)
    elif trainer.is_world_process_zero():
        trainer.average.swap()
        finish(trainer, processor, options, note, own)
        if push:
            token, private = arguments.hub_token, arguments.hub_private_repo
            publish(folder, arguments.hub_model_id or folder.name, token=token, private=private)
    trainer.accelerator.wait_for_everyone()  # a process that ends first would abort the others
    trainer.accelerator.end_training()


def check_arguments(arguments: TrainingArguments, options: TrainOptions) -> None:
    """Raise a ValueError for arguments of the library that do not work here."""
    base, gpus = options.model_name_or_path, arguments.n_gpu
    if gpus > 1:  # DataParallel would separate rows of text from their images
        message = f"start one process for each GPU: torchrun --nproc_per_node {gpus}, or set CUDA_VISIBLE_DEVICES=0"
        raise ValueError(message)
    if arguments.dataloader_persistent_workers:
        raise ValueError(
            "--dataloader_persistent_workers must be false: such workers would draw the first epoch in every epoch"
        )
    if options.average_decay and arguments.load_best_model_at_end:
        raise ValueError("--average_decay averages the weights of the whole run: add --load_best_model_at_end false")
    if base and os.path.realpath(base) == os.path.realpath(arguments.output_dir):
        raise ValueError(
            f"--output_dir {arguments.output_dir} is the folder of --model_name_or_path, whose weights would be lost"
        )
    if not options.questions_per_image and arguments.eval_strategy != "no" and not options.eval_dataset:
        raise ValueError("a tower alone is evaluated on other images: pass --eval_dataset, or --eval_strategy no")


def options_to_keep(arguments: TrainingArguments, options: TrainOptions) -> dict[str, Any]:
    """The options that must stay the same when a run is resumed."""
    kept = {name: value for name, value in asdict(options).items() if name not in MAY_CHANGE}
    kept |= {"learning_rate": arguments.learning_rate, "seed": arguments.seed}
    has_photographs = set(options.train_dataset) != {SYNTHETIC}
    evaluates = arguments.eval_strategy != "no"
    return kept | {"holds_back_images": evaluates and not options.eval_dataset and has_photographs}


def finish(trainer: TrafficTrainer, processor: Any, options: TrainOptions, note: str, own: Collection[str]) -> None:
    """Save the finished model with its card, and print the verdict. `own`: the words of the user's own questions."""
    folder, base = Path(trainer.args.output_dir), options.model_name_or_path
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    model.config.use_cache = True  # the library's Trainer turns it off
    answers = None if trainer.eval_dataset is None else trainer.answers(model, trainer.eval_dataset)
    if processor.taught is not None:  # else it is not known what the weights were taught before
        # Without the words of the user's own questions, these would have no answer.
        processor.taught = sorted({*processor.taught, *trainer.asked.often(processor.tokenizer), *own})
    save_folder(model, processor, folder)
    named = "the model with the new tower" if base and options.vision_tower else "the model"
    verdict, before, after = judge(folder / BEFORE_FILE, answers, named)
    story = f"{verdict}\n{note}.".removesuffix("\n.")
    write_card(folder, base, options.train_dataset, trainer.state.global_step, story, before, after)
    print(f"{verdict}\nThe model is in {folder}. Ask it:")
    print(f'    python scripts/ask.py docs/crossing.jpg "Is there a car?" --model {folder}')
    print("checkpoint-* (to resume this training) and runs (logs) in it can be deleted.")


def finish_tower(trainer: TrafficTrainer) -> None:
    """Save and evaluate a tower that was trained alone."""
    folder = Path(trainer.args.output_dir)
    step, log = trainer.state.global_step, trainer.state.log_history
    if trainer.eval_dataset is not None:
        if not any(name.startswith("eval_") for entry in log if entry["step"] == step for name in entry):
            trainer.evaluate()
    elif trainer.is_world_process_zero():
        from .auxiliary.tower import write_tower

        trainer.average.swap()
        write_tower(trainer.accelerator.unwrap_model(trainer.model), None, folder)
    if trainer.is_world_process_zero():
        print(
            f"The tower is in {folder / 'tower'}. checkpoint-* (to resume this training) in {folder} can be deleted."
        )


def judge(
    path: Path, answers: pd.DataFrame | None, model: str = "the model"
) -> tuple[str, dict[str, float], dict[str, float]]:
    """(verdict, metrics before, metrics after) of a training; the metrics are empty without an evaluation.

    Args:
        path: table of the answers before training.
        answers: of the finished model.
        model: what the verdict calls the model.
    """
    if answers is not None and path.is_file():
        before = pd.read_parquet(path)
        comparison = compare(before, answers)
        if comparison is not None:
            return comparison.verdict(model), answer_metrics(before), answer_metrics(answers)
    reason = "it was not evaluated, or all true answers are the same"
    return f"Whether training made {model} better is not known: {reason}.", {}, {}


def save_folder(model: Any, processor: Any, folder: Path) -> None:
    """Write the finished model with its code, its processor and the training head; each file is complete or absent.

    The model is converted to bfloat16; the training head stays in float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".save-*"):  # by a run that was killed here
        shutil.rmtree(left)
    training_head = model._modules.pop("training_head", None)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".save-") as temporary:
        if training_head is not None:
            from .auxiliary.head import save_training_head

            save_training_head(training_head["head"], Path(temporary))
        model.bfloat16().save_pretrained(temporary)
        processor.save_pretrained(temporary)
        for path in Path(temporary).iterdir():
            path.chmod(FILE_MODE)  # safetensors makes its files readable for their owner only
            shutil.move(path, folder / path.name)

"""A training run: open datasets, build the model, train, and save the finished folder."""

import errno
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from ..data.dataset import Mixture
from ..evaluation.taught import measure_word_gains, update_taught
from ..files import FILE_MODE
from .auxiliary.head import save_training_head
from .average import AverageWeights
from .card import write_card
from .collator import SupervisedCollator
from .hub import publish
from .options import LOSSES, DataOptions, ModelOptions, check_arguments, check_options
from .resume import check_same_run, last_checkpoint
from .rows import open_rows, prepare_rows, sources_of
from .start import prepare_model, prepare_words, start_message
from .trainer import FreezeTower, StartEpoch, TrafficTrainer, unwrap
from .verdict import BEFORE_FILE, compare_with_start, evaluate, find_outcome
from .word_counts import WordCounts


IDENTITY_OPTIONS = ("learning_rate", "seed")  # options of the library that must not change when a run is resumed
QUESTIONS_PER_UNLABELED = 4
QUESTIONS_PER_PARAPHRASE = 5  # 1 of 8 questions about an image is a paraphrase, 3 of 16, none of 4


def train(arguments: TrainingArguments, model_options: ModelOptions, data_options: DataOptions) -> dict[str, float]:
    """Start or resume a training run; return the last metrics that were logged.

    Raises:
        ValueError: options, data or weights are invalid. FloatingPointError: the loss or a gradient is NaN.
        OSError: the disk is full, for example.
        PublishError: the finished folder could not be pushed. It is complete; scripts/push_to_hub.py pushes it.
    """
    check_arguments(arguments)
    check_options(model_options, data_options)
    if model_options.average_decay and arguments.load_best_model_at_end:
        raise ValueError("--average_decay averages the weights of the whole run: add --load_best_model_at_end false")
    folder = Path(arguments.output_dir)
    if arguments.should_log:
        print(start_message(model_options))
    identity = {name: getattr(arguments, name) for name in IDENTITY_OPTIONS}
    check_same_run(folder, asdict(model_options) | asdict(data_options) | identity)
    torch.manual_seed(arguments.seed)
    push, arguments.push_to_hub = arguments.push_to_hub, False  # the finished folder is pushed, not each checkpoint
    arguments.eval_on_start = arguments.eval_strategy != "no"  # a baseline for later evaluations
    arguments.dataloader_pin_memory &= arguments.device.type != "cpu"  # torch warns that it does nothing there

    rows, held = open_rows(data_options, arguments)
    sources = sources_of(rows)
    model, processor = prepare_model(model_options, data_options, arguments.world_size, len(sources))
    checkpoint = arguments.resume_from_checkpoint or last_checkpoint(folder)
    prepare_words(unwrap(model), processor, model_options, [*rows, *held], checkpoint)
    mixture, eval_rows = prepare_rows(processor, rows, held, data_options, arguments)
    average = AverageWeights(unwrap(model), model_options.average_decay) if model_options.average_decay else None
    collator = make_collator(model, processor, data_options, arguments.seed, sources)
    trainer = make_trainer(model, processor, arguments, (model_options, data_options), mixture, eval_rows, collator)

    if average is not None:
        trainer.add_callback(average)
    if checkpoint:
        if arguments.should_log:
            print(f"resuming from {checkpoint}")
        kept: list[Any] = [trainer.word_counts, average]
        for one in filter(None, kept):
            one.load(Path(checkpoint))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if average is not None:
        average.swap()  # the averages are what is evaluated and saved
        if arguments.eval_strategy != "no":
            trainer.evaluate()  # the verdict is about the weights that are saved
    if trainer.is_world_process_zero():
        finish(trainer, processor, model_options, data_options)
        if push:
            token, private = arguments.hub_token, arguments.hub_private_repo
            publish(folder, arguments.hub_model_id or folder.name, report=print, token=token, private=private)
    return trainer.state.log_history[-1]


def make_collator(
    model: Any, processor: Any, options: DataOptions, seed: int, sources: Sequence[str]
) -> SupervisedCollator:
    """A collator that asks the paraphrases and unlabeled questions that the losses need."""
    vision, num_questions = model.config.vision_config, options.questions_per_image
    return SupervisedCollator(
        processor,
        num_questions,
        options.question_types,
        seed=seed,
        grid=(vision.image_size // vision.patch_size,) * 2,
        paraphrases=num_questions // QUESTIONS_PER_PARAPHRASE if options.consistency_weight else 0,
        unlabeled=num_questions // QUESTIONS_PER_UNLABELED if options.distillation_weight else 0,
        sources=sources,
        uint8_pixels=True,
    )


def make_trainer(
    model: Any,
    processor: Any,
    arguments: TrainingArguments,
    options: tuple[ModelOptions, DataOptions],
    mixture: Mixture,
    eval_rows: Any,
    collator: SupervisedCollator,
) -> TrafficTrainer:
    """A trainer with the losses and callbacks that the options ask for."""
    model_options, data_options = options
    loss_weights = {name: getattr(data_options, f"{name}_weight") for name in LOSSES}
    if model_options.lora_rank:
        loss_weights["presence"] = 0.0  # it would train tower and head, which LoRA leaves as they are
    counts = WordCounts(len(processor.tokenizer))
    callbacks: list[Any] = [StartEpoch(mixture, collator), counts]
    if model_options.thaw_after_epochs is not None:
        callbacks.append(FreezeTower(model_options.thaw_after_epochs, model_options.freeze_blocks))
    trainer = TrafficTrainer(
        model,
        arguments,
        data_collator=collator,
        train_dataset=mixture,
        eval_dataset=eval_rows,
        loss_weights=loss_weights,
        evaluator=lambda model, rows: evaluate(trainer, model, rows, Path(arguments.output_dir) / BEFORE_FILE),
        word_counts=counts,
        processing_class=processor,
        callbacks=callbacks,
    )
    return trainer


def finish(trainer: TrafficTrainer, processor: Any, model_options: ModelOptions, data_options: DataOptions) -> None:
    """Save the finished model with its card, and print the verdict."""
    arguments, base = trainer.args, model_options.model_name_or_path
    folder, model = Path(arguments.output_dir), trainer.accelerator.unwrap_model(trainer.model)
    model = model.merge_and_unload() if model_options.lora_rank else model
    comparison = compare_with_start(trainer, model, folder / BEFORE_FILE)
    renew_taught(trainer, model, processor, not base)
    save_folder(model, processor, folder, model_options.save_dtype)
    named = "the model with the new tower" if base and model_options.vision_tower else "the model"
    outcome = find_outcome(trainer.state, arguments, comparison, named)
    steps = trainer.state.global_step
    write_card(folder, base, data_options.train_dataset, steps, outcome.before, outcome.after, outcome.verdict)
    print(f"{outcome.verdict}\nThe model is in {folder}. Ask it:")
    print(f'    python scripts/ask.py docs/crossing.jpg "Is there a car?" --model {folder}')


def renew_taught(trainer: TrafficTrainer, model: Any, processor: Any, is_from_scratch: bool) -> None:
    """Renew `processor.taught` by `update_taught`: words that this training asked often get a new standing.

    It stays None, unknown, if nothing was known of the weights before, or if weights from scratch are not evaluated.
    """
    rows, counts = trainer.eval_dataset, trainer.word_counts
    if counts is None or (processor.taught is None and not (is_from_scratch and rows is not None)):
        return
    asked, gains = counts.asked_often(processor.tokenizer), {}
    if rows is not None:
        batch_size = trainer.args.per_device_eval_batch_size
        with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
            gains = measure_word_gains(model.eval(), processor, rows, asked, batch_size)
    processor.taught = update_taught(processor.taught or {}, asked, gains)


def save_folder(model: Any, processor: Any, folder: Path, dtype: str) -> None:
    """Write the finished model with its code, its processor and the training head; each file is complete or absent.

    The model is converted to `dtype`; the training head stays in float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".save-") as temporary:
        if hasattr(model, "training_head"):
            save_training_head(model, Path(temporary))
        model.to(getattr(torch, dtype)).save_pretrained(temporary)
        processor.save_pretrained(temporary)
        for path in Path(temporary).iterdir():
            path.chmod(FILE_MODE)
            shutil.move(path, folder / path.name)


def is_write_error(error: BaseException) -> bool:
    """Whether a file could not be written, as on a full disk: torch, safetensors and tokenizers raise no OSError."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    pattern = rf"inline_container(?!.*StreamReader)|os error ({'|'.join(map(str, numbers))})\b"
    return getattr(error, "errno", None) in numbers or re.search(pattern, str(error)) is not None

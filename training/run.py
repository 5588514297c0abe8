"""A training run: open datasets, build the model, train, and save the finished folder."""

import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import TrainingArguments

from ..common.files import FILE_MODE
from ..data.datasets import Mixture
from ..data.scene import SYNTHETIC
from ..evaluation.compare import compare
from ..evaluation.report import answer_metrics
from .card import write_card
from .checkpoints import claim_run, files_to_delete, last_checkpoint
from .collator import SupervisedCollator
from .hub import publish
from .options import DataOptions, ModelOptions, check_options
from .rows import check_rows, has_answers_in_words, open_datasets, own_words, sources_of, split_for_evaluation
from .start import prepare_model, start_message
from .trainer import BEFORE_FILE, StartEpoch, TrafficTrainer, unwrap
from .words import add_words


MAY_CHANGE = ("attn_implementation", "compile_decoder", "from_scratch", "save_dtype")  # when a run is resumed
ADAPTER = "adapter"  # folder of PEFT beside the merged weights
QUESTIONS_PER_PARAPHRASE = 5  # 1 of 8 questions about an image is a paraphrase, 3 of 16, none of 4


def train(arguments: TrainingArguments, model_options: ModelOptions, data_options: DataOptions) -> None:
    """Start or resume a training run, and save the finished folder.

    Raises:
        ValueError: options, data or weights are invalid. FloatingPointError: the loss or a weight is NaN.
        OSError: the disk is full, for example.
        PublishError: the finished folder could not be pushed. It is complete; scripts/push_to_hub.py pushes it.
    """
    check_options(model_options, data_options, arguments)
    folder, evaluates = Path(arguments.output_dir), arguments.eval_strategy != "no"
    report = print if arguments.should_log else lambda line: None
    report(start_message(model_options))
    rows = open_datasets(data_options.train_dataset, prefer="train")
    held = open_datasets(data_options.eval_dataset) if evaluates else []
    options = asdict(model_options) | asdict(data_options)
    options |= {"learning_rate": arguments.learning_rate, "seed": arguments.seed}
    options["images"] = list(map(len, rows))  # of other numbers other images would be held back
    has_photographs = set(data_options.train_dataset) != {SYNTHETIC}
    options["holds_back_images"] = evaluates and not data_options.eval_dataset and has_photographs
    claim_run(folder, {name: value for name, value in options.items() if name not in MAY_CHANGE})
    torch.manual_seed(arguments.seed)
    push, arguments.push_to_hub = arguments.push_to_hub, False  # the finished folder is pushed, not each checkpoint
    arguments.eval_on_start = evaluates  # a baseline for later evaluations
    arguments.dataloader_pin_memory &= arguments.device.type != "cpu"  # torch warns that it does nothing there

    sources, loss_weights = sources_of(rows), data_options.loss_weights()
    if model_options.lora_rank:
        loss_weights["presence"] = 0.0  # it would train tower and head, which LoRA leaves as they are
    model, processor = prepare_model(model_options, bool(loss_weights["presence"]), len(sources))
    checkpoint = arguments.resume_from_checkpoint or last_checkpoint(folder)
    processor.tokenizer = add_words(unwrap(model), processor.tokenizer, model_options.add_words)
    for dataset in (*rows, *held):
        check_rows(dataset, processor)
    own: set[str] = set().union(*(own_words(dataset, processor) for dataset in rows))
    processor.own_questions |= any(has_answers_in_words(dataset, processor) for dataset in rows)
    eval_rows, note = None, ""
    if evaluates:
        rows, eval_rows, note = split_for_evaluation(rows, held, data_options.max_eval_images)
        if note:
            report(note)

    mixture = Mixture(rows, data_options.train_weights, data_options.images_per_epoch, arguments.seed)
    collator = make_collator(model, processor, data_options, arguments.seed, sources)
    trainer = TrafficTrainer(
        model,
        arguments,
        collator,
        mixture,
        eval_rows,
        processor,
        loss_weights=loss_weights,
        average_decay=model_options.average_decay,
        callbacks=[StartEpoch(mixture, collator)],
    )
    if checkpoint:
        report(f"resuming from {checkpoint}")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.check_weights()
    trainer.average.swap()  # there are none without a decay
    if trainer.is_world_process_zero():
        finish(trainer, processor, model_options, data_options, note, own)
        if push:
            token, private = arguments.hub_token, arguments.hub_private_repo
            publish(folder, arguments.hub_model_id or folder.name, token=token, private=private)


def make_collator(
    model: Any, processor: Any, options: DataOptions, seed: int, sources: Sequence[str]
) -> SupervisedCollator:
    """A collator that asks the paraphrases that the consistency loss needs."""
    vision, num_questions = model.config.vision_config, options.questions_per_image
    return SupervisedCollator(
        processor,
        num_questions,
        options.question_types,
        seed=seed,
        grid=(vision.image_size // vision.patch_size,) * 2,
        paraphrases=num_questions // QUESTIONS_PER_PARAPHRASE if options.consistency_weight else 0,
        sources=sources,
        uint8_pixels=True,
    )


def finish(
    trainer: TrafficTrainer,
    processor: Any,
    model_options: ModelOptions,
    data_options: DataOptions,
    note: str,
    own: Collection[str],
) -> None:
    """Save the finished model with its card, and print the verdict. `own`: the words of the user's own questions."""
    folder, base = Path(trainer.args.output_dir), model_options.model_name_or_path
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    unwrap(model).config.use_cache = True  # the library's Trainer turns it off
    answers = None if trainer.eval_dataset is None else trainer.answers(model, trainer.eval_dataset)
    if processor.taught is not None:  # else it is not known what the weights were taught before
        # Without the words of the user's own questions, these would have no answer.
        processor.taught = sorted({*processor.taught, *trainer.asked.often(processor.tokenizer), *own})
    if model_options.lora_rank:
        model.save_pretrained(folder / ADAPTER)
        processor.save_pretrained(folder / ADAPTER)
        model = model.merge_and_unload()
    save_folder(model, processor, folder, model_options.save_dtype)
    named = "the model with the new tower" if base and model_options.vision_tower else "the model"
    verdict, before, after = judge(folder / BEFORE_FILE, answers, named)
    story = f"{verdict}\n{note}.".removesuffix("\n.")
    write_card(folder, base, data_options.train_dataset, trainer.state.global_step, story, before, after)
    print(f"{verdict}\nThe model is in {folder}. Ask it:")
    print(f'    python scripts/ask.py docs/crossing.jpg "Is there a car?" --model {folder}')
    print(files_to_delete(folder))


def judge(
    path: Path, answers: pd.DataFrame | None, model: str = "the model"
) -> tuple[str, dict[str, float], dict[str, float]]:
    """Whether training made a model better, and its metrics before and after; without evaluation they are empty.

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


def save_folder(model: Any, processor: Any, folder: Path, dtype: str) -> None:
    """Write the finished model with its code, its processor and the training head; each file is complete or absent.

    The model is converted to `dtype`; the training head stays in float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".save-*"):  # by a run that was killed here
        shutil.rmtree(left)
    training_head = model._modules.pop("training_head", None)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".save-") as temporary:
        if training_head is not None:
            from .auxiliary.head import save_training_head

            save_training_head(training_head["head"], Path(temporary))
        model.to(getattr(torch, dtype)).save_pretrained(temporary)
        processor.save_pretrained(temporary)
        for path in Path(temporary).iterdir():
            path.chmod(FILE_MODE)  # safetensors makes its files readable for their owner only
            shutil.move(path, folder / path.name)

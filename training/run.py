"""A training run: rows → model → batches → Trainer → verdict → folder."""

import math
import shutil
import tempfile
from itertools import chain
from pathlib import Path

import pandas as pd
import torch
from transformers import TrainingArguments

from ..common.files import atomic_write
from ..configuration_traffic_vlm import height_and_width
from ..evaluation.compare import compare
from ..evaluation.report import answer_metrics
from .collator import TrafficCollator
from .drawing import Drawing
from .model import prepare_model
from .options import TrainOptions
from .publish import publish, write_card
from .rows import are_of_own_kind, open_datasets, own_questions, rows_for_tower, sources_of, split_for_evaluation
from .trainer import BEFORE_FILE, TrafficTrainer, check_options, last_checkpoint
from .words import add_words


def train(arguments: TrainingArguments, options: TrainOptions) -> None:
    """Start or resume a training run, and save the finished folder.

    Raises:
        ValueError: options, data or weights are invalid. FloatingPointError: the loss or a weight is NaN.
        OSError: a file cannot be read or written; or the Hub does not take the finished folder, which is complete by
            then: scripts/push_to_hub.py pushes it.
    """
    check_arguments(arguments, options)
    folder, has_questions = Path(arguments.output_dir), options.questions_per_image > 0
    rows = open_datasets(options.train_dataset, prefer="train")
    held = open_datasets(options.eval_dataset)
    kept = ("learning_rate", "per_device_train_batch_size", "seed")  # with all own options, by a resumed run
    check_options(folder, vars(options) | {name: getattr(arguments, name) for name in kept})
    push, arguments.push_to_hub = arguments.push_to_hub, False  # the finished folder is pushed, not each checkpoint
    arguments.load_best_model_at_end &= not options.average_decay
    arguments.dataloader_pin_memory &= arguments.device.type != "cpu"  # torch warns that it does nothing there

    torch.manual_seed(arguments.seed)
    sources, own = sources_of(rows), list[tuple[str, str]]()
    model, processor = prepare_model(options, len(sources))
    vision_config = model.config.vision_config if has_questions else model.tower.config
    if has_questions:
        processor.tokenizer = add_words(model, processor.tokenizer, options.add_words)
        own_questions(held, processor)
        own = own_questions(rows, processor)
        processor.own_questions |= are_of_own_kind(own, processor)
    eval_rows, note = None, ""
    if not has_questions:
        eval_rows, note = rows_for_tower(rows, held, [*options.train_dataset, *options.eval_dataset])
    elif arguments.eval_strategy != "no":
        rows, eval_rows, note = split_for_evaluation(rows, held, options.max_eval_images)
        arguments.eval_on_start = True  # a baseline for later evaluations
    if note and arguments.should_log:
        print(note)
    size = height_and_width(vision_config.image_size)
    drawing = Drawing(rows, options, size, count_draws(arguments, options), arguments.seed)

    targets, weights = {}, options.loss_weights()
    if weights:  # a training without auxiliary losses loads none of their code
        from .auxiliary.losses import make_targets

        targets = make_targets(weights, processor, vision_config, sources)
    collator = TrafficCollator(processor, options.questions_per_image, targets)
    trainer = TrafficTrainer(model, arguments, collator, drawing, eval_rows, processor, options=options)
    checkpoint = arguments.resume_from_checkpoint or last_checkpoint(folder)
    arguments.resume_from_checkpoint = str(checkpoint) if checkpoint else None
    if checkpoint and arguments.should_log:
        print(f"resuming from {checkpoint}")
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.check_weights()
    trainer.average.swap()

    if trainer.is_world_process_zero():
        if has_questions:
            save_model(trainer, options, note, own)
        else:
            save_tower(trainer)
        if push:
            token, private = arguments.hub_token, arguments.hub_private_repo
            publish(folder, arguments.hub_model_id or folder.name, token=token, private=private)
    trainer.accelerator.wait_for_everyone()  # a process that ends first would abort the others
    trainer.accelerator.end_training()


def check_arguments(arguments: TrainingArguments, options: TrainOptions) -> None:
    """Raise a ValueError for arguments of the library that this training does not have."""
    if arguments.n_gpu > 1:  # DataParallel would separate rows of text from their images
        raise ValueError(f"start one process for each GPU: torchrun --nproc_per_node {arguments.n_gpu}")
    if arguments.dataloader_persistent_workers:
        raise ValueError("--dataloader_persistent_workers must be false: they would repeat the first epoch")
    base, folder = options.model_name_or_path, arguments.output_dir
    if base and Path(base).resolve() == Path(folder).resolve():
        raise ValueError(f"--output_dir {folder} has the weights to start from: choose another folder")
    if arguments.push_to_hub and not options.questions_per_image:
        raise ValueError("--push_to_hub: a tower alone (--questions_per_image 0) answers no questions")
    if options.eval_dataset and arguments.eval_strategy == "no":
        raise ValueError(f"--eval_strategy no evaluates nothing: leave out --eval_dataset {options.eval_dataset}")


def count_draws(arguments: TrainingArguments, options: TrainOptions) -> int:
    """The number of images of a run at the default size."""
    if arguments.max_steps <= 0:
        return math.ceil(arguments.num_train_epochs * options.images_per_epoch)
    images = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * arguments.world_size
    steps = math.ceil(options.images_per_epoch / images)  # of an epoch, whose last step may have fewer images
    return math.ceil(arguments.max_steps * options.images_per_epoch / steps)


def save_model(trainer: TrafficTrainer, options: TrainOptions, note: str, own: list[tuple[str, str]]) -> None:
    """Save the finished model in bfloat16, with its processor, training head and card, and print the verdict."""
    folder, model, processor = Path(trainer.args.output_dir), trainer.model, trainer.processing_class
    verdict = None
    if trainer.eval_dataset is not None and (folder / BEFORE_FILE).is_file():
        verdict = compare(pd.read_parquet(folder / BEFORE_FILE), trainer.answers())
    verdict = verdict or "Whether training made the model better was not measured."
    head = model._modules.pop("training_head")
    if processor.taught is not None:  # else it is not known what the weights were taught before
        taught = head["words"].taught(processor.tokenizer, chain.from_iterable(own))
        processor.taught = sorted({*processor.taught, *taught})
    model.config.use_cache = True  # the library's Trainer turns it off
    with tempfile.TemporaryDirectory(dir=folder) as temporary:  # each file of the folder is complete or absent
        model.bfloat16().save_pretrained(temporary)
        processor.save_pretrained(temporary)
        if "head" in head:
            from .auxiliary.presence import save_training_head

            save_training_head(head["head"], Path(temporary))
        for path in Path(temporary).iterdir():
            with atomic_write(folder / path.name) as complete:
                shutil.move(path, complete)
    story, steps = f"{verdict}\n{note}".strip(), trainer.state.global_step
    write_card(folder, options.model_name_or_path, options.train_dataset, steps, story)
    print(f"{verdict}\nThe model is in {folder}. Ask it:")
    print(f'    python scripts/ask.py docs/crossing.jpg "Is there a car?" --model {folder}')
    print("checkpoint-* (to resume this training) and runs (logs) in it can be deleted.")


def save_tower(trainer: TrafficTrainer) -> None:
    """Save the finished tower with its head, for `--vision_tower`, and print its metrics."""
    from .auxiliary.presence import save_training_head

    folder, model = Path(trainer.args.output_dir), trainer.model
    model.tower.save_pretrained(folder / "tower")
    save_training_head(model.training_head["head"], folder / "tower")
    if trainer.eval_dataset is not None:
        print(answer_metrics(trainer.answers()))
    print(f"The tower is in {folder / 'tower'}. checkpoint-* (to resume this training) in {folder} can be deleted.")

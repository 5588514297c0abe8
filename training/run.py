"""A training run: open datasets, build the model, train, and save the finished folder."""

import errno
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import ConcatDataset
from transformers import BaseImageProcessor, PreTrainedConfig, TrainerState, TrainingArguments

from ..attention_traffic_vlm import TrafficVLMAttention, TrafficVLMRMSNorm
from ..configuration_traffic_vlm import PATCH_TOWER, TrafficVLMConfig, TrafficVLMVisionConfig
from ..data.dataset import Mixture, SyntheticRows, synthetic_rows
from ..data.folders import load_rows, select_evenly, source_names
from ..data.scene import SYNTHETIC
from ..evaluation.report import quick_metrics
from ..evaluation.trust import measure_word_gains, update_taught
from ..files import FILE_MODE, atomic_write_text
from ..loading import load_weights, refuse_adapter
from ..modeling_traffic_vlm import TrafficVLMForConditionalGeneration, TrafficVLMMLP
from ..processing_traffic_vlm import TrafficVLMProcessor
from ..tokenization_traffic_vlm import ANSWER_TOKENS, TrafficVLMTokenizer
from ..vision_traffic_vlm import TrafficVLMVisionModel
from .auxiliary.head import QueryHead, add_training_head, load_training_head, save_training_head
from .average import AverageWeights
from .card import write_card
from .collator import SupervisedCollator
from .hub import publish
from .options import LOSSES, PATCH, DataOptions, ModelOptions, check_arguments, check_options
from .tower import is_tower_folder, load_tower
from .trainer import FreezeTower, StartEpoch, TrafficTrainer, freeze_blocks, unwrap
from .word_counts import WordCounts
from .words import add_words


ROOT = Path(__file__).resolve().parent.parent
OPTIONS_FILE = "training_options.json"  # beside the checkpoints
# These may change when a run is resumed.
RUNTIME_ONLY_OPTIONS = ("attn_implementation", "compile_decoder", "from_scratch", "save_dtype")
IDENTITY_OPTIONS = ("learning_rate", "seed")  # options of the library that must not change when a run is resumed
EVAL_FRACTION = 0.1  # of the training images, held back if no other images are given for evaluation
QUESTIONS_PER_UNLABELED = 4
QUESTIONS_PER_PARAPHRASE = 5  # 1 of 8 questions about an image is a paraphrase, 3 of 16, none of 4


def open_datasets(folders: Sequence[str], prefer: str | None = None) -> list[Any]:
    """Open dataset folders; "synthetic" gives rows of scenes that are rendered on access."""
    sources = source_names([Path(folder) for folder in folders])
    return [
        SyntheticRows() if folder == SYNTHETIC else load_rows([Path(folder)], prefer=prefer, sources=[source])
        for folder, source in zip(folders, sources)
    ]


def sources_of(datasets: Sequence[Any]) -> list[str]:
    """The names of all sources of datasets, sorted."""
    names = [[SYNTHETIC] if isinstance(rows, SyntheticRows) else rows.unique("source") for rows in datasets]
    return sorted({name for some in names for name in some})


def choose_rows(datasets: list[Any], max_rows: int) -> Any:
    """At most `max_rows` rows, the same number from each dataset, evenly spread. Images are read on access."""
    chosen: list[Any] = [select_evenly(dataset, max(1, max_rows // len(datasets))) for dataset in datasets]
    return ConcatDataset(chosen)


def hold_back(datasets: list[Any]) -> tuple[list[Any], list[Any]]:
    """Split the same 10 % off each dataset for evaluation; synthetic sources are endless and stay whole."""
    kept, held = [], []
    for dataset in datasets:
        if not isinstance(dataset, SyntheticRows):
            split = dataset.train_test_split(EVAL_FRACTION, seed=0)
            dataset = split["train"]
            held.append(split["test"])
        kept.append(dataset)
    return kept, held


def own_questions(rows: Any) -> list[tuple[str, str]]:
    """The different questions of a dataset with their answers; [] if they come from our templates."""
    if "scene" in getattr(rows, "column_names", ("scene",)):
        return []
    texts = rows.select_columns(["questions", "answers"])
    return list({pair: None for row in texts for pair in zip(row["questions"], row["answers"])})


def has_answers_in_words(rows: Any, processor: Any) -> bool:
    """Whether a dataset has questions of its own that are answered in words, neither yes nor no."""
    answers = {answer for _, answer in own_questions(rows)}
    return any(processor.tokenizer.tokenize(answer)[0] not in ANSWER_TOKENS for answer in answers)


def check_rows(rows: Any, processor: Any) -> None:
    """Raise a ValueError if a dataset's own questions have unknown words, or are empty or too long."""
    pairs = own_questions(rows)
    texts = sorted({text for pair in pairs for text in pair})
    if texts and (unknown := processor.unknown_words(texts)):
        raise ValueError(
            f"{len(unknown)} words of the questions and answers are not among the 500 of the vocabulary: "
            f"{', '.join(unknown[:20])}. --add_words {' '.join(unknown[:20])} teaches them in place of others"
        )
    if pairs:  # the processor rejects empty and long questions: now, rather than in the middle of an epoch
        questions, answers = zip(*pairs)
        processor(text=list(questions), suffix=list(answers))


def build_model(options: ModelOptions) -> Any:
    """The model to train: from scratch, from weights, or with a vision tower of transformers or of our own."""
    vision: dict[str, Any] = {} if options.image_size is None else {"image_size": options.image_size}
    text = options.text_fields()
    if options.hidden_dropout is not None:
        text["hidden_dropout"] = options.hidden_dropout
    attention = {"attn_implementation": options.attn_implementation}
    if options.model_name_or_path:
        refuse_adapter(options.model_name_or_path, "--model_name_or_path")
        config = TrafficVLMConfig.from_pretrained(options.model_name_or_path)
        for name, value in vision.items():
            setattr(config.vision_config, name, value)
        for name, value in text.items():
            setattr(config.text_config, name, value)
        model = load_weights(options.model_name_or_path, config=config, dtype=torch.float32, **attention)
        if options.vision_tower:
            replace_tower(model, Path(options.vision_tower), vision)
        return model
    tower_fields = vision
    if options.vision_tower == PATCH:
        tower_fields = PATCH_TOWER | vision
    elif options.vision_tower:
        tower_fields = PreTrainedConfig.get_config_dict(options.vision_tower)[0]
        if "vision_config" in tower_fields:  # a model with a text and a vision part
            tower_fields["vision_config"] |= vision
        else:
            tower_fields |= vision
        if "model_type" not in tower_fields:
            raise ValueError(f"--vision_tower {options.vision_tower}: its config.json names no model_type")
    config = TrafficVLMConfig(vision_config=tower_fields, text_config=text)
    model = TrafficVLMForConditionalGeneration._from_config(config, **attention)
    tower = model.model.vision_tower
    if options.trained_tower and is_tower_folder(options.trained_tower):
        tower.load_state_dict(load_tower(Path(options.trained_tower))["tower"].state_dict())
    elif options.trained_tower:
        model.model.vision_tower = type(tower).from_pretrained(
            options.trained_tower, config=tower.config, dtype=torch.float32
        )
    return model


def replace_tower(model: Any, folder: Path, fields: dict[str, Any]) -> None:
    """Give a model the vision tower of a folder of `train_tower.py`; `fields` change the tower's configuration.

    Raises:
        ValueError: the tower's tokens have another width than the decoder reads.
    """
    trained: Any = load_tower(folder)["tower"]
    width = model.config.vision_config.hidden_size
    if trained.config.hidden_size != width:
        raise ValueError(f"{folder} gives tokens of {trained.config.hidden_size} numbers, the decoder reads {width}")
    config = TrafficVLMVisionConfig.from_dict(trained.config.to_dict() | fields)
    model.config.vision_config, model.model.vision_tower = config, TrafficVLMVisionModel(config)
    model.model.vision_tower.load_state_dict(trained.state_dict())


def find_head(options: ModelOptions) -> QueryHead | None:
    """The query head that was trained with the tower or the weights to start from, if there is one."""
    if options.trained_tower and is_tower_folder(options.trained_tower):
        return cast(QueryHead, load_tower(Path(options.trained_tower))["head"])
    return load_training_head(options.model_name_or_path) if options.model_name_or_path else None


def read_normalization(vision_tower: str | None) -> dict[str, list[float]]:
    """Mean and standard deviation by which a tower's image processor normalizes pixels; {} if it has none."""
    try:
        fields, _ = BaseImageProcessor.get_image_processor_dict(vision_tower) if vision_tower else ({}, None)
    except OSError:  # a tower saved without an image processor
        return {}
    return {name: fields[name] for name in ("image_mean", "image_std") if name in fields}


def compile_decoder(model: Any) -> None:
    """Compile the modules of each decoder layer, for rows of any length. Forward hooks still work.

    The compiled functions are bound to this model: a deep copy would compute with the weights of the original.
    """
    classes = (TrafficVLMAttention, TrafficVLMMLP, TrafficVLMRMSNorm)
    modules: list[Any] = [module for module in model.get_decoder().modules() if isinstance(module, classes)]
    for module in modules:
        module.forward = torch.compile(module.forward, dynamic=True)


def add_lora(model: Any, rank: int) -> Any:
    """Add LoRA matrices to every linear layer of the decoder; only they are trained."""
    from peft import LoraConfig, get_peft_model

    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith("model.text_model")
    ]
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names))


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint; the library writes `trainer_state.json` last."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json") if _is_json(path)]
    return max(complete, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def check_same_run(folder: Path, options: dict[str, Any]) -> None:
    """Raise a ValueError if a folder has checkpoints of a run with other options; save the options of this one."""
    path = folder / OPTIONS_FILE
    options = {name: value for name, value in options.items() if name not in RUNTIME_ONLY_OPTIONS}
    if last_checkpoint(folder) and path.is_file():
        before = json.loads(path.read_text())
        for name, value in options.items():
            if before.get(name, value) != value:  # absent: an option that is newer than the run
                raise ValueError(
                    f"{folder} holds a run with --{name} {before.get(name)}, not {value}: choose another "
                    "--output_dir, or delete that run"
                )
    atomic_write_text(path, json.dumps(options, indent=1))


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


def prepare_model(
    model_options: ModelOptions, data_options: DataOptions, processes: int, num_sources: int = 1
) -> tuple[Any, Any]:
    """The model with its training head, frozen and compiled as the options say, and its processor."""
    model = build_model(model_options)
    processor = TrafficVLMProcessor.from_pretrained(model_options.model_name_or_path or ROOT)
    if not model_options.model_name_or_path:
        processor.taught, processor.own_questions = None, False
    size = model.config.vision_config.image_size
    processor.image_processor.size = {"height": size, "width": size}
    for name, value in read_normalization(model_options.trained_tower).items():
        setattr(processor.image_processor, name, value)
    if model_options.lora_rank:
        model = add_lora(model, model_options.lora_rank)
    elif data_options.presence_weight or data_options.distillation_weight:
        head = find_head(model_options)
        if head is None and data_options.distillation_weight:
            raise ValueError("--distillation_weight needs a trained query head: pass --vision_tower TOWER")
        add_training_head(model, head, num_sources)
    full = unwrap(model)
    if model_options.compile_decoder:
        compile_decoder(full)
    if model_options.freeze_vision and model_options.thaw_after_epochs is None:
        full.model.vision_tower.requires_grad_(False)
    elif model_options.freeze_vision and processes > 1:
        raise ValueError(
            "--thaw_after_epochs needs one process; on several, train twice: frozen, then from the result"
        )
    if model_options.freeze_blocks is not None:
        freeze_blocks(full.model.vision_tower, model_options.freeze_blocks)
    return model, processor


def open_rows(options: DataOptions, arguments: TrainingArguments) -> tuple[list[Any], list[Any]]:
    """The datasets to train on, and those to evaluate on."""
    rows = open_datasets(options.train_dataset, prefer="train")
    return rows, open_datasets(options.eval_dataset) if arguments.eval_strategy != "no" else []


def prepare_words(
    model: Any, processor: Any, options: ModelOptions, datasets: list[Any], checkpoint: Path | str | None
) -> None:
    """Add the words of --add_words to the tokenizer and the model; or take the tokenizer of a checkpoint."""
    if not options.add_words:
        return
    if checkpoint:  # its weights are loaded later, and belong to its words
        processor.tokenizer = TrafficVLMTokenizer.from_pretrained(str(checkpoint))
    else:
        texts = {text for dataset in datasets for pair in own_questions(dataset) for text in pair}
        taught = {word for words in (processor.taught or {}).values() for word in words}
        processor.tokenizer = add_words(model, processor.tokenizer, options.add_words, taught, texts)


def prepare_rows(
    processor: Any, rows: list[Any], held: list[Any], options: DataOptions, arguments: TrainingArguments
) -> tuple[Mixture, Any]:
    """The rows to train on, and those to evaluate on (None without evaluation), from the datasets of `open_rows`."""
    for dataset in (*rows, *held):
        check_rows(dataset, processor)
    processor.own_questions |= any(has_answers_in_words(dataset, processor) for dataset in rows)
    eval_rows = None
    if arguments.eval_strategy != "no":
        if not held:
            rows, held = hold_back(rows)
            if held and arguments.should_log:
                print(
                    f"{sum(map(len, held))} images, 10 %, are held back for evaluation. Frames of one drive are "
                    "similar: for a realistic evaluation pass images of other drives with --eval_dataset"
                )
        held = held or [synthetic_rows(first_seed=1 << 40, num_images=min(options.max_eval_images, 64))]
        eval_rows = choose_rows(held, options.max_eval_images)
    return Mixture(rows, options.train_weights, options.images_per_epoch, arguments.seed), eval_rows


@dataclass(frozen=True)
class Outcome:
    """Metrics by name before and after training; empty without evaluation."""

    before: Mapping[str, float]
    after: Mapping[str, float]
    verdict: str  # a sentence


def compare(state: TrainerState, arguments: TrainingArguments, model: str = "the model") -> Outcome:
    """Compare the evaluation before training with the last one, or that of the checkpoint selected as best.

    Args:
        model: what the verdict calls the model.
    """
    logged = [entry for entry in state.log_history if any(name.startswith("eval_") for name in entry)]
    is_best = arguments.load_best_model_at_end
    chosen = [entry for entry in logged if is_best and entry["step"] == state.best_global_step] or logged[-1:]
    first = [entry for entry in logged if entry["step"] == 0]
    before, after = (
        {name.removeprefix("eval_"): value for name, value in entry.items() if name.startswith("eval_")}
        for entry in ((first or [{}])[0], (chosen or [{}])[-1])
    )
    metric = (arguments.metric_for_best_model or "balanced_accuracy").removeprefix("eval_")
    if metric not in before or metric not in after:
        return Outcome(before, after, f"Whether training made {model} better is not known: it was not evaluated.")
    change = after[metric] - before[metric]
    gain = change if arguments.greater_is_better is not False else -change
    result = "better" if gain > 0 else "no better" if gain == 0 else "WORSE"
    advice = " The weights that it started from are better on these images." if gain < 0 else ""
    figures = f"{metric.replace('_', ' ')} {before[metric]:.3f} before, {after[metric]:.3f} after."
    return Outcome(before, after, f"Training made {model} {result}: {figures}{advice}")


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


def start_message(options: ModelOptions) -> str:
    """A line that says which weights training starts from."""
    if options.model_name_or_path:
        tower = f" with the vision tower {options.vision_tower}, new to its decoder" if options.vision_tower else ""
        return f"Fine-tuning {options.model_name_or_path}{tower}."
    if options.trained_tower:
        return (
            f"Training from scratch with the vision tower {options.trained_tower}: the decoder's weights are random."
        )
    return "Training from scratch: all weights are random."


def is_write_error(error: BaseException) -> bool:
    """Whether a file could not be written, as on a full disk: torch, safetensors and tokenizers raise no OSError."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    pattern = rf"inline_container(?!.*StreamReader)|os error ({'|'.join(map(str, numbers))})\b"
    return getattr(error, "errno", None) in numbers or re.search(pattern, str(error)) is not None


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
    identity = {name: getattr(arguments, name) for name in IDENTITY_OPTIONS}
    arguments.dataloader_pin_memory &= arguments.device.type != "cpu"  # torch warns that it does nothing there
    if arguments.should_log:
        print(start_message(model_options))
    check_same_run(folder, asdict(model_options) | asdict(data_options) | identity)
    torch.manual_seed(arguments.seed)
    push, arguments.push_to_hub = arguments.push_to_hub, False  # the finished folder is pushed, not each checkpoint
    arguments.eval_on_start = arguments.eval_strategy != "no"  # a baseline for later evaluations
    rows, held = open_rows(data_options, arguments)
    sources = sources_of(rows)
    model, processor = prepare_model(model_options, data_options, arguments.world_size, len(sources))
    vision = model.config.vision_config
    checkpoint = arguments.resume_from_checkpoint or last_checkpoint(folder)
    prepare_words(unwrap(model), processor, model_options, [*rows, *held], checkpoint)
    mixture, eval_rows = prepare_rows(processor, rows, held, data_options, arguments)
    num_questions = data_options.questions_per_image
    collator = SupervisedCollator(
        processor,
        num_questions,
        data_options.question_types,
        seed=arguments.seed,
        grid=(vision.image_size // vision.patch_size,) * 2,
        paraphrases=num_questions // QUESTIONS_PER_PARAPHRASE if data_options.consistency_weight else 0,
        unlabeled=num_questions // QUESTIONS_PER_UNLABELED if data_options.distillation_weight else 0,
        sources=sources,
        uint8_pixels=True,
    )
    loss_weights = {name: getattr(data_options, f"{name}_weight") for name in LOSSES}
    if model_options.lora_rank:
        loss_weights["presence"] = 0.0  # it would train tower and head, which LoRA leaves as they are
    counts = WordCounts(len(processor.tokenizer))
    callbacks: list[Any] = [StartEpoch(mixture, collator), counts]
    average = AverageWeights(unwrap(model), model_options.average_decay) if model_options.average_decay else None
    if average is not None:
        callbacks.append(average)
    if model_options.thaw_after_epochs is not None:
        callbacks.append(FreezeTower(model_options.thaw_after_epochs, model_options.freeze_blocks))
    trainer = TrafficTrainer(
        model,
        arguments,
        data_collator=collator,
        train_dataset=mixture,
        eval_dataset=eval_rows,
        loss_weights=loss_weights,
        evaluator=lambda model, rows: quick_metrics(model, processor, rows, arguments.per_device_eval_batch_size),
        word_counts=counts,
        processing_class=processor,
        callbacks=callbacks,
    )
    if checkpoint and arguments.should_log:
        print(f"resuming from {checkpoint}")
    if checkpoint:
        counts.load(Path(checkpoint))
    if checkpoint and average is not None:
        average.load(Path(checkpoint))
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if average is not None:
        average.swap()  # the averages are what is evaluated and saved
        if arguments.eval_strategy != "no":
            trainer.evaluate()  # the verdict is about the weights that are saved
    if trainer.is_world_process_zero():
        finished = trainer.accelerator.unwrap_model(trainer.model)
        finished = finished.merge_and_unload() if model_options.lora_rank else finished
        renew_taught(trainer, finished, processor, not model_options.model_name_or_path)
        save_folder(finished, processor, folder, model_options.save_dtype)
        has_new_tower = model_options.model_name_or_path and model_options.vision_tower
        named = "the model with the new tower" if has_new_tower else "the model"
        outcome = compare(trainer.state, arguments, named)
        base, datasets = model_options.model_name_or_path, data_options.train_dataset
        write_card(folder, base, datasets, trainer.state.global_step, outcome.before, outcome.after, outcome.verdict)
        print(f"{outcome.verdict}\nThe model is in {folder}. Ask it:")
        print(f'    python scripts/ask.py docs/crossing.jpg "Is there a car?" --model {folder}')
        if push:
            token, private = arguments.hub_token, arguments.hub_private_repo
            publish(folder, arguments.hub_model_id or folder.name, report=print, token=token, private=private)
    return trainer.state.log_history[-1]

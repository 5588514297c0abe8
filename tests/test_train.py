"""Training runs of a tiny model: finished folders, resumed runs, and errors for invalid options and data."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerState, TrainingArguments

from tiny import ROOT, TINY_TEXT, TINY_TOWER, load_script, new_process, save_folder
from traffic_vlm.configuration_traffic_vlm import MEDIUM_TEXT, PATCH_TOWER, TrafficVLMConfig, TrafficVLMVisionConfig
from traffic_vlm.data.dataset import Mixture, SyntheticRows
from traffic_vlm.data.folders import load_rows
from traffic_vlm.data.synthetic import render
from traffic_vlm.loading import load_weights
from traffic_vlm.modeling_traffic_vlm import TrafficVLMForConditionalGeneration
from traffic_vlm.options import option_parser
from traffic_vlm.training.auxiliary.head import HEAD_FILE, PresenceLoss, QueryHead, load_training_head
from traffic_vlm.training.card import MARK, write_card
from traffic_vlm.training.collator import SupervisedCollator
from traffic_vlm.training.options import LOSSES, DataOptions, ModelOptions
from traffic_vlm.training.resume import last_checkpoint
from traffic_vlm.training.rows import describe_repeated, hold_back
from traffic_vlm.training.run import is_write_error, judge, train
from traffic_vlm.training.start import build_model, freeze_blocks, prepare_model, read_normalization, start_message
from traffic_vlm.training.tower import save_tower
from traffic_vlm.training.trainer import StartEpoch, TrafficTrainer
from traffic_vlm.vision_traffic_vlm import TrafficVLMVisionModel


TOWER = TINY_TOWER | {"image_size": 64}
FAST = ["--use_cpu", "--images_per_epoch", "8", "--per_device_train_batch_size", "4", "--questions_per_image", "4"]
FAST += ["--max_eval_images", "24", "--logging_steps", "1", "--dataloader_num_workers", "0", "--learning_rate", "1e-3"]
FAST += ["--warmup_steps", "0", "--lr_scheduler_type", "constant", "--save_dtype", "float32"]
NO_BEST = ["--load_best_model_at_end", "false"]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A folder with a tiny model and the project's processor."""
    torch.manual_seed(0)
    config = TrafficVLMConfig(TOWER, TINY_TEXT | {"hidden_dropout": 0.1})
    return save_folder(TrafficVLMForConditionalGeneration(config), tmp_path_factory.mktemp("start"))


def run(
    start: Path, output: Path, *options: str, launcher: list[str] | None = None, code: int = 0, **variables: str
) -> subprocess.CompletedProcess:
    """Run scripts/train.py in a separate process, which must end with the exit status `code`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    command = [*(launcher or [sys.executable]), str(ROOT / "scripts/train.py"), "--output_dir", str(output)]
    command += ["--model_name_or_path", str(start), *FAST, *options]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == code, result.stderr[-2000:]
    return result


def learn(start: Path | None, output: Path, *options: str) -> None:
    """Do the same as scripts/train.py in this process, because starting another one takes seconds."""
    parser = option_parser((load_script("train").Arguments, ModelOptions, DataOptions), None)
    given = ["--output_dir", str(output), *FAST, *options]
    given += ["--model_name_or_path", str(start)] if start and "--model_name_or_path" not in options else []
    train(*parser.parse_args_into_dataclasses(given))


def refuse(start: Path | None, output: Path, *options: str) -> str:
    """The error message of a training run that is refused."""
    with pytest.raises((ValueError, OSError)) as error:
        learn(start, output, *options)
    return str(error.value)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of the model; checkpoints also hold the training head."""
    tensors = load_file(folder / "model.safetensors")
    return {name: value for name, value in tensors.items() if not name.startswith("training_head.")}


def changes(start: Path, folder: Path) -> set[str]:
    """The names of the weights that training has changed."""
    before, after = weights(start), weights(folder)
    assert before.keys() == after.keys()
    return {name for name in after if not torch.equal(after[name], before[name].to(after[name].dtype))}


def figures(folder: Path) -> list[dict[str, float]]:
    checkpoint = last_checkpoint(folder)
    return json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]


def test_each_evaluation_logs_the_held_out_loss_beside_that_of_training(start, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    learn(start, tmp_path, "--num_train_epochs", "2", "--learning_rate", "2e-3")
    history = figures(tmp_path)
    first, second, third = (entry for entry in history if "eval_answer_loss" in entry)
    assert "eval_train_answer_loss" not in first  # no step yet
    for entry in (first, second, third):
        assert entry["eval_words"] == pytest.approx(math.exp(entry["eval_answer_loss"]))
        assert entry["eval_uniform_loss"] == pytest.approx(math.log(500))
    assert max(second["eval_answer_loss"], third["eval_answer_loss"]) < first["eval_answer_loss"]
    steps = [entry["answer_loss"] for entry in history if "answer_loss" in entry]
    assert len(steps) == 4  # two in each epoch, with other numbers of words
    for entry, of_epoch in ((second, steps[:2]), (third, steps[2:])):
        assert min(of_epoch) <= entry["eval_train_answer_loss"] <= max(of_epoch)
        assert entry["eval_train_words"] == pytest.approx(math.exp(entry["eval_train_answer_loss"]))
    [events] = (tmp_path / "runs").rglob("events.out.tfevents.*")
    tags = EventAccumulator(str(events)).Reload().Tags()["scalars"]
    assert {"train/answer_loss", "train/words", "eval/answer_loss", "eval/words"} <= set(tags)
    assert {"eval/train_answer_loss", "eval/train_words", "eval/uniform_loss"} <= set(tags)


@pytest.mark.slow
def test_a_run_trains_logs_and_saves_a_folder_that_loads(start, tmp_path):
    run(start, tmp_path / "out", "--num_train_epochs", "1", "--questions_per_image", "8")
    logged = [entry for entry in figures(tmp_path / "out") if "loss" in entry]
    assert {"answer_loss", "words", "yes_no_accuracy", "max_steps"} <= logged[0].keys()
    # Few pairs may leave agreement at 0, and only a trained query head teaches by distillation.
    extra = [f"{name}_loss" for name in LOSSES if name not in ("agreement", "distillation")]
    assert all(max(entry[name] for entry in logged) > 0 for name in extra)
    assert 0 <= logged[0]["yes_no_accuracy"] <= 1 and logged[0]["words"] > 1
    assert [entry["step"] for entry in figures(tmp_path / "out") if "eval_balanced_accuracy" in entry] == [0, 2]
    assert list((tmp_path / "out" / "runs").rglob("events.out.tfevents.*"))  # for TensorBoard
    after, before = weights(tmp_path / "out"), weights(start)
    assert after.keys() == before.keys()
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == before.keys()
    assert (tmp_path / "out" / HEAD_FILE).is_file()  # for further training
    assert any(not torch.equal(after[name], before[name]) for name in after)
    assert not after["model.text_model.embed_tokens.weight"][0].any()  # no loss trains [PAD]
    printed = new_process(
        """
        from PIL import Image
        from transformers import AutoModel, AutoProcessor
        model, info = AutoModel.from_pretrained("out", trust_remote_code=True, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        processor = AutoProcessor.from_pretrained("out", trust_remote_code=True)
        inputs = processor(images=Image.new("RGB", (80, 60)), text="Is there a car?", return_tensors="pt")
        print(inputs["pixel_values"].shape[-1], float(model.score_yes_no(**inputs)[0]))
        """,
        tmp_path,
    )
    assert printed.startswith("64 0.")


@pytest.mark.slow
@pytest.mark.parametrize(("train", "workers"), [(learn, "0"), (run, "1")])
def test_a_resumed_run_has_the_result_of_an_uninterrupted_one(start, tmp_path, train, workers):
    # Compares the last weights: the best ones may have been saved before the stop.
    options = ["--num_train_epochs", "2", *NO_BEST, "--dataloader_num_workers", workers]
    options += ["--average_decay", "0.5"]
    train(start, tmp_path / "whole", *options)
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    stopped = tmp_path / "stopped"
    (stopped / "model.safetensors").unlink()
    # As if killed while the second checkpoint was written: its last file is missing.
    (stopped / "checkpoint-4" / "trainer_state.json").unlink()
    train(start, stopped, *options)
    first, second = weights(tmp_path / "whole"), weights(stopped)
    assert all(torch.equal(first[name], second[name]) for name in first)
    paths = [tmp_path / name / "checkpoint-4" / "trainer_state.json" for name in ("whole", "stopped")]
    counts, resumed = (json.loads(path.read_text())["stateful_callbacks"]["WordCounts"] for path in paths)
    assert counts == resumed and torch.tensor(counts["attributes"]["counts"]).sum() > 100


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_decoder_has_the_same_losses(start, tmp_path):
    losses = []
    for name, compiled in (("plain", "false"), ("compiled", "true")):
        options = ["--num_train_epochs", "1", "--hidden_dropout", "0", "--compile_decoder", compiled]
        options += ["--eval_strategy", "no", "--save_strategy", "no", *NO_BEST]
        kernels = tmp_path / f"kernels_{name}"
        result = run(start, tmp_path / name, *options, TORCHINDUCTOR_CACHE_DIR=str(kernels))
        assert any(kernels.rglob("*.cpp")) == (compiled == "true")
        losses.append([float(loss) for loss in re.findall(r"'answer_loss': '([\d.]+)'", result.stdout)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and len(losses[0]) == 2
    before, after = (weights(tmp_path / name) for name in ("plain", "compiled"))
    assert before.keys() == after.keys()


@pytest.mark.slow
def test_two_processes_train_together(start, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29511"]
    run(start, tmp_path / "out", "--num_train_epochs", "1", launcher=launcher)
    assert figures(tmp_path / "out")[-1]["step"] == 1  # 8 images: one step of 2 processes × 4
    assert weights(tmp_path / "out").keys() == weights(start).keys()


def test_epochs_draw_different_images_and_a_resumed_epoch_the_same():
    drawn = []
    mixture, collator = Mixture([list(range(1000))], images_per_epoch=8), SupervisedCollator(None)
    callback = StartEpoch(mixture, collator)
    for epoch in (0.0, 1.0, 1.6, 2.0 - 1e-9):  # the last two: resumed within the second epoch, and at its end
        callback.on_epoch_begin(None, TrainerState(epoch=epoch), None)
        drawn.append([mixture[index] for index in range(8)])
        assert collator.epoch == mixture.epoch
    assert drawn[1] == drawn[2] and drawn[0] != drawn[1] != drawn[3] != drawn[0]


@pytest.mark.parametrize(
    "options",
    [("--gradient_checkpointing", "true", "--gradient_accumulation_steps", "2"), ("--label_smoothing_factor", "0.1")],
)
def test_checkpointing_and_label_smoothing_train(start, tmp_path, options):
    learn(start, tmp_path, "--num_train_epochs", "1", *options)
    changed = {name.split(".")[1] for name in changes(start, tmp_path)}
    assert changed == {"vision_tower", "projector", "text_model"}


def test_bfloat16_trains_where_there_is_no_gpu(start, tmp_path, capsys):
    """Without --use_cpu, which the library asks for."""
    learn(start, tmp_path, "--num_train_epochs", "1", "--bf16", "--use_cpu", "false")
    assert changes(start, tmp_path) and "The model is in" in capsys.readouterr().out


def test_lora_keeps_its_adapter_beside_the_merged_weights(start, tmp_path):
    learn(start, tmp_path, "--num_train_epochs", "1", "--lora_rank", "2")
    changed = changes(start, tmp_path)
    assert changed and all(name.startswith("model.text_model.layers") for name in changed)
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    merged, again = (load_weights(folder).state_dict() for folder in (tmp_path, tmp_path / "adapter"))
    torch.testing.assert_close(again, merged)


@pytest.mark.slow
def test_the_finished_folder_is_pushed_to_the_hub(start, tmp_path, hub):
    start = shutil.copytree(start, tmp_path / "start")
    for name in ("README.md", "LICENSE_WEIGHTS.md"):
        shutil.copy(ROOT / name, start)
    push = ["--push_to_hub", "true", "--hub_model_id", "me/tuned"]
    learn(start, tmp_path / "out", "--num_train_epochs", "1", *push)
    [(repo_id, _, pushed)] = hub.commits
    assert repo_id == "me/tuned"
    assert pushed["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
    assert {"LICENSE", "config.json", "processor_config.json", "modeling_traffic_vlm.py"} <= pushed.keys()
    # The folder has its own card, with metrics of its own weights and the license of the base model.
    card = pushed["README.md"].decode()
    figure = "eval_balanced_accuracy"
    first, last = [entry[figure] for entry in figures(tmp_path / "out") if figure in entry]
    assert "Fine-tuned from `start" in card and f"| balanced_accuracy | {first:.3f} | {last:.3f} |" in card
    assert "license_link: LICENSE_WEIGHTS.md" in card
    assert pushed["LICENSE_WEIGHTS.md"] == (ROOT / "LICENSE_WEIGHTS.md").read_bytes()
    assert not any("checkpoint" in name or "optimizer" in name for name in pushed)


def test_another_run_in_the_same_folder_is_refused(start, tmp_path, capsys):
    """It would resume from the last checkpoint of that run, train nothing, and save the old weights as its own."""
    learn(start, tmp_path, "--num_train_epochs", "1")
    message = refuse(start, tmp_path, "--num_train_epochs", "1", "--presence_weight", "2")
    assert f"{tmp_path} holds something else (presence_weight: 1.0 before, 2.0 now)" in message
    assert "(seed: 42 before, 7 now)" in refuse(start, tmp_path, "--seed", "7")
    assert "(learning_rate: 0.001 before, 0.01 now)" in refuse(start, tmp_path, "--learning_rate", "1e-2")
    learn(start, tmp_path, "--num_train_epochs", "1", "--attn_implementation", "eager")  # may change
    assert "resuming from" in capsys.readouterr().out


def test_a_card_has_the_license_of_the_base_and_hand_written_cards_are_kept(tmp_path):
    for base in (None, "somebody/traffic-vlm", str(ROOT)):  # a license that cannot be read is not guessed
        write_card(tmp_path, base, ["runs/a", "runs/b"], 20, "Better.", {}, {})
        card = (tmp_path / "README.md").read_text()
        assert "on `a`, `b`, 20 steps" in card and "Better." in card
        assert ("Trained from scratch" in card) == (base is None)
        assert ("not-chosen-yet" in card) == (base != str(ROOT)) == (not (tmp_path / "LICENSE_WEIGHTS.md").exists())
    base = tmp_path / "base"
    base.mkdir()
    (tmp_path / "outside").write_text("not to be touched")
    for head in (b"license: [mit", b"license: mit\nlicense_link:", b"- mit", b"\xff\xfe", b"license_link: ../outside"):
        (base / "README.md").write_bytes(b"---\n" + head + b"\n---\n")  # a broken card must not make a run fail
        write_card(tmp_path / "tuned", str(base), ["runs/a"], 20, "Better.", {}, {})
        assert (tmp_path / "tuned/README.md").exists()
    assert (tmp_path / "outside").read_text() == "not to be touched"
    (base / "README.md").write_bytes(b"\xff mine")
    write_card(base, None, ["runs/a"], 20, "Better.", {}, {})
    assert (base / "README.md").read_bytes() == b"\xff mine"
    (tmp_path / "README.md").write_text(mine := card.replace(MARK, "Mine."))
    write_card(tmp_path, None, ["runs/a"], 20, "Better.", {}, {})
    assert (tmp_path / "README.md").read_text() == mine


def test_a_frozen_tower_stays_as_it_was(start, tmp_path):
    learn(start, tmp_path, "--num_train_epochs", "1", "--freeze_vision", "true")
    changed = changes(start, tmp_path)
    assert changed and not any("vision_tower" in name for name in changed)


def test_convolution_blocks_can_be_frozen(start, tmp_path):
    for blocks in ("2", "16"):
        learn(start, tmp_path / blocks, "--num_train_epochs", "1", "--freeze_blocks", blocks)
        changed = changes(start, tmp_path / blocks)
        assert any("vision_tower.layers" in name for name in changed)
        trained = {name.partition("convolutions.")[2] for name in changed if "convolutions" in name}
        assert not any(name.startswith(("stem", "blocks.0.", "blocks.1.")) for name in trained)
        assert any(name.startswith("blocks.2.") for name in trained) == (blocks == "2")
        assert any(name.startswith("head") for name in trained) == (blocks == "2")


def test_freezing_blocks_needs_our_own_tower():
    with pytest.raises(ValueError, match="needs a vision tower with convolutions; this Linear has none"):
        freeze_blocks(torch.nn.Linear(1, 1), 1)
    tower = TrafficVLMVisionModel(TrafficVLMVisionConfig(**TINY_TOWER | PATCH_TOWER))
    with pytest.raises(ValueError, match="a vision tower with convolutions; this TrafficVLMVisionModel has none"):
        freeze_blocks(tower, 1)


def test_training_continues_with_the_head_of_a_finished_folder(start, tmp_path, monkeypatch):
    learn(start, tmp_path / "out", "--num_train_epochs", "1")
    learned = load_file(tmp_path / "out" / HEAD_FILE)
    snapshot = tmp_path / "hub/models--me--tuned/snapshots/0123"
    shutil.copytree(tmp_path / "out", snapshot, ignore=shutil.ignore_patterns("checkpoint-*", "runs"))
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs/main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in (str(tmp_path / "out"), "me/tuned"):
        head = load_training_head(name).state_dict()
        assert head.keys() == learned.keys()
        assert all(torch.equal(learned[key], head[key]) for key in head)
    assert load_training_head(start) is None


def test_a_head_with_other_categories_and_weights_of_another_shape_are_refused(start, tmp_path):
    other = shutil.copytree(start, tmp_path / "other")
    save_file(weights(start) | {"model.projector.bias": torch.zeros(5)}, other / "model.safetensors", {"format": "pt"})
    assert "another shape of model.projector.b" in refuse(other, tmp_path / "out")
    shutil.copytree(start, tmp_path / "start")
    save_file(QueryHead(24, num_categories=3).state_dict(), tmp_path / "start" / HEAD_FILE)
    message = refuse(tmp_path / "start", tmp_path / "out")
    assert "does not fit the 75 categories" in message and HEAD_FILE in message


def test_training_starts_from_a_tower_trained_alone_and_its_head(tmp_path):
    tower = TrafficVLMVisionModel(TrafficVLMVisionConfig(**TINY_TOWER))
    trained = torch.nn.ModuleDict({"tower": tower, "head": QueryHead(24)})
    save_tower(trained, tmp_path / "tower")
    model, _ = prepare_model(ModelOptions(vision_tower=str(tmp_path / "tower")), DataOptions())
    for mine, theirs in ((model.model.vision_tower, trained["tower"]), (model.training_head["head"], trained["head"])):
        for name, value in theirs.state_dict().items():
            assert torch.equal(mine.state_dict()[name], value.bfloat16().to(value.dtype)), name


def test_the_finished_weights_are_the_average_of_those_of_all_steps(start, tmp_path):
    options = ["--max_steps", "3", "--save_strategy", "steps", "--save_steps", "1", "--save_dtype", "float32"]
    learn(start, tmp_path, *options, *NO_BEST, "--save_total_limit", "3", "--average_decay", "0.9")
    steps = [weights(tmp_path / f"checkpoint-{step}") for step in (1, 2, 3)]
    found = weights(tmp_path)
    for name, first in steps[0].items():
        if first.is_floating_point():  # weights and running statistics
            expected = first.lerp(steps[1][name], 1 - 2 / 12).lerp(steps[2][name], 1 - 3 / 13)
            torch.testing.assert_close(found[name], expected, msg=name)


def test_a_decoder_continues_on_another_tower_and_learns_from_its_head(start, tmp_path, capsys):
    config = TrafficVLMVisionConfig(**TINY_TOWER, neck="depthwise", neck_width=16)
    trained = torch.nn.ModuleDict({"tower": TrafficVLMVisionModel(config), "head": QueryHead(24)})
    save_tower(trained, tmp_path / "tower")
    options = ["--vision_tower", str(tmp_path / "tower"), "--image_size", "64", "--freeze_vision", "true"]
    learning = [*options, "--distillation_weight", "1", "--presence_weight", "0", "--max_steps", "2", *NO_BEST]
    learn(start, tmp_path / "out", *learning)
    assert " the model with the new tower" in capsys.readouterr().out
    assert all("distillation_loss" in entry for entry in figures(tmp_path / "out") if "loss" in entry)
    before, after = weights(start), weights(tmp_path / "out")
    prefix = "model.vision_tower."
    for name, value in trained["tower"].state_dict().items():
        assert torch.equal(after[prefix + name].float(), value.bfloat16().float()), name
    decoder = [name for name in before if not name.startswith(prefix)]
    assert all((after[name] - before[name]).abs().max() < 0.1 for name in decoder)
    assert any(not torch.equal(after[name], before[name]) for name in decoder)
    saved = load_training_head(tmp_path / "out")
    assert torch.equal(saved.patch.weight.bfloat16(), trained["head"].patch.weight.bfloat16())

    assert "needs a trained query head" in refuse(start, tmp_path / "other", "--distillation_weight", "1")
    trained["tower"] = TrafficVLMVisionModel(TrafficVLMVisionConfig(**TINY_TOWER | {"hidden_size": 32}))
    save_tower(torch.nn.ModuleDict({"tower": trained["tower"], "head": QueryHead(32)}), tmp_path / "wide")
    message = refuse(start, tmp_path / "other", "--vision_tower", str(tmp_path / "wide"))
    assert "gives tokens of 32 numbers, the decoder reads 24" in message


def test_a_tower_of_transformers_with_a_class_token_and_its_own_normalization(tmp_path):
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=64, patch_size=16
    )
    tower = CLIPVisionModel(config)
    tower.save_pretrained(tmp_path / "tower")
    assert read_normalization(str(tmp_path / "tower")) == read_normalization(None) == {}
    CLIPImageProcessor().save_pretrained(tmp_path / "tower")
    model, processor = prepare_model(ModelOptions(vision_tower=str(tmp_path / "tower")), DataOptions())
    assert processor.image_processor.image_mean == pytest.approx([0.481, 0.458, 0.408], abs=1e-3)
    torch.testing.assert_close(model.model.vision_tower.state_dict(), tower.state_dict())
    model = TrafficVLMForConditionalGeneration(TrafficVLMConfig(config.to_dict(), TINY_TEXT))
    frozen = ["--freeze_vision", "true"]
    learn(save_folder(model, tmp_path / "start"), tmp_path / "out", "--num_train_epochs", "1", *frozen)
    logged = [entry for entry in figures(tmp_path / "out") if "loss" in entry]
    assert {"presence_loss", "grounding_loss"} <= logged[0].keys()


def test_a_patch_tower_and_a_decoder_of_other_sizes_start_from_random_weights():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 1}
    options = ModelOptions(from_scratch=True, vision_tower="patch", image_size=96, **sizes)
    assert start_message(options) == "Training from scratch: all weights are random."
    model, processor = prepare_model(options, DataOptions())
    vision = model.config.vision_config
    assert (vision.conv_widths, vision.num_hidden_layers, vision.image_size) == ([], 3, 96)
    assert processor.image_processor.size == {"height": 96, "width": 96}
    assert {name: getattr(model.config.text_config, name) for name in sizes} == sizes
    assert ModelOptions(medium=True, kv_latent_size=128).text_fields() == MEDIUM_TEXT | {"kv_latent_size": 128}


def test_our_tower_starts_from_a_folder_at_another_image_size(tmp_path):
    tower = TrafficVLMVisionModel(TrafficVLMVisionConfig(**TINY_TOWER)).to(torch.bfloat16)
    tower.save_pretrained(tmp_path / "tower")
    model = build_model(ModelOptions(vision_tower=str(tmp_path / "tower"), image_size=64))
    mine = model.model.vision_tower.state_dict()
    assert all(torch.equal(value.to(mine[name].dtype), mine[name]) for name, value in tower.state_dict().items())
    assert model.model.vision_tower.dtype == torch.float32  # in bfloat16 small updates would vanish
    assert model.config.vision_config.image_size == 64


def test_the_verdict_and_the_card_are_about_the_best_checkpoint(start, tmp_path, capsys):
    options = ["--learning_rate", "0.3", "--num_train_epochs", "3", "--metric_for_best_model", "answer_loss"]
    learn(start, tmp_path, *options, "--greater_is_better", "false", "--save_total_limit", "9")
    logged = [entry for entry in figures(tmp_path) if "eval_answer_loss" in entry]
    best = min(logged[1:], key=lambda entry: entry["eval_answer_loss"])
    assert not changes(tmp_path / f"checkpoint-{best['step']}", tmp_path)
    row = [f"{entry['eval_balanced_accuracy']:.3f}" for entry in (logged[0], best)]
    card, printed = (tmp_path / "README.md").read_text(), capsys.readouterr().out
    assert f"| balanced_accuracy | {row[0]} | {row[1]} |" in card
    assert f"balanced accuracy {row[0]} before, {row[1]} after" in printed
    assert "is not known: it was not evaluated" in judge(tmp_path / "none", None)[0]


def test_a_training_from_scratch_that_learned_nothing_says_so_and_its_folder_trains_on(tmp_path, capsys):
    sizes = ["--hidden_size", "32", "--intermediate_size", "48", "--num_hidden_layers", "1", "--image_size", "32"]
    learn(None, tmp_path / "a", "--from_scratch", "true", "--vision_tower", "patch", *sizes, "--max_steps", "1")
    assert "The answers of the model are no better than a guess: balanced accuracy" in capsys.readouterr().out
    assert "model.vision_tower.patches.position.weight" in weights(tmp_path / "a")
    learn(tmp_path / "a", tmp_path / "b", "--image_size", "48", "--max_steps", "1")


def test_training_without_weights_must_be_asked_for(start, tmp_path):
    assert "needs weights to start from: --model_name_or_path . for" in refuse(None, tmp_path)
    message = refuse(start, tmp_path, "--from_scratch", "true")
    assert f"either --model_name_or_path {start} or --from_scratch true, not both" in message
    options = ModelOptions(model_name_or_path="runs/a", vision_tower="runs/tower")
    assert start_message(options) == "Fine-tuning runs/a with the vision tower runs/tower, new to its decoder."


def test_the_finished_folder_is_bfloat16_and_all_files_can_be_read(start, tmp_path, capsys):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn(start, tmp_path, "--num_train_epochs", "1", "--save_dtype", "bfloat16", "--use_cpu", "false")
    assert not [warning for warning in caught if "pin_memory" in str(warning.message)]
    printed = capsys.readouterr().out
    assert f"Fine-tuning {start}." in printed and "no better than a guess: balanced accuracy" in printed
    assert f"The model is in {tmp_path}" in printed and f"--model {tmp_path}" in printed
    dtypes = [{value.dtype for value in weights(folder).values()} for folder in (tmp_path, tmp_path / "checkpoint-2")]
    assert dtypes == [{torch.bfloat16, torch.int64}, {torch.float32, torch.int64}]
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.suffix in (".json", ".safetensors")}
    assert len(modes) == 1  # that of files made by `open`
    assert "--save_dtype must be one of bfloat16, float32, got 'int8'" in refuse(
        start, tmp_path, "--save_dtype", "int8"
    )


def own_folder(folder: Path, answer: str = "yes", images: int = 8) -> Path:
    """A folder of images with hand-written questions and answers."""
    folder.mkdir()
    lines = []
    for index in range(images):
        Image.new("RGB", (40, 30), (index, 0, 0)).save(folder / f"{index}.png")
        answers = [answer, "red"] if index % 2 else ["no", "blue"]
        line = {
            "file_name": f"{index}.png",
            "questions": ["Is there a bus?", "What color is it?"],
            "answers": answers,
        }
        lines.append(json.dumps(line))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def test_hand_written_questions_are_trained_and_checked(start, tmp_path):
    mine = str(own_folder(tmp_path / "mine"))
    learn(start, tmp_path / "out", "--train_dataset", mine, "--eval_dataset", mine, "--num_train_epochs", "1")
    assert any("eval_balanced_accuracy_mine" in entry for entry in figures(tmp_path / "out"))
    zebras = str(own_folder(tmp_path / "zebras", "zebra"))
    message = refuse(start, tmp_path / "not", "--train_dataset", zebras)
    assert "not among the 500 of the vocabulary: zebra" in message
    long = str(own_folder(tmp_path / "long", "car " * 130))
    assert "at most 128 are allowed" in refuse(start, tmp_path / "not", "--train_dataset", long)
    assert "zebra" in refuse(start, tmp_path / "not", "--eval_dataset", zebras)


def test_training_uses_the_split_train_and_evaluation_needs_one_split(start, tmp_path):
    (tmp_path / "mine").mkdir()
    for split in ("train", "val"):
        own_folder(tmp_path / "mine" / split)
    mine = str(tmp_path / "mine")
    learn(start, tmp_path / "out", "--train_dataset", mine, "--max_steps", "1", "--eval_strategy", "no", *NO_BEST)
    assert "has the splits train, val" in refuse(start, tmp_path / "no", "--eval_dataset", mine)


def test_auxiliary_losses_are_divided_by_the_number_of_accumulated_passes(start, tmp_path, processor):
    rows = [{"image": image, "scene": scene.to_json()} for image, scene in map(render, range(4))]
    model = prepare_model(ModelOptions(model_name_or_path=str(start)), DataOptions())[0].eval()
    batch = SupervisedCollator(processor, 8, grid=(4, 4), paraphrases=2)(rows)
    batch["pixel_values"] = torch.nn.functional.interpolate(batch["pixel_values"], (64, 64))
    (row, column), (other, another) = ((batch["labels"] == 4) | (batch["labels"] == 5)).nonzero()[:2].tolist()
    ends = (row, column - 1, other, another - 1)  # as if each implied the other: in one direction there is a loss
    batch["targets"].agreement = torch.tensor([(*ends, 0), (*ends[2:], *ends[:2], 0)])

    def loss(passes: int, **loss_weights: float) -> float:
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        trainer = TrafficTrainer(model, arguments, loss_weights=loss_weights)
        model.training_head["loss"].regions.counts.zero_()
        trainer.current_gradient_accumulation_steps = passes
        with torch.no_grad():
            return float(trainer.compute_loss(model, dict(batch), num_items_in_batch=torch.tensor(100)))

    answers = loss(1)
    for name in LOSSES:
        whole, half = loss(1, **{name: 1.0}) - answers, loss(2, **{name: 1.0}) - answers
        assert whole > 1e-4 and half == pytest.approx(whole / 2, rel=1e-2), name


class Waits(TorchDispatchMode):
    """The operations for which a CPU waits for a GPU: those that read values, or whose shape depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        is_mask = function is aten.index.Tensor and any(one is not None and one.dtype == torch.bool for one in args[1])
        if is_mask or function in (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default):
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


def test_no_step_waits_for_a_gpu(start, tmp_path, processor, monkeypatch):
    for module in ("checks", "scoring"):  # as for tensors on a GPU
        monkeypatch.setattr(f"traffic_vlm.{module}_traffic_vlm.is_readable", lambda tensor: False)
    rows = [{"image": image, "scene": scene.to_json()} for image, scene in map(render, range(4))]
    monkeypatch.setattr(processor.image_processor, "size", {"height": 64, "width": 64})
    batch = SupervisedCollator(processor, 8, grid=(4, 4), paraphrases=2, uint8_pixels=True)(rows)
    model = prepare_model(ModelOptions(model_name_or_path=str(start)), DataOptions())[0].train()
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    weights = dict.fromkeys(LOSSES, 1.0)
    trainer = TrafficTrainer(model, arguments, loss_weights=weights, processing_class=processor)
    trainer.current_gradient_accumulation_steps = 1
    with Waits() as waits:
        trainer.compute_loss(model, batch, num_items_in_batch=torch.tensor(100)).backward()
    assert waits.found == []


def test_the_presence_loss_is_told_the_source_of_each_image(start, tmp_path, monkeypatch):
    forward, sizes, seen = PresenceLoss.forward, set(), set()

    def record(self, logits, region, patch, source):
        sizes.add(len(self.regions.counts))
        seen.update(source.tolist())
        return forward(self, logits, region, patch, source)

    monkeypatch.setattr(PresenceLoss, "forward", record)
    mine = str(own_folder(tmp_path / "mine"))
    options = ["--train_dataset", mine, "synthetic", "--max_steps", "4", "--eval_strategy", "no", *NO_BEST]
    learn(start, tmp_path / "out", *options, "--train_weights", "1", "1")
    assert seen == {0, 1} and sizes == {3}  # the last counts are those of all sources


def test_evaluation_images_that_repeat_training_images_are_named(start, tmp_path, capsys):
    mine, other = own_folder(tmp_path / "mine"), own_folder(tmp_path / "other", images=20)
    rng = np.random.default_rng(0)
    for path in sorted(mine.glob("*.png")):  # not like each other
        Image.fromarray(rng.integers(0, 255, (8, 9, 3), np.uint8)).resize((90, 80), 0).save(path)
    for index, path in enumerate(sorted(other.glob("*.png"))):
        image = Image.fromarray(rng.integers(0, 255, (8, 9, 3), np.uint8)).resize((90, 80), 0)
        (Image.open(mine / f"{index}.png").resize((45, 40)) if index in (2, 3, 5) else image).save(path)
    options = ["--train_dataset", str(mine), "synthetic", "--max_steps", "1", "--eval_dataset"]
    learn(start, tmp_path / "out", *options, str(other))
    note = "3 of the 20 evaluation images are near-duplicates of training images (other 3): their figures are too high"
    assert note in capsys.readouterr().out and note in (tmp_path / "out" / "README.md").read_text()
    assert describe_repeated([SyntheticRows()], [load_rows([mine])]) == ""
    assert describe_repeated([load_rows([other]).select([0, 1])], [load_rows([mine])]) == ""


def test_a_tenth_is_held_back_without_images_for_evaluation(start, tmp_path, capsys):
    mine = own_folder(tmp_path / "mine", images=60)
    learn(start, tmp_path / "out", "--train_dataset", str(mine), "--num_train_epochs", "1")
    assert "6 images, 10 %, are held back" in capsys.readouterr().out
    assert any("eval_balanced_accuracy_mine" in entry for entry in figures(tmp_path / "out"))
    scenes = SyntheticRows()
    (kept, whole), [held] = hold_back([load_rows([mine]), scenes])
    assert (len(kept), len(held)) == (54, 6) and whole is scenes
    assert not set(held["image_id"]) & set(kept["image_id"])
    assert held["image_id"] == hold_back([load_rows([mine])])[1][0]["image_id"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train_dataset", "no/such/folder"], "no/such/folder: there is no such dataset folder"),
        (["--learning_rate", "1e30", "--max_grad_norm", "0", "--num_train_epochs", "3"], "the loss is"),
    ],
)
def test_the_script_ends_with_an_error_message_and_no_traceback(start, tmp_path, options, message):
    result = run(start, tmp_path, *options, code=1)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "model.safetensors").exists()


def test_errors_of_a_full_disk_are_recognized():
    assert is_write_error(OSError(28, "No space left on device"))
    assert is_write_error(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 372160 vs 372052"))
    assert is_write_error(Exception("No space left on device (os error 28)"))  # of tokenizers
    assert not is_write_error(RuntimeError("[enforce fail at inline_container.cc:3] . PytorchStreamReader failed"))
    assert not is_write_error(OSError(2, "No such file or directory"))
    assert not is_write_error(Exception("No such file or directory (os error 2)"))


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [64, 400])  # too few for the weights, and for the state of the optimizer
def test_a_full_disk_is_an_error_and_keeps_the_last_checkpoint(start, tmp_path, kilobytes):
    learn(start, tmp_path, "--num_train_epochs", "1")
    (tmp_path / "model.safetensors").unlink()
    before = weights(tmp_path / "checkpoint-2")
    full = ["bash", "-c", f'ulimit -f {kilobytes}; exec "$@"', "bash", sys.executable]  # limits the size of files
    result = run(start, tmp_path, "--num_train_epochs", "2", "--save_total_limit", "1", launcher=full, code=1)
    assert f"{tmp_path}: a file could not be written, the disk is full or" in result.stderr
    assert "Traceback" not in result.stderr
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert all(torch.equal(before[name], weight) for name, weight in weights(tmp_path / "checkpoint-2").items())
    assert not (tmp_path / "model.safetensors").exists()


def test_a_gradient_of_nan_stops_training_before_a_checkpoint_is_written(start, tmp_path, monkeypatch):
    options = ["--eval_strategy", "no", *NO_BEST, "--save_strategy", "steps"]
    options += ["--save_steps", "1", "--num_train_epochs"]
    learn(start, tmp_path, *options, "1")

    def broken(maps, patches):
        return (0 * maps).sum().sqrt()  # a loss of 0 with a gradient of NaN

    with monkeypatch.context() as patched:
        patched.setattr("traffic_vlm.training.auxiliary.objective.grounding_loss", broken)
        with pytest.raises(FloatingPointError, match="weights are NaN or infinite at step 3"):
            learn(start, tmp_path, *options, "2")
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    learn(start, tmp_path, *options, "2")  # resumes from there
    assert all(weight.isfinite().all() for weight in weights(tmp_path).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train_weights", "1", "2"], "1 datasets need as many positive weights, got [1.0, 2.0]"),
        (["--image_size", "60"], "image_size=60"),
        (["--questions_per_image", "0"], "--questions_per_image must be at least 1, got 0"),
        (["--model_name_or_path", "no/such/model"], "no/such/model"),
        (["--vision_tower", "some/tower"], "--vision_tower must be a folder of train_tower.py, got some/tower"),
        (["--distillation_weight", "1", "--lora_rank", "2"], "--lora_rank keeps no query head"),
        (["--average_decay", "1"], "--average_decay must be in [0, 1), got 1.0"),
        (["--average_decay", "0.9"], "add --load_best_model_at_end false"),
        (["--add_words", "okapi", "--lora_rank", "2"], "--lora_rank trains only LoRA matrices and no new words"),
        (["--dataloader_persistent_workers", "true"], "--dataloader_persistent_workers must be false"),
        (["--metric_for_best_model", "loss"], "the metric loss, which selects the best checkpoint, is not"),
        (["--num_key_value_heads", "1", "--medium", "true"], "have their own sizes: leave out hidden_size=768, "),
        (["--vision_tower", "patch"], "--vision_tower must be a folder of train_tower.py, got patch"),
    ],
)
def test_invalid_options_are_refused(start, tmp_path, options, message):
    assert message in refuse(start, tmp_path, *options)
    assert not (tmp_path / "model.safetensors").exists()


def test_several_gpus_in_one_process_are_refused(start, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    assert "torchrun --nproc_per_node 2, or select one GPU" in refuse(start, tmp_path)

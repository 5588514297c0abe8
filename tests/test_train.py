"""Training runs: what a finished folder holds, ways to train, the data and losses of a run, and its errors."""

import json
import math
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, TrainingArguments

import traffic_vlm
from runs import NO_EVAL, ONE_STEP, changes, command, history, learn, own_folder, refuse, weights
from tiny import ROOT, TINY_TOWER, free_port, save_folder, start_process, tiny_config, tiny_model
from traffic_vlm.configuration_traffic_vlm import TrafficVLMVisionConfig
from traffic_vlm.data.datasets import SyntheticRows, load_rows
from traffic_vlm.data.synthetic import render
from traffic_vlm.scripts.train import Arguments
from traffic_vlm.training.auxiliary.losses import LOSSES, make_targets
from traffic_vlm.training.auxiliary.presence import HEAD_FILE, QueryHead, load_training_head, save_training_head
from traffic_vlm.training.collator import TrafficCollator
from traffic_vlm.training.drawing import Drawing, Drawn
from traffic_vlm.training.model import prepare_model
from traffic_vlm.training.options import LOSSES as WEIGHTED
from traffic_vlm.training.options import TrainOptions
from traffic_vlm.training.rows import are_of_own_kind, split_for_evaluation
from traffic_vlm.training.run import count_draws
from traffic_vlm.training.trainer import AVERAGE_FILE, TrafficTrainer, last_checkpoint
from traffic_vlm.vision_traffic_vlm import TrafficVLMVisionModel


PARTS = {"vision_tower", "projector", "text_model"}


@pytest.mark.slow
def test_a_run_is_logged_judged_and_pushed_and_its_folder_loads_by_itself(start, tmp_path, hub, capsys):
    """The checkpoint with the highest loss counts as the best here: the first one, not the last."""
    start, out = shutil.copytree(start, tmp_path / "start"), tmp_path / "out"
    for name in ("README.md", "LICENSE_WEIGHTS.md"):
        shutil.copy(ROOT / name, start)
    options = "--num_train_epochs 2 --learning_rate 2e-3 --questions_per_image 8 --save_total_limit 9"
    best = "--metric_for_best_model answer_loss --greater_is_better true"
    learn(start, out, f"{options} {best} --push_to_hub true --hub_model_id me/tuned")

    evaluations, steps = history(out, "eval_answer_loss"), history(out)
    losses = [entry["eval_answer_loss"] for entry in evaluations]
    assert [entry["step"] for entry in evaluations] == [0, 2, 4] and losses == sorted(losses, reverse=True)
    assert [entry["eval_perplexity"] for entry in evaluations] == pytest.approx([math.exp(loss) for loss in losses])
    assert steps[3]["answer_loss"] < steps[0]["answer_loss"]
    assert all(max(entry[f"{name}_loss"] for entry in steps) > 0 for name in ("presence", "grounding"))

    assert not changes(out / "checkpoint-2", out) and changes(out / "checkpoint-4", out)
    assert {name.split(".")[1] for name in changes(start, out)} == PARTS
    saved, prefix = load_file(out / "checkpoint-2" / "model.safetensors"), "training_head.head."
    for name, value in load_training_head(out).state_dict().items():
        assert torch.equal(saved[prefix + name], value), name
    assert json.loads((out / "config.json").read_text())["use_cache"]

    before, after = (f"{entry['eval_balanced_accuracy']:.3f}" for entry in evaluations[:2])
    printed = capsys.readouterr().out
    assert f"balanced accuracy {before} before, {after} after" in printed
    assert "ok: the folder loads in a new process and answers a question" in printed
    [(repo_id, pushed)] = hub.commits
    assert repo_id == "me/tuned" and not any("checkpoint" in name or "optimizer" in name for name in pushed)
    for name in ("model.safetensors", "README.md", "LICENSE_WEIGHTS.md"):
        assert pushed[name] == (out / name).read_bytes()
    card = pushed["README.md"].decode()
    assert "Fine-tuned from `start` on `synthetic`, 4 steps" in card and "license_link: LICENSE_WEIGHTS.md" in card
    assert f"balanced accuracy {before} before, {after} after" in card


# Ways to train


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_resumed_run_equals_an_uninterrupted_one_and_averages_all_steps(start, tmp_path, workers, monkeypatch):
    epochs, set_epoch = list[int](), Drawing.set_epoch
    monkeypatch.setattr(Drawing, "set_epoch", lambda self, epoch: set_epoch(self, epoch) or epochs.append(epoch))
    lengths = f"--num_train_epochs 3 --images_per_epoch 4 --save_total_limit 3 --dataloader_num_workers {workers}"
    options = f"{lengths} --average_decay 0.2 {NO_EVAL}"
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    learn(start, whole, options)
    assert {*epochs} == {0, 1, 2}
    steps, average = [weights(whole / f"checkpoint-{step}") for step in (1, 2, 3)], weights(whole)
    for name, first in steps[0].items():
        if first.is_floating_point():  # weights and running statistics
            expected = first.lerp(steps[1][name], 1 - 2 / 12).lerp(steps[2][name], 1 - 0.2)
            torch.testing.assert_close(average[name], expected.to(average[name].dtype), msg=name)

    shutil.copytree(whole, stopped)
    (stopped / "model.safetensors").unlink()
    (stopped / "checkpoint-3" / "trainer_state.json").unlink()  # as if killed before the last file was written
    for other in ("--presence_weight 2", "--seed 7"):
        assert "checkpoints of a run with other options" in refuse(start, stopped, f"{options} {other}")
    learn(start, stopped, options)
    assert not changes(whole, stopped)
    paths = [folder / "checkpoint-3" / "trainer_state.json" for folder in (whole, stopped)]
    assert (paths[0].parent / AVERAGE_FILE).stat().st_mtime_ns < paths[0].stat().st_mtime_ns  # or a kill may lose it
    learn(start, tmp_path / "elsewhere", f"{options} --resume_from_checkpoint {whole / 'checkpoint-2'}")
    assert not changes(whole, tmp_path / "elsewhere")
    counts, resumed = (load_file(path.parent / "model.safetensors")["training_head.words.counts"] for path in paths)
    assert torch.equal(counts, resumed) and counts.sum() > 50


def test_a_training_without_auxiliary_losses_loads_none_of_their_code(start, tmp_path, monkeypatch):
    monkeypatch.setattr(traffic_vlm, "training", traffic_vlm.training)  # set again after the test
    for name in [name for name in sys.modules if name.startswith("traffic_vlm.training")]:
        monkeypatch.delitem(sys.modules, name)
    learn(start, tmp_path, f"{ONE_STEP} {' '.join(f'--{name}_weight 0' for name in WEIGHTED)}")
    assert "traffic_vlm.training.trainer" in sys.modules and not any("auxiliary" in name for name in sys.modules)
    assert (tmp_path / "model.safetensors").is_file()


@pytest.mark.slow
def test_two_processes_train_together(start, tmp_path):
    """Started with the variables that torchrun sets."""
    unused = "--pool_above 320"  # a layer that small images do not pass
    options = command(start, tmp_path, f"--num_train_epochs 2 {unused} {NO_EVAL}")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    for process in [start_process("train.py", *options, env=rank) for rank in ranks]:
        errors = process.communicate(timeout=300)[1]
        assert process.returncode == 0, errors
    entries = history(tmp_path)
    assert [entry["step"] for entry in entries] == [1, 2]  # an epoch has 8 images: one step of 2 processes × 4
    assert all(entry["answer_loss"] < entry["loss"] for entry in entries)  # which has the auxiliary losses, too
    assert weights(tmp_path).keys() > weights(start).keys()


def test_bfloat16_checkpointing_accumulation_and_label_smoothing_train(start, tmp_path, capsys):
    """Without --use_cpu, which the library asks for."""
    options = "--bf16 --use_cpu false --gradient_checkpointing true --num_train_epochs 1"
    learn(start, tmp_path, f"{options} --gradient_accumulation_steps 2 --label_smoothing_factor 0.1 {NO_EVAL}")
    assert {name.split(".")[1] for name in changes(start, tmp_path)} == PARTS
    assert "Whether training made the model better was not measured" in capsys.readouterr().out
    dtypes = [{value.dtype for value in weights(folder).values()} for folder in (tmp_path, tmp_path / "checkpoint-1")]
    assert dtypes == [{torch.bfloat16, torch.int64}, {torch.float32, torch.int64}]
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir() if path.suffix in (".json", ".safetensors")}
    assert len(modes) == 1  # that of files made by `open`


# What training starts from


@pytest.fixture(scope="module")
def tower_folder(tmp_path_factory):
    """A tower without a decoder, and its head."""
    folder, fields = tmp_path_factory.mktemp("tower"), TINY_TOWER | {"neck_width": 16}
    TrafficVLMVisionModel(TrafficVLMVisionConfig(**fields)).save_pretrained(folder)
    save_training_head(QueryHead(24), folder)
    return folder


def test_training_starts_from_a_tower_and_its_head_and_can_freeze_it(start, tower_folder, tmp_path):
    folder = tower_folder
    options = TrainOptions(from_scratch=True, vision_tower=str(folder), image_size=64, freeze_blocks=2)
    model, processor = prepare_model(options)
    tower, head = model.model.vision_tower, model.training_head["head"]
    torch.testing.assert_close(dict(tower.state_dict()), weights(folder))
    torch.testing.assert_close(dict(head.state_dict()), load_file(folder / HEAD_FILE))
    assert tower.dtype == torch.float32  # in bfloat16 small updates would vanish
    assert model.config.vision_config.image_size == processor.image_processor.size["height"] == 64
    for name, weight in tower.named_parameters():
        frozen = ("convolutions.stem.", "convolutions.blocks.0.", "convolutions.blocks.1.")
        assert weight.requires_grad != name.startswith(frozen), name

    learn(start, tmp_path / "out", f"--vision_tower {folder} --image_size 64 --freeze_vision true {ONE_STEP}")
    before, after, prefix = weights(start), weights(tmp_path / "out"), "model.vision_tower."
    for name, value in weights(folder).items():
        assert torch.equal(after[prefix + name], value.to(after[prefix + name].dtype)), name
    decoder = [name for name in before if not name.startswith(prefix)]
    assert 0 < max((after[name] - before[name]).abs().max() for name in decoder) < 0.1


def test_of_a_frozen_tower_what_only_the_answers_teach_is_trained(tower_folder):
    parts = {"vision_tower": str(tower_folder), "freeze_vision": True, "pool_above": 128, "locate": ["car"]}
    for questions, trained in ((8, {"pool", "objects"}), (0, {"center_head"})):
        model, _ = prepare_model(TrainOptions(from_scratch=True, questions_per_image=questions, **parts))
        tower = model.model.vision_tower if questions else model.tower
        found = {name.split(".")[0] for name, weight in tower.named_parameters() if weight.requires_grad}
        assert found == trained and tower.config.located == {"car": 0.3}


def test_a_tower_of_transformers_with_a_class_token_and_its_own_normalization(start, tmp_path):
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=64, patch_size=16))
    tower.save_pretrained(tmp_path / "tower")
    CLIPImageProcessor().save_pretrained(tmp_path / "tower")
    model, processor = prepare_model(TrainOptions(from_scratch=True, vision_tower=str(tmp_path / "tower")))
    assert processor.image_processor.image_mean == pytest.approx([0.481, 0.458, 0.408], abs=1e-3)
    torch.testing.assert_close(model.model.vision_tower.state_dict(), tower.state_dict())
    with pytest.raises(ValueError, match="--freeze_blocks is for our own vision tower, not for CLIPVisionModel"):
        prepare_model(TrainOptions(from_scratch=True, vision_tower=str(tmp_path / "tower"), freeze_blocks=2))
    learn(start, tmp_path / "out", f"--vision_tower {tmp_path / 'tower'} {ONE_STEP}")
    assert {"presence_loss", "grounding_loss"} <= history(tmp_path / "out")[0].keys()


def test_training_from_scratch_takes_the_sizes_of_a_config_in_float32(tmp_path):
    tiny_config(yes_no_temperature=1.6, dtype="bfloat16").save_pretrained(tmp_path)
    model, _ = prepare_model(TrainOptions(from_scratch=True, config=str(tmp_path), image_size=64))
    text, wanted = model.config.text_config, tiny_config().text_config
    assert (text.hidden_size, text.num_hidden_layers) == (wanted.hidden_size, wanted.num_hidden_layers)
    assert model.dtype == torch.float32 and model.config.yes_no_temperature == 1.0
    assert model.config.vision_config.image_size == 64


# Data


def test_own_questions_are_trained_with_rendered_scenes(start, tmp_path):
    own_folder(tmp_path / "mine" / "train")
    own_folder(tmp_path / "mine" / "val")
    other = own_folder(tmp_path / "other", images=20)
    both = f"--train_dataset {tmp_path / 'mine'} synthetic --train_weights 1 3 --sizes 64 96 --size_weights 1 3"
    learn(start, tmp_path / "out", f"{both} --max_steps 3 --eval_dataset {other} synthetic")
    assert history(tmp_path / "out", "eval_balanced_accuracy_other")
    counts = load_file(last_checkpoint(tmp_path / "out") / "model.safetensors")["training_head.loss.counts"]
    assert len(counts) == 3 and counts[1].any()  # of own images, of scenes, and of all
    assert "has the splits train, val" in refuse(start, tmp_path / "no", f"--eval_dataset {tmp_path / 'mine'}")


def test_a_tenth_is_held_back_for_evaluation(tmp_path):
    mine, scenes = load_rows([own_folder(tmp_path / "mine", images=60)]), SyntheticRows()
    twin = load_rows([own_folder(tmp_path / "twin", images=60)]).select(range(20, 60))  # 40 images of `mine`
    (kept, whole, others), evaluated, note = split_for_evaluation([mine, scenes, twin], [], 24)
    assert (len(kept), len(others), len(evaluated)) == (54, 36, 10) and whole is scenes
    assert note == "10 of 100 images are held back for evaluation."
    assert not {row["image_id"] for row in evaluated} & {*kept["image_id"], *others["image_id"]}
    note = "80 images of --eval_dataset look like training images: its figures are too high."  # 40 of each
    assert split_for_evaluation([mine.select(range(20, 60))], [twin, mine], 24)[2] == note
    _, _, note = split_for_evaluation([mine.select([0] * 20)], [], 24)
    assert (
        note == "2 of 20 images are held back for evaluation. 2 of them look like all others of their folder: "
        "their figures are too high."
    )


def test_the_last_tenth_has_the_default_size_with_any_number_of_images(tmp_path):
    """An epoch of 5 images has steps of 4 and 1 images, or with two passes a step one of 5."""
    shared = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    for images, accumulated, fields, draws in (
        (5, 1, {"max_steps": 20}, 50),
        (5, 2, {"max_steps": 20}, 100),
        (8192, 2, {"max_steps": 20}, 160),
        (5, 1, {"num_train_epochs": 2.5}, 13),
    ):
        batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulated}
        arguments = TrainingArguments(**shared, **batch, **fields)
        assert count_draws(arguments, TrainOptions("start", images_per_epoch=images)) == draws


def test_own_questions_are_checked(start, tmp_path):
    zebras, long = own_folder(tmp_path / "zebras", "zebra"), own_folder(tmp_path / "long", "car " * 130)
    one, two = own_folder(tmp_path / "one", images=1), own_folder(tmp_path / "two") / "metadata.jsonl"
    two.write_text(two.read_text().replace("a bus?", "a bus? Is it wet?"))
    for options, message in (
        (f"--train_dataset {zebras}", "are not known: --add_words zebra teaches them"),
        (f"--eval_dataset {zebras}", "are not known: --add_words zebra teaches them"),
        (f"--train_dataset {long}", "at most 128 are allowed"),
        (f"--train_dataset {two.parent}", "has no answer later: 'Is there a bus? Is it wet?' contains 2 questions"),
        (f"--train_dataset {one}", "must have rows, these have [0]"),
    ):
        assert message in refuse(start, tmp_path / "out", options)


def test_own_questions_of_another_kind_than_ours_are_answered_later(processor):
    for question, answer, is_own in (
        ("Is there a bus?", "yes", False),
        ("Is there a bus?", "red", True),
        ("Should we stop?", "no", True),
    ):
        assert are_of_own_kind([(question, answer)], processor) == is_own
        assert processor.rules.read(question, processor.prompt, 128, any_kind=is_own).problem is None


def test_auxiliary_losses_are_divided_by_the_number_of_accumulated_passes(start, tmp_path, processor, monkeypatch):
    monkeypatch.setattr(processor.image_processor, "size", {"height": 64, "width": 64})
    rows = [{"image": image, "scene": scene.to_json()} for image, scene in map(render, range(4))]
    targets = make_targets(
        ("presence", "grounding", "agreement"), processor, TrafficVLMVisionConfig(**TINY_TOWER), ["synthetic"]
    )
    batch = TrafficCollator(processor, 8, targets)(Drawn(rows, (64, 64), np.random.default_rng(0)))
    assert batch["pixel_values"].dtype == torch.uint8
    (row, column), (other, another) = ((batch["labels"] == 4) | (batch["labels"] == 5)).nonzero()[:2].tolist()
    ends = (row, column - 1, other, another - 1)  # as if each implied the other: in one direction there is a loss
    batch["targets"]["agreement"]["pairs"] = torch.tensor([(*ends, 0), (*ends[2:], *ends[:2], 0)])

    def loss(passes: int, *names: str) -> float:
        torch.manual_seed(0)
        options = TrainOptions(str(start), grounding_weight=1, agreement_weight=1)
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
        trainer = TrafficTrainer(prepare_model(options)[0], arguments, options=options, processing_class=processor)
        trainer.current_gradient_accumulation_steps = passes
        with torch.no_grad():
            chosen = batch | {"targets": {name: batch["targets"][name] for name in names}}
            return float(trainer.compute_loss(trainer.model.eval(), chosen, num_items_in_batch=torch.tensor(100)))

    answers = loss(1)
    for name in ("presence", "grounding", "agreement"):
        whole, half = loss(1, name) - answers, loss(2, name) - answers
        assert whole > 1e-4 and half == pytest.approx(whole / 2, rel=1e-2), name


# Errors


def test_nan_stops_training_before_a_checkpoint_is_written(start, tmp_path, monkeypatch):
    options = f"{NO_EVAL} --save_strategy steps --save_steps 1 --num_train_epochs 1"
    calls, loss = [], LOSSES["grounding"]

    def broken(passed, **targets):
        calls.append(1)  # from the second step on, a loss of 0 with a gradient of NaN
        return loss(passed, **targets) if len(calls) == 1 else (0 * passed.logits).sum().sqrt()

    with monkeypatch.context() as patched:
        patched.setitem(LOSSES, "grounding", broken)
        with pytest.raises(FloatingPointError, match="weights are NaN or infinite at step 2"):
            learn(start, tmp_path, options)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    learn(start, tmp_path, options)  # resumes from there
    assert all(weight.isfinite().all() for weight in weights(tmp_path).values())
    with pytest.raises(FloatingPointError, match="the loss is"):
        learn(start, tmp_path / "diverged", f"--learning_rate 1e30 --max_grad_norm 0 --max_steps 4 {NO_EVAL}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--from_scratch true", "pass either --model_name_or_path"),
        ("--train_dataset synthetic docs ./docs/../docs", "docs and docs/../docs: a folder is given twice"),
        ("--image_size 60", "image_size=60"),
        ("--locate forklift", "--locate forklift: is not one of"),
        ("--images_per_epoch 0", "--images_per_epoch must be at least 1, got 0"),
        ("--questions_per_image -1", "--questions_per_image must be at least 0, got -1"),
        ("--questions_per_image 0 --eval_dataset synthetic", "synthetic has no scenes; make the dataset"),
        ("--average_decay 1", "--average_decay must be below 1, got 1.0"),
        ("--dataloader_persistent_workers true", "--dataloader_persistent_workers must be false"),
        ("--metric_for_best_model loss", "--metric_for_best_model loss is not known of the evaluation images"),
        ("--train_weights 1 2", "--train_weights must be positive, one for each of --train_dataset ['synthetic']"),
        ("--train_weights nan", "one for each of --train_dataset ['synthetic'], got [nan]"),
        ("--train_weights 0", "one for each of --train_dataset ['synthetic'], got [0.0]"),
        ("--eval_dataset synthetic --eval_strategy no", "--eval_strategy no evaluates nothing: leave out"),
        ("--config .", "have their own sizes: leave out --config"),
        ("--output_dir {start}", "has the weights to start from: choose another folder"),
    ],
)
def test_invalid_options_are_refused(start, tmp_path, options, message):
    assert message in refuse(start, tmp_path, options.format(start=start))
    assert not (tmp_path / "model.safetensors").exists()


def test_defaults_that_the_library_and_the_image_size_leave_wrong(tmp_path):
    for name in ("eval_perplexity", "ece"):
        assert Arguments(output_dir=str(tmp_path), metric_for_best_model=name).greater_is_better is False
    config = prepare_model(TrainOptions(model_name_or_path=str(ROOT), image_size=224))[0].config
    assert config.yes_no_temperature == config.size_temperatures["224"]


def test_a_model_of_oblong_images_is_trained_on_them(tmp_path):
    vision = TINY_TOWER | {"model_type": "traffic_vlm_vision", "image_size": [64, 96]}
    folder = save_folder(tiny_model(vision=vision), tmp_path)
    _, processor = prepare_model(TrainOptions(train_dataset=["synthetic"], model_name_or_path=str(folder)))
    assert processor(images=Image.new("RGB", (9, 9)), return_tensors="pt")["pixel_values"].shape == (1, 3, 64, 96)

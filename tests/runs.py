"""Training runs of a tiny model: their command, images as a user has them, and what a run has written."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tiny import load_script
from traffic_vlm.common.options import option_parser
from traffic_vlm.training.trainer import last_checkpoint


FAST = (
    "--use_cpu --images_per_epoch 8 --per_device_train_batch_size 4 --questions_per_image 4 --max_eval_images 24 "
    "--logging_steps 1 --dataloader_num_workers 0 --learning_rate 1e-3 --warmup_steps 0 --lr_scheduler_type constant"
)
NO_EVAL = "--eval_strategy no"
ONE_STEP = f"--max_steps 1 {NO_EVAL}"


def command(start: Path | None, output: Path, options: str) -> list[str]:
    base = f"--model_name_or_path {start}" if start else ""
    return f"{base} --output_dir {output} {FAST} {options}".split()


def learn(start: Path | None, output: Path, options: str) -> None:
    """Train with these options of scripts/train.py."""
    from traffic_vlm.training.options import TrainOptions  # here, so that a test can see what is imported
    from traffic_vlm.training.run import train

    parser = option_parser((load_script("train").Arguments, TrainOptions), None)
    train(*parser.parse_args_into_dataclasses(command(start, output, options)))


def refuse(start: Path | None, output: Path, options: str = "") -> str:
    """The error message of a training run that is refused."""
    with pytest.raises((ValueError, OSError)) as error:
        learn(start, output, options)
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


def history(folder: Path, name: str = "loss") -> list[dict[str, float]]:
    """The entries of the log that have a value with this name."""
    state = json.loads((last_checkpoint(folder) / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if name in entry]


def own_folder(folder: Path, answer: str = "yes", images: int = 8) -> Path:
    """A folder of images with hand-written questions and answers. No two images are alike."""
    folder.mkdir(parents=True)
    rng, lines = np.random.default_rng(len(str(folder))), []
    for index in range(images):
        cells = Image.fromarray(rng.integers(0, 255, (8, 9, 3), np.uint8))
        cells.resize((90, 80), Image.Resampling.NEAREST).save(folder / f"{index}.png")
        line = {"file_name": f"{index}.png", "questions": ["Is there a bus?", "What color is it?"]}
        lines.append(json.dumps(line | {"answers": [answer, "red"] if index % 2 else ["no", "blue"]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder

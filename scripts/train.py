"""Train or fine-tune Traffic VLM with the library's Trainer.

    # from nothing, on scenes that are rendered while training; a minute on a CPU, only to see that it runs
    python scripts/train.py --output_dir runs/try --images_per_epoch 64 --num_train_epochs 2
    # fine-tune weights on your own labelled images (see make_dataset.py), on any number of processes
    python scripts/train.py --model_name_or_path . --train_dataset runs/mine --eval_dataset runs/mine_val --bf16
    torchrun --nproc_per_node 2 scripts/train.py --model_name_or_path . --train_dataset runs/mine
    # another vision tower, kept as it is for one epoch; or LoRA
    python scripts/train.py --vision_tower google/siglip-base-patch16-224 --freeze_vision true --thaw_after_epochs 1
    python scripts/train.py --model_name_or_path . --lora_rank 16 --train_dataset runs/mine

All options of the library's TrainingArguments hold but two that are refused with the reason. An epoch is
`--images_per_epoch` images drawn from all datasets. A run that was stopped goes on from its last whole checkpoint
when the same command is given again: from the end of an epoch (the default) it ends as if never stopped; from within
one (`--save_steps`) it sees the same images, but asks other questions. TensorBoard finds its logs in the output
folder, which itself is the finished model: `AutoModel.from_pretrained(output_dir, trust_remote_code=True)`.
"""

import sys
from dataclasses import dataclass, field

from safetensors import SafetensorError
from transformers import HfArgumentParser, TrainingArguments

from traffic_vlm.training.run import DataOptions, ModelOptions, train


@dataclass
class Arguments(TrainingArguments):
    output_dir: str = field(default="runs/train", metadata={"help": "folder for checkpoints and the finished model"})
    learning_rate: float = 5e-4
    weight_decay: float = 0.05
    warmup_steps: float = 0.02
    lr_scheduler_type: str = "cosine"
    per_device_train_batch_size: int = 32
    per_device_eval_batch_size: int = 16
    max_grad_norm: float = 1.0
    logging_steps: float = 20
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int | None = 2
    load_best_model_at_end: bool = True
    metric_for_best_model: str | None = "balanced_accuracy"
    report_to: None | str | list[str] = "tensorboard"  # noqa: RUF036 (the parser reads no other order)
    remove_unused_columns: bool = False
    dataloader_num_workers: int = 1
    # All parameters are used; the search for unused ones would count twice those that our losses read.
    ddp_find_unused_parameters: bool | None = False


def main() -> None:
    parser = HfArgumentParser((Arguments, ModelOptions, DataOptions))
    try:
        train(*parser.parse_args_into_dataclasses())
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from the last checkpoint")
    except (ValueError, OSError, FloatingPointError, RuntimeError, SafetensorError) as error:
        # An error of a worker that loads data brings the worker's traceback as its text, the error itself at its end.
        text = str(error).strip()
        sys.exit(text.splitlines()[-1] if "Original Traceback" in text else f"{type(error).__name__}: {text}")


if __name__ == "__main__":
    main()

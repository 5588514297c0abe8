"""Train or fine-tune Traffic VLM with the library's Trainer.

    # fine-tune weights on your own labeled images (see make_dataset.py), in one or several processes
    python scripts/train.py --model_name_or_path . --train_dataset runs/mine --eval_dataset runs/mine_val --bf16
    torchrun --nproc_per_node 2 scripts/train.py --model_name_or_path . --train_dataset runs/mine
    # from scratch, on scenes rendered while training; takes a minute on a CPU and only shows that training works
    python scripts/train.py --from_scratch true --output_dir runs/try --images_per_epoch 64 --num_train_epochs 2 \\
        --learning_rate 5e-4
    # teach a word of your own questions, which starts as the mean of all vehicles
    python scripts/train.py --model_name_or_path . --train_dataset runs/mine --add_words forklift:vehicle
    # the vision tower and its head alone, without a decoder; then a decoder from scratch on that tower, or on another
    python scripts/train.py --questions_per_image 0 --model_name_or_path . --train_dataset runs/a --eval_dataset runs/b
    python scripts/train.py --from_scratch true --vision_tower runs/train/tower --freeze_vision true
    python scripts/train.py --from_scratch true --vision_tower google/siglip-base-patch16-224 --freeze_vision true
    # other sizes, from scratch: those of a config.json
    python scripts/train.py --from_scratch true --config runs/patch

All options of the library's TrainingArguments are accepted, except `--dataloader_persistent_workers`. An epoch is
`--images_per_epoch` images drawn from all datasets. The same command resumes a stopped run from its last complete
checkpoint: from the end of an epoch (the default) the result is that of an uninterrupted run. The output folder holds
the finished model in bfloat16, for `AutoModel.from_pretrained(output_dir, trust_remote_code=True)`, checkpoints and
TensorBoard logs. The last lines say whether the model became better.
"""

import sys
from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments

from traffic_vlm.common.options import choose_threads, option_parser
from traffic_vlm.scripts import command
from traffic_vlm.training.options import TrainOptions
from traffic_vlm.training.run import train


@dataclass
class Arguments(TrainingArguments):
    output_dir: str = field(default="runs/train", metadata={"help": "folder for checkpoints and the finished model"})
    learning_rate: float = 2.5e-4
    weight_decay: float = 0.05
    warmup_steps: float = 0.02
    lr_scheduler_type: str = "cosine"
    per_device_train_batch_size: int = 32
    per_device_eval_batch_size: int = 16
    max_grad_norm: float = 1.0
    logging_steps: float = 20
    logging_nan_inf_filter: bool = False  # it would wait for the GPU at each step
    eval_strategy: str = "epoch"
    save_strategy: str = "epoch"
    save_total_limit: int | None = 2
    load_best_model_at_end: bool = True
    metric_for_best_model: str | None = "balanced_accuracy"
    report_to: None | str | list[str] = "tensorboard"  # noqa: RUF036 (the parser needs this order)
    remove_unused_columns: bool = False
    dataloader_num_workers: int = 1
    # The trainer uses all weights. The search for unused ones would count twice those that the auxiliary losses read.
    ddp_find_unused_parameters: bool | None = False

    def __post_init__(self) -> None:
        self.use_cpu |= not torch.accelerator.is_available()  # otherwise the library refuses --bf16 on a CPU
        self.load_best_model_at_end &= self.eval_strategy != "no"
        if (self.metric_for_best_model or "").removeprefix("eval_") in ("ece", "perplexity"):
            self.greater_is_better = False  # the library knows it of names that end in "loss"
        super().__post_init__()


@command("train")
def main() -> None:
    parser = option_parser((TrainOptions, Arguments), __doc__)
    options, arguments = parser.parse_args_into_dataclasses()
    # Attention to far patches and its gradients are often denormal in float32, and then products of matrices take
    # five times as long on a CPU. Threads inherit this setting, so it must come before the first product.
    torch.set_flush_denormal(True)
    choose_threads()
    train(arguments, options)


if __name__ == "__main__":
    sys.exit(main())

"""Fine-tuning with the library's Trainer: packed and plain batches, checkpoints that load by themselves."""

import torch
from PIL import Image
from transformers import AutoModel, AutoProcessor, Trainer, TrainingArguments

from tiny import tiny_model


def frames(count: int = 8) -> list[dict]:
    """Bright and dark images; the answer is yes for the bright ones."""
    bright, dark = (Image.new("RGB", (60, 40), (value,) * 3) for value in (230, 20))
    return [{"image": image, "answer": answer} for image, answer in ((bright, "yes"), (dark, "no"))] * (count // 2)


def test_trainer_reduces_the_loss_and_saves_a_loadable_folder(processor, tmp_path):
    def collate(rows):
        """Two questions about each image, packed; test_peft.py trains plain batches."""
        images, text = [row["image"] for row in rows], [["Is it day?", "Is it night?"]] * len(rows)
        suffix = [[row["answer"], "no" if row["answer"] == "yes" else "yes"] for row in rows]
        return processor(images=images, text=text, suffix=suffix, packed=True, return_tensors="pt")

    options = {"max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "weight_decay": 0.1}
    options |= {"gradient_checkpointing": True, "save_strategy": "steps", "save_steps": 12, "logging_steps": 1}
    options |= {"report_to": "none", "use_cpu": True, "remove_unused_columns": False}  # the collator reads the images
    arguments = TrainingArguments(str(tmp_path), **options)
    trainer = Trainer(tiny_model(), arguments, collate, frames(), processing_class=processor)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[11] < 0.5 * losses[0]
    folder = tmp_path / "checkpoint-12"
    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    loaded = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    inputs = loaded(images=[frames()[0]["image"]], text=[["Is it day?"]], packed=True, return_tensors="pt")
    torch.testing.assert_close(model.score_yes_no(**inputs), trainer.model.eval().score_yes_no(**inputs))

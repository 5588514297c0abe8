"""How many functions of ours one question passes: what is called twice, or for nothing, shows here first."""

import os
import sys

import torch
from transformers import pipeline

from tiny import ROOT


LIMIT = 50  # functions of ours, without the tower, attention, layers and reading a question for the first time
LAYERS = ("vision_traffic_vlm.py", "locating_traffic_vlm.py", "attention_traffic_vlm.py")
INSIDE = ("token_grid", "TrafficVLMDecoderLayer.", "TrafficVLMMLP.", "FastForward.")


def functions_of(call) -> set[str]:
    """Names "file:function" of our functions that a call passes; comprehensions and lambdas are not counted."""
    seen = set()

    def record(frame, event, argument):
        name, file = frame.f_code.co_qualname, os.path.basename(frame.f_code.co_filename)
        is_ours = file.endswith("_traffic_vlm.py") and file not in LAYERS and not name.startswith(INSIDE)
        if event == "call" and is_ours and not name.endswith(">"):
            seen.add(f"{file}:{name}")

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def test_one_question_about_one_image_passes_few_functions():
    vqa = pipeline("visual-question-answering", model=str(ROOT), dtype=torch.float32, device="cpu")
    image = str(ROOT / "docs" / "crossing.jpg")
    vqa(image, "Is there a pedestrian?")  # packs weights for the CPU, and reads the question, which is kept
    found = functions_of(lambda: vqa(image, "Is there a pedestrian?"))
    assert "modeling_traffic_vlm.py:TrafficVLMTextModel.decode" in found
    assert len(found) <= LIMIT, sorted(found)

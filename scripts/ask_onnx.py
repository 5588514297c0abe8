"""Answer yes/no questions about an image without torch: pip install onnxruntime tokenizers pillow.

python scripts/export.py --output_dir runs/onnx
python scripts/ask_onnx.py runs/onnx docs/example.jpg "Is there a bus?" "Is it raining?"
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps
from tokenizers import Tokenizer


if len(sys.argv) < 4:
    sys.exit(__doc__)
folder, picture, questions = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
about = json.loads((folder / "export.json").read_text())
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))


def run(name: str, **inputs: np.ndarray) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(folder / f"{name}.onnx").run(None, inputs)


image = ImageOps.exif_transpose(Image.open(picture)).convert("RGBA")
image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
pixels = np.asarray(image.resize(about["image_size"][::-1], about["resample"]), np.float32)
pixels = (pixels * about["rescale_factor"] - about["mean"]) / about["std"]  # [H,W,3]
keys, values = run("vision", pixel_values=pixels.transpose(2, 0, 1)[None].astype(np.float32))

# All questions are packed in one row, each with its own segment id and its own positions from 0.
prompts = [f"{' '.join(text.split()).rstrip(' .?!…。？！')} ?" for text in questions]  # as in training
rows = [[about["start"], *tokenizer.encode(text, add_special_tokens=False).ids] for text in prompts]
lengths = [len(row) for row in rows]
if max(lengths) > about["max_tokens"]:
    sys.exit(f"a question has {max(lengths)} tokens, at most {about['max_tokens']} are allowed")
packed = {
    "input_ids": np.concatenate(rows),
    "position_ids": np.concatenate([np.arange(length) for length in lengths]),
    "segment_ids": np.repeat(np.arange(len(rows)), lengths),
    "question_ends": np.cumsum(lengths) - 1,
}
inputs = {name: array[None].astype(np.int64) for name, array in packed.items()}
scores, _ = run("score", **inputs, image_keys=keys, image_values=values)
for question, row, p_yes in zip(questions, rows, scores[0]):
    note = "  (with unknown words)" if tokenizer.token_to_id("[UNK]") in row else ""
    print(f"{question}  {'yes' if p_yes >= 0.5 else 'no'}  {p_yes:.3f}{note}")

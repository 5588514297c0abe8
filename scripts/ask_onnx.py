"""Answer questions about an image like scripts/ask.py, without torch: pip install onnxruntime tokenizers pillow.

    python scripts/export.py --output_dir runs/onnx
    python scripts/ask_onnx.py runs/onnx docs/example.jpg "Is there a bus?" "What is ahead?"

The number after an answer is the probability of that answer, a "no" included; after words, the mean of the words.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer


# The package itself needs torch, these modules do not.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from export.greedy import generate
from images_traffic_vlm import to_rgb
from question_form_traffic_vlm import has_word, is_yes_no_question, question_words


def read(picture: str, about: dict[str, Any]) -> np.ndarray:
    """Pixels [1,3,H,W] of an image file, as the processor makes them."""
    if not Path(picture).is_file():
        raise ValueError(f"{picture}: no such image")
    image = to_rgb(picture).resize(about["image_size"][::-1], about["resample"])
    pixels = (np.asarray(image, np.float32) * about["rescale_factor"] - about["mean"]) / about["std"]  # [H,W,3]
    return pixels.transpose(2, 0, 1)[None].astype(np.float32)


def encode(question: str, tokenizer: Tokenizer, about: dict[str, Any]) -> list[int]:
    """The ids of a prompt, as in training: the start, the words, and one question mark."""
    text = question_words(question)
    words = tokenizer.encode(text, add_special_tokens=False)
    length, limit = len(words.ids) + 2, about["max_tokens"]
    if length >= limit:
        raise ValueError(f"A question of {length} tokens leaves no room for an answer: both have at most {limit}.")
    if not words.ids or not has_word(text):
        raise ValueError(f"The question {question!r} has no word.")
    if "[UNK]" in words.tokens and not any(token.isalnum() for token in words.tokens):
        raise ValueError(f"The model knows no word of the question {question!r}.")
    return [about["start"], *words.ids, tokenizer.token_to_id("?")]


def answer(folder: Path, picture: str, questions: list[str]) -> list[str]:
    """One line of text for each question.

    Raises:
        ValueError, OSError: the image, a question or the folder cannot be used.
    """
    if files := [word for word in questions if os.path.exists(word)]:
        raise ValueError(f"{files[0]}: is a file, and not a question; answers are about one image")
    about = json.loads((folder / "export.json").read_text())
    if "cache_shape" not in about:
        raise ValueError(f"{folder}: written by an earlier version: run scripts/export.py again")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # "[EOS]" in a question is an ordinary word
    rows = [encode(question, tokenizer, about) for question in questions]
    pixels = read(picture, about)
    vision, score, decode = (onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in about["graphs"])
    keys, values = vision.run(None, {"pixel_values": pixels})
    images = {"image_keys": keys, "image_values": values}

    # All questions are packed in one row, each with its own segment id and its own positions from 0.
    lengths = [len(row) for row in rows]
    packed = {
        "input_ids": np.concatenate(rows),
        "position_ids": np.concatenate([np.arange(length) for length in lengths]),
        "segment_ids": np.repeat(np.arange(len(rows)), lengths),
        "question_ends": np.cumsum(lengths) - 1,
    }
    [scores], [logits] = score.run(None, {name: ids[None].astype(np.int64) for name, ids in packed.items()} | images)
    logits[:, about["never"]] = -np.inf
    lines = []
    for question, row, p_yes, first in zip(questions, rows, scores.tolist(), logits.argmax(-1).tolist()):
        if first in about["yes_no"] and is_yes_no_question(question):
            text, probability = ("yes", p_yes) if p_yes >= 0.5 else ("no", 1 - p_yes)
        else:  # in words, which do not begin with yes or no
            [ids], [probability] = generate(
                decode,
                np.array([row]),
                images,
                (about["layers"], *about["cache_shape"]),
                min(about["max_new_tokens"], about["max_tokens"] - len(row)),
                about["end"],
                about["pad"],
                about["never"],
                about["yes_no"],
            )
            text = tokenizer.decode(ids.tolist())
            text = "none seen" if text == "none" else text
        note = "   (with unknown words)" if tokenizer.token_to_id("[UNK]") in row else ""
        lines.append(f"{question:<{max(map(len, questions))}}  {text}, {probability:.2f}{note}")
    return lines


def main() -> None:
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    folder, picture, *questions = sys.argv[1:]
    try:
        lines = answer(Path(folder), picture, questions)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    print(picture, *lines, sep="\n  ")


if __name__ == "__main__":
    main()

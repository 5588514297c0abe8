"""Answer questions about an image like scripts/ask.py, without torch: pip install onnxruntime tokenizers pillow.

    python scripts/export.py --output_dir runs/onnx
    python scripts/ask_onnx.py runs/onnx docs/example.jpg "Is there a bus?" "What is ahead?"
    python scripts/ask_onnx.py runs/onnx docs/example.jpg "Is there a bus?" --json

The number after an answer is the probability of that answer, a "no" included; after words, the mean of the words.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer


# The package itself needs torch, these modules do not.
package = ModuleType("traffic_vlm")
package.__path__ = [str(Path(__file__).resolve().parent.parent)]
sys.modules.setdefault("traffic_vlm", package)

from traffic_vlm.export.greedy import generate, mean_probabilities  # noqa: E402
from traffic_vlm.images_traffic_vlm import to_rgb  # noqa: E402
from traffic_vlm.question_form_traffic_vlm import words_at  # noqa: E402
from traffic_vlm.question_traffic_vlm import (  # noqa: E402
    Prompt,
    Question,
    answer_notes,
    answer_text,
    read_question,
    yes_or_no,
)


def read_image(picture: str, about: dict[str, Any]) -> np.ndarray:
    """Pixels [1,3,H,W] of an image file, as the processor makes them."""
    if not Path(picture).is_file():
        raise ValueError(f"{picture}: no such image")
    image = to_rgb(picture).resize(about["image_size"][::-1], about["resample"])
    pixels = (np.asarray(image, np.float32) * about["rescale_factor"] - about["mean"]) / about["std"]  # [H,W,3]
    return pixels.transpose(2, 0, 1)[None].astype(np.float32)


def tokenize(text: str, tokenizer: Tokenizer, about: dict[str, Any]) -> Prompt:
    """The prompt of the words of a question, as the processor makes it."""
    words = tokenizer.encode(text, add_special_tokens=False)
    unknown: dict[str, str] = {}
    for word in words_at(text, (span for token, span in zip(words.tokens, words.offsets) if token == "[UNK]")):
        unknown.setdefault(word.casefold(), word)
    untaught = [token for token in dict.fromkeys(words.tokens) if token in about["untaught"]]
    ids = [about["start"], *words.ids, tokenizer.token_to_id("?")]
    return Prompt(ids, ["[SOS]", *words.tokens, "?"], list(unknown.values()), untaught)


def score(session: Any, questions: list[Question], images: dict[str, np.ndarray]) -> list[float]:
    """P(yes) of each question, from one packed row: each has its own segment id, and positions from 0."""
    lengths = [len(question.input_ids) for question in questions]
    packed = {
        "input_ids": np.concatenate([question.input_ids for question in questions]),
        "position_ids": np.concatenate([np.arange(length) for length in lengths]),
        "segment_ids": np.repeat(np.arange(len(questions)), lengths),
        "question_ends": np.cumsum(lengths) - 1,
    }
    inputs = {name: ids[None].astype(np.int64) for name, ids in packed.items()}
    return session.run(["p_yes"], inputs | images)[0][0].tolist()


def answer_in_words(
    session: Any, question: Question, images: dict[str, np.ndarray], tokenizer: Tokenizer, about: dict[str, Any]
) -> dict[str, Any]:
    """What the generated answer adds to the item of a question."""
    vocabulary, hidden = tokenizer.get_vocab(), {*about["yes_no"], *about["never"]}
    words_only = [token for token in vocabulary.values() if token not in hidden]

    def find_next(row: int, tokens: list[int]) -> list[int]:
        words = question.next_words([tokenizer.id_to_token(token) for token in tokens])
        if words is not None:
            return [vocabulary[word] for word in words if word in vocabulary]
        return list(vocabulary.values()) if tokens and question.kind is None else words_only

    tokens, logits = generate(
        session,
        np.array([question.input_ids]),
        images,
        (about["layers"], *about["cache_shape"]),
        min(about["max_new_tokens"], about["max_tokens"] - len(question.input_ids)),
        about["end"],
        about["pad"],
        about["never"],
        find_next,
    )
    [probability] = mean_probabilities(tokens, logits, about["pad"]).tolist()
    return question.answer_in_words(tokenizer.decode(tokens[0].tolist()), probability)


def ask(folder: Path, picture: str, texts: list[str]) -> list[dict[str, Any]]:
    """An item for each question, as the pipeline returns it.

    Raises:
        ValueError, OSError: the image or the folder cannot be used.
    """
    if files := [word for word in texts if os.path.exists(word)]:
        raise ValueError(f"{files[0]}: is a file, and not a question; answers are about one image")
    about = json.loads((folder / "export.json").read_text())
    if "untaught" not in about:
        raise ValueError(f"{folder}: written by an earlier version: run scripts/export.py again")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # "[EOS]" in a question is an ordinary word
    read = partial(tokenize, tokenizer=tokenizer, about=about)
    questions = [read_question(text, read, about["max_tokens"], about["own_questions"]) for text in texts]
    pixels = read_image(picture, about)
    vision, scorer, decoder = (onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in about["graphs"])
    images = dict(zip(("image_keys", "image_values"), vision.run(None, {"pixel_values": pixels})))
    yes_no = [question for question in questions if question.form.is_yes_no and not question.problem]
    p_yes = iter(score(scorer, yes_no, images) if yes_no else [])
    items = []
    for question in questions:
        if question.problem:
            items.append(question.answer(problem=question.problem))
        elif question.form.is_yes_no:
            items.append(question.answer(**yes_or_no(question.form, next(p_yes))))
        else:
            items.append(question.answer(**answer_in_words(decoder, question, images, tokenizer, about)))
    return items


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder that scripts/export.py wrote")
    parser.add_argument("image", help="image file")
    parser.add_argument("questions", nargs="+", metavar="question", help="questions in quotes")
    parser.add_argument("--json", action="store_true", help="print a line of JSON, as ask.py --json does")
    options = parser.parse_args()
    try:
        items = ask(options.folder, options.image, options.questions)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"image": options.image, "answers": items}))
    else:
        print(options.image)
        width = max(map(len, options.questions))
        for item in items:
            notes = "".join(f"   ({note})" for note in answer_notes(item))
            print(f"  {item['question']:<{width}}  {answer_text(item)}{notes}")
    return int(any("problem" in item for item in items))


if __name__ == "__main__":
    sys.exit(main())

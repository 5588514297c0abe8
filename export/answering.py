"""Answers from exported graphs without torch: ONNX Runtime, tokenizers, NumPy and Pillow."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

from ..images_traffic_vlm import to_rgb
from ..question_form_traffic_vlm import word_at
from ..question_traffic_vlm import Prompt, Question, read_question, yes_or_no
from .greedy import generate, mean_probabilities


class ExportedPipeline:
    """Answers as `TrafficVLMPipeline` does, with the graphs that `scripts/export.py` wrote.

    Args:
        folder: folder of the graphs.
        int8: use the graphs with int8 weights.

    Raises:
        ValueError: graphs are missing, or an earlier version wrote them.
        OSError: the folder cannot be read.
    """

    def __init__(self, folder: Path, int8: bool = False):
        self.about = json.loads((folder / "export.json").read_text())
        if "answer_untaught" not in self.about:
            raise ValueError(f"{folder}: written by an earlier version: run scripts/export.py again")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.encode_special_tokens = True  # "[EOS]" in a question is an ordinary word
        paths = [folder / f"{name}{'_int8' * int8}.onnx" for name in self.about["graphs"]]
        if missing := [path for path in paths if not path.is_file()]:
            formats = "onnx int8" if int8 else "onnx"
            raise ValueError(f"{missing[0]} does not exist: run scripts/export.py with --format {formats}")
        self.vision, self.scorer, self.decoder = map(onnxruntime.InferenceSession, paths)

    def __call__(self, picture: str, texts: list[str]) -> list[dict[str, Any]]:
        """An item for each question about an image file, as `TrafficVLMPipeline` returns it.

        Raises:
            ValueError: there is no such image, or a question is the path of a file.
        """
        if files := [word for word in texts if os.path.exists(word)]:
            raise ValueError(f"{files[0]}: is a file, and not a question; answers are about one image")
        questions = [self.read(text) for text in texts]
        images = self.encode(picture)
        yes_no = [question for question in questions if question.form.is_yes_no and not question.problem]
        p_yes = iter(self.score(yes_no, images) if yes_no else [])
        items = []
        for question in questions:
            if question.problem:
                items.append(question.answer(problem=question.problem))
            elif question.form.is_yes_no:
                items.append(question.answer(**yes_or_no(question.form, next(p_yes))))
            else:
                items.append(question.answer(**self.answer_in_words(question, images)))
        return items

    def read(self, text: str) -> Question:
        """A question, checked and tokenized."""
        about = self.about
        question = read_question(text, self.tokenize, about["max_tokens"], about["taught"], about["own_questions"])
        return question.checked(about["answer_untaught"])

    def tokenize(self, text: str) -> Prompt:
        """The prompt of the words of a question, as the processor makes it."""
        words = self.tokenizer.encode(text, add_special_tokens=False)
        ids = [self.about["start"], *words.ids, self.tokenizer.token_to_id("?")]
        return Prompt(ids, ["[SOS]", *words.tokens, "?"], [word_at(text, *span) for span in words.offsets])

    def encode(self, picture: str) -> dict[str, np.ndarray]:
        """Cross-attention keys and values [layers,1,K,P,D] of an image file, resized as the processor does."""
        if not Path(picture).is_file():
            raise ValueError(f"{picture}: no such image")
        about = self.about
        image = to_rgb(picture).resize(about["image_size"][::-1], about["resample"])
        pixels = (np.asarray(image, np.float32) * about["rescale_factor"] - about["mean"]) / about["std"]  # [H,W,3]
        outputs = self.vision.run(None, {"pixel_values": pixels.transpose(2, 0, 1)[None].astype(np.float32)})
        return dict(zip(("image_keys", "image_values"), outputs))

    def score(self, questions: list[Question], images: dict[str, np.ndarray]) -> list[float]:
        """P(yes) of each question, from one packed row: each has its own segment id, and positions from 0."""
        lengths = [len(question.input_ids) for question in questions]
        packed = {
            "input_ids": np.concatenate([question.input_ids for question in questions]),
            "position_ids": np.concatenate([np.arange(length) for length in lengths]),
            "segment_ids": np.repeat(np.arange(len(questions)), lengths),
            "question_ends": np.cumsum(lengths) - 1,
        }
        inputs = {name: ids[None].astype(np.int64) for name, ids in packed.items()}
        return self.scorer.run(["p_yes"], inputs | images)[0][0].tolist()

    def answer_in_words(self, question: Question, images: dict[str, np.ndarray]) -> dict[str, Any]:
        """What the generated answer adds to the item of a question."""
        about, tokenizer = self.about, self.tokenizer
        vocabulary, no_first = tokenizer.get_vocab(), {*about["yes_no"], *about["never"]}

        def find_next(row: int, tokens: list[int]) -> list[int]:
            return question.next_ids([str(tokenizer.id_to_token(token)) for token in tokens], vocabulary, no_first)

        tokens, logits = generate(
            self.decoder,
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

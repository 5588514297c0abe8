"""Builds the tokenizer's files from the word list, and measures how much of a question list it knows.

    python scripts/build_tokenizer.py                                      # tokenizer.json, tokenizer_config.json
    python scripts/build_tokenizer.py --questions tests/data/questions.txt # and print what it knows of these questions

A question list holds one question a line; where a line has tabs, the question is its last column.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from traffic_vlm.tokenization_traffic_vlm import ANSWER_TOKENS, SPECIAL_TOKENS, TrafficVLMTokenizer


ROOT = Path(__file__).resolve().parent.parent
FILES = ("tokenizer.json", "tokenizer_config.json")
VOCAB_SIZE = 500


@dataclass
class Options:
    vocabulary: Path = field(
        default=Path(__file__).resolve().parent / "vocabulary.txt", metadata={"help": "The word list."}
    )
    folder: Path = field(default=ROOT, metadata={"help": "The folder to write the two JSON files into."})
    questions: Path | None = field(default=None, metadata={"help": "A question list to measure the coverage on."})


@dataclass
class Coverage:
    """How much of some questions is in the vocabulary; punctuation is not counted."""

    words: int
    known_words: int
    questions: int
    known_questions: int
    unknown: Counter[str]

    @property
    def word_share(self) -> float:
        return self.known_words / max(self.words, 1)

    @property
    def question_share(self) -> float:
        """The share of the questions in which every word is known."""
        return self.known_questions / max(self.questions, 1)

    def __str__(self) -> str:
        lines = [
            f"{self.words} words, known: {self.word_share:.2%}",
            f"{self.questions} questions, entirely known: {self.question_share:.2%}",
        ]
        if self.unknown:
            lines.append("unknown: " + ", ".join(f"{word} ({n})" for word, n in self.unknown.most_common(30)))
        return "\n".join(lines)


def read_vocabulary(path: Path) -> dict[str, int]:
    """The word list as word -> id.

    Raises:
        ValueError: naming the words, where one stands twice, the number is not 500, or the first six are others.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    words = [word for line in lines if not line.startswith("# ") for word in line.split()]
    repeated = [word for word, n in Counter(words).items() if n > 1]
    if repeated:
        raise ValueError(f"{path.name} has words that stand more than once: {repeated}")
    if len(words) != VOCAB_SIZE:
        raise ValueError(f"{path.name} must have {VOCAB_SIZE} words, it has {len(words)}")
    first = SPECIAL_TOKENS + ANSWER_TOKENS
    if words[: len(first)] != first:
        raise ValueError(f"{path.name} must begin with {first}, it begins with {words[: len(first)]}")
    return {word: i for i, word in enumerate(words)}


def unreachable_words(tokenizer: TrafficVLMTokenizer) -> list[str]:
    """Words of the vocabulary that no text can produce, because the normaliser rewrites them or they are split."""
    words = [word for word in tokenizer.get_vocab() if word not in SPECIAL_TOKENS + ANSWER_TOKENS]
    # "'s" exists only behind a word.
    texts = ["car" + word if word.startswith("'") else word for word in words]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    found = [tokenizer.convert_ids_to_tokens(row) for row in ids]
    expected = [["car", word] if word.startswith("'") else [word] for word in words]
    return [word for word, tokens, wanted in zip(words, found, expected) if tokens != wanted]


def make_tokenizer(vocabulary: Path) -> TrafficVLMTokenizer:
    """The tokenizer of a word list.

    Raises:
        ValueError: where the list is wrong, see `read_vocabulary`, or has words that no text can produce.
    """
    tokenizer = TrafficVLMTokenizer(read_vocabulary(vocabulary))
    unreachable = unreachable_words(tokenizer)
    if unreachable:
        raise ValueError(f"{vocabulary.name} has words that the normaliser rewrites or splits: {unreachable}")
    return tokenizer


def build(vocabulary: Path, folder: Path) -> list[Path]:
    """Write the tokenizer's files into the folder and return their paths. They appear whole or not at all."""
    tokenizer = make_tokenizer(vocabulary)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".tokenizer-") as saved:
        tokenizer.save_pretrained(saved)
        return [(Path(saved) / name).replace(folder / name) for name in FILES]


def read_questions(path: Path) -> list[str]:
    """The questions of a list: a line each, the last of its columns where it has tabs."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[-1] for line in lines if line.strip()]


def measure_coverage(tokenizer: TrafficVLMTokenizer, questions: Iterable[str]) -> Coverage:
    """Count the words and the questions that the tokenizer knows."""
    coverage = Coverage(0, 0, 0, 0, Counter())
    for question in questions:
        tokens = tokenizer.tokenize(question, split_special_tokens=True)
        words = [token for token in tokens if token == tokenizer.unk_token or re.search(r"\w", token)]
        known = sum(token != tokenizer.unk_token for token in words)
        coverage.words += len(words)
        coverage.known_words += known
        coverage.questions += 1
        coverage.known_questions += known == len(words)
        coverage.unknown.update(word.lower() for word in tokenizer.unknown_words(question))
    return coverage


def main() -> None:
    options = Options(**vars(HfArgumentParser(Options).parse_args()))
    for path in build(options.vocabulary, options.folder):
        print(path)
    if options.questions is not None:
        print(measure_coverage(make_tokenizer(options.vocabulary), read_questions(options.questions)))


if __name__ == "__main__":
    main()

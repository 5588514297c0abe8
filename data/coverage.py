"""How many words of a list of questions are known."""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ..question_traffic_vlm import is_content_word
from ..tokenization_traffic_vlm import TrafficVLMTokenizer


@dataclass
class Coverage:
    """Counts of words (not of punctuation) and of whole questions, and the unknown words."""

    words: int = 0
    known_words: int = 0
    questions: int = 0
    known_questions: int = 0
    unknown: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [
            f"{self.words} words, known: {self.known_words / max(self.words, 1):.2%}",
            f"{self.questions} questions, all words known: {self.known_questions / max(self.questions, 1):.2%}",
        ]
        if self.unknown:
            lines.append("unknown: " + ", ".join(f"{word} ({count})" for word, count in self.unknown.most_common(30)))
        return "\n".join(lines)


def read_questions(path: Path) -> list[str]:
    """The questions of a file: one per line, in the last column if there are tabs."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.split("\t")[-1] for line in lines if line.strip()]


def measure_coverage(tokenizer: TrafficVLMTokenizer, questions: Iterable[str], known: Collection[str]) -> Coverage:
    """The coverage of questions by known words of the vocabulary. Its function words count as known."""
    coverage = Coverage()
    for question in questions:
        tokens = tokenizer.tokenize(question, split_special_tokens=True)
        words = [token for token in tokens if token == tokenizer.unk_token or re.search(r"\w", token)]
        in_vocabulary = [word for word in words if word != tokenizer.unk_token]
        unknown = [word for word in in_vocabulary if word not in known and is_content_word(word)]
        known_words = len(in_vocabulary) - len(unknown)
        coverage.words += len(words)
        coverage.known_words += known_words
        coverage.questions += 1
        coverage.known_questions += known_words == len(words)
        coverage.unknown.update([*unknown, *map(str.lower, tokenizer.unknown_words(question))])
    return coverage

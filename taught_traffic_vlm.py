"""Which words of the vocabulary a model was taught: `taught_words.json`, saved and loaded with the processor.

Training counts the questions and images in which each word stood, and their answers. Evaluation measures whether
questions with the word are answered better than without seeing the image. A content word is

    taught      if it stood in at least 200 questions about at least 50 images, with different answers, and development
                questions that hold it are answered better than blind by two standard errors;
    unreliable  if it was counted as often, but was not shown to be better than blind;
    untaught    else.

Function words, numbers and punctuation are not judged.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


TAUGHT_FILE = "taught_words.json"
MIN_QUESTIONS, MIN_IMAGES = 200, 50
STANDARD_ERRORS = 2.0
COUNTS = ("questions", "synthetic", "images", "yes", "no", "words")
MEASURES = ("gain", "error")
FUNCTION_WORDS = frozenset(
    """
    a an the this that those it its they them their there here i me my we us you your
    is are was were be been am do does did doing has have can could will would should must may need
    and or not if than because while like of to in on at for with without by from into out off up down over under
    through across along against around about as before after toward past between
    all any each both another other same different very still just now too
    what which who where when why how many much most more fewer less least number none count please describe list
    answer select following options correct predict consider based mean b c d u s
    see look visible seen appear appears show showing scene status image video type types located location
    one first second third normal possible important main current likely able involved
    """.split()
)


def is_content_word(word: str) -> bool:
    """Whether a word of the vocabulary is judged: not a function word, number, punctuation or special token."""
    return word.isalpha() and word not in FUNCTION_WORDS


class TaughtWords:
    """Counts and measures of each word.

    Args:
        words: {word: {"questions", "synthetic", "images", "yes", "no", "words": counts, "gain", "error": measures}}.
            "synthetic": questions about rendered images; "images": different images, counted up to 50; "words":
            answers that are neither yes nor no; "gain": accuracy of development questions with the word minus that of
            the same questions about the mean image, with its standard error "error". Missing entries are 0 or unknown.

    Raises:
        ValueError: a name or value is not as described.
    """

    def __init__(self, words: Mapping[str, Mapping[str, float]]):
        for word, entry in words.items():
            for name, value in entry.items():
                is_count = name in COUNTS and isinstance(value, int) and value >= 0
                is_measure = name in MEASURES and isinstance(value, int | float)
                if not (is_count or is_measure):
                    raise ValueError(f"{word!r}: {name} = {value!r}; expected counts {COUNTS} or {MEASURES}")
        self.words = {word: dict(entry) for word, entry in words.items()}

    @classmethod
    def load(cls, path: str | Path, vocabulary: Iterable[str]) -> "TaughtWords":
        """Read a file.

        Raises:
            ValueError: it cannot be read, or counts words that are not in the vocabulary; the message names them.
        """
        try:
            found = cls(json.loads(Path(path).read_text(encoding="utf-8"))["words"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a file of taught words: {error!r}") from error
        if other := sorted(found.words.keys() - set(vocabulary)):
            raise ValueError(f"{path} counts words that are not in the vocabulary: {', '.join(other[:10])}")
        return found

    def to_json(self) -> str:
        rows = (f"  {json.dumps(word)}: {json.dumps(entry)}" for word, entry in sorted(self.words.items()))
        return '{"words": {\n' + ",\n".join(rows) + "\n}}\n"

    def with_gains(self, gains: Mapping[str, Mapping[str, float]]) -> "TaughtWords":
        """The same counts with measures of an evaluation, {word: {"gain", "error"}}; words without keep theirs."""
        return TaughtWords({word: {**entry, **gains.get(word, {})} for word, entry in self.words.items()})

    def status(self, word: str) -> str:
        """ "taught", "unreliable" or "untaught"; "taught" for words that are not judged."""
        if not is_content_word(word):
            return "taught"
        entry: Mapping[str, Any] = self.words.get(word, {})
        is_counted = entry.get("questions", 0) >= MIN_QUESTIONS and entry.get("images", 0) >= MIN_IMAGES
        if not is_counted or not ((entry.get("yes") and entry.get("no")) or entry.get("words")):
            return "untaught"
        is_better = entry.get("gain", 0.0) > STANDARD_ERRORS * entry.get("error", 0.0)
        return "taught" if is_better else "unreliable"

    def is_taught(self, word: str) -> bool:
        return self.status(word) == "taught"

    def is_real(self, word: str) -> bool:
        """Whether the word stood in enough questions about real images."""
        entry = self.words.get(word, {})
        return entry.get("questions", 0) - entry.get("synthetic", 0) >= MIN_QUESTIONS

"""Count the words of training questions, for `taught_words.json`."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..files import atomic_write_text
from ..processing_traffic_vlm import IGNORED_LABEL
from ..taught_traffic_vlm import COUNTS, MIN_IMAGES, TaughtWords


COUNTS_FILE = "word_counts.json"  # in each checkpoint


class WordCounter:
    """Counts of the words of questions, by token id. With several processes, those of the first process.

    Images are counted up to 50 in each training; further training adds its own count, also of the same images.

    Args:
        tokenizer: names the ids.
        base: counts of the weights that training starts from; they are continued.
    """

    def __init__(self, tokenizer: Any, base: TaughtWords | None = None):
        self.tokenizer = tokenizer
        self.base = {} if base is None else base.words
        self.counts: defaultdict[int, dict[str, int]] = defaultdict(
            lambda: {"questions": 0, "synthetic": 0, "yes": 0, "no": 0, "words": 0}
        )
        self.images: defaultdict[int, set[int]] = defaultdict(set)
        yes, no = tokenizer.convert_tokens_to_ids(["[YES]", "[NO]"])
        self.kind_of_answer = {yes: "yes", no: "no"}

    def add(self, batch: dict[str, torch.Tensor]) -> None:
        """Count the questions of a packed batch, which also has `image_keys` and `is_synthetic`, both [I]."""
        names = ("input_ids", "labels", "segment_ids", "image_index")
        columns = zip(*(batch[name].tolist() for name in names))
        keys, synthetic = batch["image_keys"].tolist(), batch["is_synthetic"].tolist()
        for ids, labels, segments, image in columns:
            words: defaultdict[int, set[int]] = defaultdict(set)
            answers: dict[int, int] = {}
            for token, label, segment in zip(ids, labels, segments):
                if segment and label == IGNORED_LABEL:
                    words[segment].add(token)
                elif segment:
                    answers.setdefault(segment, label)
            for segment, answer in answers.items():
                kind = self.kind_of_answer.get(answer, "words")
                for token in words[segment]:
                    entry = self.counts[token]
                    entry["questions"] += 1
                    entry["synthetic"] += synthetic[image]
                    entry[kind] += 1
                    if len(self.images[token]) < MIN_IMAGES:
                        self.images[token].add(keys[image])

    def taught_words(self) -> TaughtWords:
        """The counts so far, added to those of the base; measures of the base are dropped: the weights changed."""
        found: dict[str, dict[str, int]] = {}
        for word, known in self.base.items():
            found[word] = {name: int(value) for name, value in known.items() if name in COUNTS}
        for token, counted in self.counts.items():
            entry = found.setdefault(self.tokenizer.convert_ids_to_tokens(token), {})
            for name, number in counted.items():
                entry[name] = entry.get(name, 0) + number
            entry["images"] = min(MIN_IMAGES, entry.get("images", 0) + len(self.images[token]))
        return TaughtWords(found)

    def save(self, path: Path) -> None:
        state = {"counts": self.counts, "images": {token: sorted(keys) for token, keys in self.images.items()}}
        atomic_write_text(path, json.dumps(state))

    def load(self, path: Path) -> None:
        """Continue the counts of a checkpoint; without its file, as after a kill while it was written, say so."""
        if not path.is_file():
            print(f"{path} does not exist: the questions before this checkpoint are missing in the counts of words")
            return
        state = json.loads(path.read_text(encoding="utf-8"))
        self.counts.update({int(token): entry for token, entry in state["counts"].items()})
        self.images.update({int(token): set(keys) for token, keys in state["images"].items()})


class SaveWordCounts(TrainerCallback):
    """Write the counts into each checkpoint, so that a resumed run continues them."""

    def __init__(self, counter: WordCounter):
        self.counter = counter

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.counter.save(Path(args.output_dir) / f"checkpoint-{state.global_step}" / COUNTS_FILE)

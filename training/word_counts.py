"""In how many questions of a training each word of the vocabulary stood, and what they were answered.

packed batch → `word_counts` [V,2,3], in the collator → sum, in `WordCounts` → the words that were asked often
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from ..files import atomic_write_text
from ..processing_traffic_vlm import IGNORED_LABEL, TAUGHT_ON
from ..tokenization_traffic_vlm import TrafficVLMTokenizer, is_content_word


COUNTS_FILE = "word_counts.json"  # in each checkpoint
MIN_QUESTIONS = 200  # with a word, for it to be asked often


def word_counts(
    batch: dict[str, torch.Tensor], is_rendered: torch.Tensor, tokenizer: TrafficVLMTokenizer
) -> np.ndarray:
    """Numbers [V,2,3] of the questions of a packed batch in which each token stands.

    They are about photographs or rendered scenes, and answered yes, no or in words. Questions without labels are left
    out, and a token that stands twice in a question counts once.

    Args:
        batch: input_ids, labels, segment_ids [R,L], question_ends [R,Q], image_index [R].
        is_rendered: bool [I].
    """
    ids, labels, segments, ends = (batch[name] for name in ("input_ids", "labels", "segment_ids", "question_ends"))
    yes, no = tokenizer.convert_tokens_to_ids(["[YES]", "[NO]"])
    first = labels.gather(1, (ends + 1).clamp(0, labels.shape[1] - 1))  # of each answer, [R,Q]
    kinds = torch.where(first == yes, 0, torch.where(first == no, 1, 2))
    rows, columns = ((segments > 0) & (labels == IGNORED_LABEL)).nonzero(as_tuple=True)
    stands = torch.stack([rows, segments[rows, columns] - 1, ids[rows, columns]]).unique(dim=1)
    rows, questions, tokens = stands[:, first[stands[0], stands[1]] != IGNORED_LABEL]
    counts = torch.zeros(len(tokenizer), 2, 3, dtype=torch.long)
    rendered = is_rendered.long()[batch["image_index"][rows]]
    return counts.index_put_((tokens, rendered, kinds[rows, questions]), torch.tensor(1), accumulate=True).numpy()


class WordCounts(TrainerCallback):
    """The sum of the counts of all batches, saved in each checkpoint, so that a resumed run continues it.

    With several processes, those of the first process.
    """

    def __init__(self, vocabulary_size: int):
        self.counts = np.zeros((vocabulary_size, 2, 3), np.int64)

    def asked_often(self, tokenizer: TrafficVLMTokenizer) -> dict[str, str]:
        """The content words that stood in at least 200 questions with different answers: yes and no, or words.

        Returns:
            {word: "photographs" or, if fewer than 200 of these questions were about photographs, "rendered"}.
        """
        found, counts = {}, self.counts.tolist()
        for word, token in tokenizer.get_vocab().items():
            photographs, rendered = counts[token]
            yes, no, in_words = map(sum, zip(photographs, rendered))
            if is_content_word(word) and yes + no + in_words >= MIN_QUESTIONS and ((yes and no) or in_words):
                found[word] = TAUGHT_ON[0 if sum(photographs) >= MIN_QUESTIONS else 1]
        return found

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}" / COUNTS_FILE
            atomic_write_text(path, json.dumps(self.counts.tolist()))

    def load(self, checkpoint: Path) -> None:
        """Continue the counts of a checkpoint; without its file, as after a kill while it was written, say so."""
        path = checkpoint / COUNTS_FILE
        if path.is_file():
            self.counts = np.array(json.loads(path.read_text()))
        else:
            print(f"{path} does not exist: the questions before this checkpoint are missing in the counts of words")

"""How a question is answered, for serving and evaluation alike: its own words and the first word of the answer decide.

packed questions → logits [V] after each ─┬─ [YES] or [NO] to a yes/no question: the answer, with P(yes)
                                          └─ otherwise: generate the answer, which does not begin with yes or no

`is_yes_no_question` reads the words of a question: "How busy is it?" gets no yes, even if the model prefers it because
it was never taught such questions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from .generation_traffic_vlm import MAX_NEW_TOKENS, suppressed_tokens
from .question_form_traffic_vlm import is_yes_no_question


@dataclass(frozen=True, slots=True)
class FirstWord:
    """What the model answers first.

    Attributes:
        is_yes_no: whether the most likely word is yes or no, and the question asks for one of them.
        yes_probability: calibrated P(yes), relative to no, whatever the answer is.
        logit_margin: l_yes - l_no, without temperature.
    """

    is_yes_no: bool
    yes_probability: float
    logit_margin: float

    @property
    def text(self) -> str:
        return "yes" if self.logit_margin >= 0 else "no"


def first_words(model: Any, processor: Any, encoded: Any, questions: Sequence[Sequence[str]]) -> list[list[FirstWord]]:
    """The first word of each answer, from one packed pass; `questions` has one list for each encoded image.

    Raises:
        FloatingPointError: a logit is NaN or infinite.
    """
    rows = [list(row) for row in questions]
    inputs = processor(text=rows, packed=True, on_unknown="ignore", return_tensors="pt").to(model.device)
    text_config = model.config.get_text_config()
    yes_no, hidden = (text_config.yes_token_id, text_config.no_token_id), suppressed_tokens(text_config)
    asked = [question for row in rows for question in row]
    # Of all images, [Q,V]: exported graphs return one tensor for each packed row, the model one for each image.
    logits = torch.cat(list(model.question_logits(**inputs, encoded_images=encoded)))
    margins = (logits[:, yes_no[0]].float() - logits[:, yes_no[1]].float()).tolist()
    for question, margin in zip(asked, margins):
        if not math.isfinite(margin):
            raise FloatingPointError(f"the model answers {question!r} with l_yes - l_no = {margin}")
    tokens = logits.index_fill(-1, torch.tensor(hidden, device=logits.device), -math.inf).argmax(-1).tolist()
    columns = zip(asked, tokens, model.yes_probability(logits).tolist(), margins)
    found = (FirstWord(token in yes_no and is_yes_no_question(text), p, margin) for text, token, p, margin in columns)
    return [list(islice(found, len(row))) for row in rows]


def generate_answers(
    model: Any, processor: Any, encoded: Any, asked: Sequence[tuple[int, str]], streamer: Any = None
) -> list[tuple[str, float | None]]:
    """Greedy answers to questions (image index, text) in words, each with its mean probability of a word.

    That is the geometric mean over its words and its end: the probability of a whole sentence is always near 0.
    No answer begins with yes or no. A question that leaves no room for an answer gets "". The probability is None if
    the model returns no logits.
    """
    inputs = processor(text=[question for _, question in asked], on_unknown="ignore", return_tensors="pt")
    lengths = inputs["attention_mask"].sum(-1).tolist()
    text_config = model.config.get_text_config()
    limit = text_config.max_position_embeddings  # of a question with its answer
    short = [i for i, length in enumerate(lengths) if length <= limit - MAX_NEW_TOKENS]
    # Each long question is alone: it leaves less room, and would cut the answers to the others.
    long = [[i] for i, length in enumerate(lengths) if limit - MAX_NEW_TOKENS < length < limit]
    answers: list[tuple[str, float | None]] = [("", None)] * len(asked)
    for chosen in [short, *long] if short else long:
        length = max(lengths[i] for i in chosen)
        output = model.generate(
            input_ids=inputs["input_ids"][chosen, -length:].to(model.device),  # padded on the left
            attention_mask=inputs["attention_mask"][chosen, -length:].to(model.device),
            encoded_images=encoded,
            image_index=torch.tensor([asked[i][0] for i in chosen], device=model.device),
            max_new_tokens=min(MAX_NEW_TOKENS, limit - length),
            begin_suppress_tokens=[text_config.yes_token_id, text_config.no_token_id],
            do_sample=False,
            num_beams=1,
            streamer=streamer,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[:, length:]  # [N,T]
        probabilities: list[float | None] = [None] * len(chosen)
        if output.logits is not None:
            log_p = torch.stack(output.logits, 1).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
            is_word = tokens != text_config.pad_token_id  # padding follows the end
            probabilities = (log_p.masked_fill(~is_word, 0.0).sum(-1) / is_word.sum(-1)).exp().tolist()
        texts = processor.batch_decode(tokens, skip_special_tokens=True)
        for i, text, probability in zip(chosen, texts, probabilities):
            answers[i] = text, probability
    return answers

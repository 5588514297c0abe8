"""Greedy generation with the exported `decode` graph, in NumPy alone: for programs without torch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def generate(
    decode: Any,
    ids: np.ndarray,
    images: Mapping[str, np.ndarray],
    cache_shape: tuple[int, int, int, int],
    max_new_tokens: int,
    end: int,
    pad: int,
    suppressed: Sequence[int],
    suppressed_first: Sequence[int] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Continue prompts of the same length.

    Args:
        decode: session of ONNX Runtime.
        ids: prompts [N,L] without padding.
        images: "image_keys" and "image_values" [layers,N,K,P,D], of the image of each prompt.
        cache_shape: number of layers, number of key-value heads, width of a key, and of a value.
        end, pad: token ids.
        suppressed: tokens that are never generated.
        suppressed_first: tokens that no answer begins with.

    Returns:
        the new tokens [N, max_new_tokens], padded after the end, and the geometric mean of the probabilities of the
        tokens of each answer [N].
    """
    layers, heads, *widths = cache_shape
    keys, values = (np.zeros((layers, len(ids), heads, 0, width), np.float32) for width in widths)
    answers, log_p = np.full((len(ids), max_new_tokens), pad), np.zeros(len(ids))
    unfinished = np.ones(len(ids), bool)
    for step in range(max_new_tokens):
        inputs = {"input_ids": ids, "past_keys": keys, "past_values": values, **images}
        logits, keys, values = decode.run(None, inputs)
        logits[:, pad] = -np.inf  # meaningless
        logits -= logits.max(-1, keepdims=True)
        log_total = np.log(np.exp(logits).sum(-1))
        logits[:, [*suppressed, *(suppressed_first if step == 0 else ())]] = -np.inf
        tokens = logits.argmax(-1)
        answers[unfinished, step] = tokens[unfinished]
        log_p[unfinished] += (logits.max(-1) - log_total)[unfinished]
        unfinished &= tokens != end
        if not unfinished.any():
            break
        ids = tokens[:, None]
    return answers, np.exp(log_p / (answers != pad).sum(1))

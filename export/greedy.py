"""Greedy generation with the exported `decode` graph, in NumPy alone: for programs without torch."""

from collections.abc import Callable, Mapping, Sequence
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
    find_next: Callable[[int, list[int]], Sequence[int]] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Continue prompts of the same length.

    Args:
        decode: session of ONNX Runtime.
        ids: prompts [N,L] without padding.
        images: "image_keys" and "image_values" [layers,N,K,P,D], of the image of each prompt.
        cache_shape: number of layers, number of key-value heads, width of a key, and of a value.
        end, pad: token ids.
        suppressed: tokens that are never generated.
        find_next: (row, its new tokens) → the tokens that can follow; without it, any token can.

    Returns:
        T new tokens [N,T], padded after the end, and their logits [N,T,V]; T is at most `max_new_tokens`.
    """
    layers, heads, *widths = cache_shape
    keys, values = (np.zeros((layers, len(ids), heads, 0, width), np.float32) for width in widths)
    tokens: list[np.ndarray] = []
    logits: list[np.ndarray] = []
    unfinished = np.ones(len(ids), bool)
    while len(tokens) < max_new_tokens and unfinished.any():
        inputs = {"input_ids": ids, "past_keys": keys, "past_values": values, **images}
        found, keys, values = decode.run(None, inputs)
        found[:, pad] = -np.inf  # the graph's value for it has no meaning
        logits.append(found.copy())
        found[:, suppressed] = -np.inf
        for row in range(len(ids)) if find_next else ():
            kept = find_next(row, [int(step[row]) for step in tokens])  # type: ignore[misc]
            found[row] = np.where(np.isin(np.arange(found.shape[1]), kept), found[row], -np.inf)
        tokens.append(np.where(unfinished, found.argmax(-1), pad))
        unfinished &= tokens[-1] != end
        ids = tokens[-1][:, None]
    return np.stack(tokens, 1), np.stack(logits, 1)


def mean_probabilities(tokens: np.ndarray, logits: np.ndarray, pad: int) -> np.ndarray:
    """The geometric mean [N] of the probabilities of each answer's tokens, from what `generate` returns."""
    peak = logits.max(-1, keepdims=True)
    total = (np.log(np.exp(logits - peak).sum(-1, keepdims=True)) + peak)[..., 0]
    log_p = np.take_along_axis(logits, tokens[..., None], -1)[..., 0] - total
    is_word = tokens != pad
    return np.exp(np.where(is_word, log_p, 0).sum(1) / is_word.sum(1))

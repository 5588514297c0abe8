"""Losses beside that of the answers, for training from few images.

    vision tokens [I,P,C] → linear → [I,P,T] ↔ cell targets: what does each cell show?
                                   → [I,T]   ↔ what is there at all?
    cross-attention of asked words [N,P] ↔ the cells of their objects: where should "car" look?
    states halfway through the decoder [N,C] → norm, lm_head ↔ what is there? "green", of "Is the light red?"
    log-odds of yes [N], of one wording ↔ of another

They only shape the model: the linear layer stays in its file for further training, where the model passes over it, and
all else is read beside the forward pass.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import SAFE_WEIGHTS_NAME

from ..data.scene import Scene
from ..data.targets import OBJECT_TARGETS, TARGETS, cell_targets


CELL_HEAD = "cell_head"  # name of the extra layer; the model passes over it where it loads weights


class CellHead(nn.Linear):
    """Reads vision tokens [I,P,C]: logits [I,P,T], one for each of TARGETS."""

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, len(TARGETS))
        nn.init.constant_(self.bias, -4.0)  # most cells hold few of the targets
        self.image_bias = nn.Parameter(torch.zeros(len(TARGETS)))

    def image_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [I,T] of "some cell holds it": a smooth maximum, so that one false cell is one false answer."""
        return logits.float().logsumexp(1) + self.image_bias


def add_cell_head(model: Any, name: str | None = None) -> None:
    """Give a full model the layer that reads its vision tokens cell by cell: a new one, or that of its weights.

    A new one knows nothing, and what a tower that is trained with it knows suffers until it does.

    Args:
        name: the folder, or the name on the Hub, that the model was loaded from.
    """
    head = CellHead(model.config.vision_config.hidden_size)
    if known := read_cell_head(name):
        if known["weight"].shape == head.weight.shape:
            head.load_state_dict(known)
        else:
            warnings.warn(
                f"the cell head of {name} knows {len(known['bias'])} targets, this code {len(TARGETS)}: "
                "a new one takes its place",
                stacklevel=2,
            )
    model.add_module(CELL_HEAD, head)


def read_cell_head(name: str | None) -> dict[str, torch.Tensor]:
    """Its tensors in the weights that were loaded from a folder or the Hub; none if they have none."""
    if name is None:
        return {}
    local = os.path.join(name, SAFE_WEIGHTS_NAME)
    path = local if os.path.isdir(name) else try_to_load_from_cache(name, SAFE_WEIGHTS_NAME)
    if not isinstance(path, str) or not os.path.isfile(path):
        return {}
    with safe_open(path, "pt") as file:
        names = [key for key in file.keys() if key.startswith(f"{CELL_HEAD}.")]  # noqa: SIM118
        return {key.removeprefix(f"{CELL_HEAD}."): file.get_tensor(key).float() for key in names}


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of each logit in float32; of unknown targets (-1) it means nothing."""
    known = targets.clamp(min=0).float()
    return nn.functional.binary_cross_entropy_with_logits(logits.float(), known, reduction="none")


def cell_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Focal loss (https://arxiv.org/abs/1708.02002) of logits [I,P,T] with targets of 1, 0 and -1 (unknown, ignored).

    Each target's sum is divided by the number of cells that hold it: rare targets count as much as common ones, and
    a false cell as much as a missed one. Facts of the whole image are left out: a batch in which one does not hold,
    in none of its thousands of cells, would outweigh all else. `image_loss` teaches them.
    """
    logits, targets = logits[..., : len(OBJECT_TARGETS)], targets[..., : len(OBJECT_TARGETS)]
    entropy = cross_entropy(logits, targets)
    focal = (1 - torch.exp(-entropy)) ** 2 * entropy * (targets >= 0)
    known = (targets >= 0).any(1).any(0)
    return (focal.sum((0, 1)) / (targets == 1).sum((0, 1)).clamp(min=1)).sum() / known.sum().clamp(min=1)


def image_targets(targets: torch.Tensor) -> torch.Tensor:
    """Targets [I,T] of images from those of their cells [I,P,T]: 1 if one holds it, 0 if all are known not to."""
    some, unknown = (targets == 1).any(1), (targets == -1).any(1)
    return torch.where(some, 1, torch.where(unknown, -1, 0))


def image_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of logits [I,T] with `image_targets`.

    Of each target the images that hold it and those that do not count the same, as in `balanced_accuracy`.
    """
    losses = cross_entropy(logits, targets)
    masks = torch.stack([targets == 1, targets == 0])  # [2,I,T]
    numbers = masks.sum(1)  # [2,T]
    means = (losses * masks).sum(1) / numbers.clamp(min=1)
    return means.sum() / (numbers > 0).sum().clamp(min=1)


def attention_loss(maps: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """Mean of -log(attention that falls on the object) of maps [N,P] that sum to 1 and cells [N,P] of 0 and 1."""
    if not len(maps):
        return maps.sum()
    return -(maps * cells).sum(-1).clamp(min=1e-6).log().mean()


def value_loss(model: Any, states: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the words [N] for what is there, by the states [N,C] of a layer and the model's own head.

    To answer "Is it raining?" a decoder has to see the weather and to compare it, and from a yes or no alone it learns
    neither before the other.
    """
    logits = model.compute_logits(model.get_decoder().norm(states)).float()  # in which `[PAD]` is not learned
    return nn.functional.cross_entropy(logits, values, reduction="sum") / max(1, len(values))


def wording_loss(log_odds: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """How far P(yes) of two wordings of a question are apart: KL divergence both ways, (p - q) (logit p - logit q).

    Of log-odds of yes [N] and the numbers [N] of their pairs, in which each stands twice; the mean over pairs.
    """
    ordered = log_odds[pairs.argsort()].float()
    one, other = ordered[0::2], ordered[1::2]
    return ((one.sigmoid() - other.sigmoid()) * (one - other)).sum() / max(1, len(one))


Words = tuple[torch.Tensor, torch.Tensor]  # rows [N] and columns [N] of tokens


class Recorded:
    """What a forward pass shows of itself: vision tokens, and what each cross-attention read."""

    def __init__(self) -> None:
        self.tokens: Any = None  # [I,P,C] after the pass
        self.halfway: Any = None  # states [B,L,C] after half of the decoder's layers
        self.read: list[tuple[Any, torch.Tensor, torch.Tensor]] = []  # module, states [B,L,C], keys [B,K,P,D]

    def mean_map(self, words: Words) -> torch.Tensor:
        """Where words look: attention [N,P] with gradients, the mean over heads and layers.

        Computed after the pass: within it, gradient checkpointing would have to compute it a second time.
        """
        rows, columns = words
        maps = []
        for module, hidden_states, key in self.read:
            query = module.q_proj(hidden_states[rows, columns]).unflatten(-1, (key.shape[1], -1, module.head_dim))
            scores = torch.einsum("nkgd,nkpd->nkgp", query, key[rows]).float() * module.scaling
            maps.append(scores.softmax(-1).mean((1, 2)))
        return torch.stack(maps).mean(0)


@contextmanager
def recording(model: Any, replace: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Iterator[Recorded]:
    """Record the vision tokens, and what cross-attention reads.

    `replace` gives the tokens [I,P,C] that the decoder reads in place of those of the tower.
    """
    recorded = Recorded()

    def keep_tokens(module: nn.Module, args: Any, output: Any) -> Any:
        recorded.tokens = output.last_hidden_state
        return None if replace is None else BaseModelOutput(last_hidden_state=replace(output.last_hidden_state))

    def keep_halfway(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        recorded.halfway = output

    def keep_read(module: Any, args: tuple[torch.Tensor, ...], output: Any) -> None:
        recorded.read.append((module, *args[:2]))

    layers = model.get_decoder().layers
    handles = [model.model.vision_tower.register_forward_hook(keep_tokens)]
    handles += [layers[(len(layers) - 1) // 2].register_forward_hook(keep_halfway)]
    handles += [layer.cross_attn.register_forward_hook(keep_read) for layer in layers]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def presence_accuracy(
    model: Any, processor: Any, rows: Sequence[dict[str, Any]], grid: tuple[int, int], batch_size: int = 16
) -> dict[str, float]:
    """`balanced_accuracy` of "is it there" by the cell head: the mean of the rates on yes and on no, over targets.

    Nothing where no target is there in five of the rows and missing in five others.
    """
    head = getattr(model, CELL_HEAD)
    counts = torch.zeros(4, len(TARGETS))  # right on 1, all 1, right on 0, all 0
    for start in range(0, len(rows), batch_size):
        some = [rows[number] for number in range(start, min(start + batch_size, len(rows)))]
        pixels = processor(images=[row["image"] for row in some], return_tensors="pt")["pixel_values"].to(model.device)
        tokens = model.model.vision_tower(pixels).last_hidden_state[:, -grid[0] * grid[1] :]
        yes = (head.image_logits(head(tokens)) > 0).cpu()
        cells = torch.stack([torch.from_numpy(cell_targets(Scene.from_json(row["scene"]), grid)) for row in some])
        targets = image_targets(cells)
        for index, value in ((0, 1), (2, 0)):
            mask = targets == value
            counts[index] += ((yes == value) & mask).sum(0)
            counts[index + 1] += mask.sum(0)
    rates = counts[0::2] / counts[1::2]
    both = (counts[1::2] >= 5).all(0)  # of fewer images a rate says nothing
    if not both.any():
        return {}
    return {"balanced_accuracy": float(rates[:, both].mean()), "targets": float(both.sum())}

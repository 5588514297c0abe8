"""Points and boxes of objects: a center head on the vision tower (CenterNet, https://arxiv.org/abs/1904.07850).

    patches [B,P,C] of the neck → norm → linear → enlarged twice ─┐
    finest feature map [B,40,H/8,W/8] → 1×1 ──────────────────────┴(+)→ 7×7 depthwise, MLP
        → heat [B,classes,H/8,W/8], how likely the center of an object of each class is in each cell
        → shape [B,4,H/8,W/8], log width and log height of its box, and the place of its center in the cell
    heat, shape and the middle feature map [B,112,H/16,W/16] → a token for each class [B,classes,C], for the decoder

What is special here:
- an object is one cell, the highest of its 3 × 3 neighbors, without anchors. A large object can have several: of
  boxes that overlap by half, the best stays;
- widths and heights are fractions of the image, so the same weights locate in images of any size;
- patches are read before they are pooled, so points are equally fine in large images.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn
from transformers import initialization as init


STRIDE = 8  # pixels per cell
MOST = 100  # objects of a class in an image
WIDTH = 128
FAINT = 0.05  # peaks below are not counted
MAX_OVERLAP = 0.5  # of two boxes of a class

Found = tuple[float, list[float], list[float]]  # score, box (left, top, right, bottom) and point (x, y) of an object


class TrafficVLMCenterHead(nn.Module):
    """Heat and shape of the centers of `classes` classes, from patches and the finest feature map."""

    def __init__(self, patch_width: int, map_width: int, classes: int):
        super().__init__()
        self.patch_norm = nn.LayerNorm(patch_width, eps=1e-6)
        self.from_patches = nn.Linear(patch_width, WIDTH)
        self.from_map = nn.Conv2d(map_width, WIDTH, 1)
        self.filter = nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.heat, self.shape = nn.Linear(WIDTH, classes), nn.Linear(WIDTH, 4)

    def start(self, layer: nn.Module) -> None:
        """Initialize a layer: heat is 1 % everywhere, and boxes are 8 % of the image around the middle of a cell."""
        if layer is self.heat:
            init.normal_(self.heat.weight, std=0.01)
            init.constant_(self.heat.bias, -4.6)
        elif layer is self.shape:
            init.normal_(self.shape.weight, std=0.01)
            init.copy_(self.shape.bias, torch.tensor([math.log(0.08), math.log(0.08), 0.5, 0.5]))

    def forward(self, patches: torch.Tensor, finest: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Logits of the heat, and the shape [B,classes + 4,H/8,W/8]; grid is (rows, columns) of the patches."""
        x = self.from_patches(self.patch_norm(patches)).transpose(1, 2).unflatten(2, grid)
        x = nn.functional.interpolate(x, size=finest.shape[2:], mode="bilinear") + self.from_map(finest)
        around = self.norm(self.filter(x).permute(0, 2, 3, 1))
        x = x.permute(0, 2, 3, 1) + self.fc2(nn.functional.gelu(self.fc1(around)))
        return torch.cat([self.heat(x), self.shape(x)], -1).permute(0, 3, 1, 2)


class TrafficVLMObjectTokens(nn.Module):
    """One token for each class: the number of its objects in the image and in its thirds, and the largest one's look.

    Attention averages what it reads, so the decoder cannot count patches: here the scores of all peaks are summed. And
    patches lose colors: a small classifier named the color of .70 of held-out vehicles from the patches in their box,
    and of .76 from the middle feature map.
    """

    def __init__(self, classes: int, map_width: int, width: int):
        super().__init__()
        self.classes = nn.Embedding(classes, width)
        self.counts = nn.Linear(4, WIDTH)
        self.look_norm = nn.LayerNorm(map_width, eps=1e-6)
        self.look = nn.Linear(map_width, WIDTH)
        self.to_hidden = nn.Linear(2 * WIDTH, width)

    def start(self, layer: nn.Module) -> None:
        """Initialize a layer: tokens as large as those of patches, or the decoder does not learn to read them."""
        if layer is self.classes:
            init.normal_(self.classes.weight, std=0.5)
        elif layer is self.counts:
            init.normal_(self.counts.weight, std=1.0)
            init.normal_(self.counts.bias, std=1.0)
        elif layer is self.look:
            init.normal_(self.look.weight, std=1 / math.sqrt(self.look.in_features))
        elif layer is self.to_hidden:
            init.normal_(self.to_hidden.weight, std=0.5 / math.sqrt(WIDTH))

    def forward(self, centers: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Tokens [B,K,C] of the output [B,K + 4,rows,columns] of a center head, and a feature map [B,D,h,w]."""
        centers = centers.detach()  # the center loss alone teaches it
        heat = peaks(centers[:, :-4])
        columns = torch.arange(heat.shape[3], device=heat.device)
        third = columns[:, None] * 3 // heat.shape[3] == torch.arange(3, device=heat.device)  # [columns,3]
        thirds = heat.sum(2) @ third.to(heat.dtype)
        counts = torch.cat([thirds.sum(-1, keepdim=True), thirds], -1).log1p()  # [B,K,4]
        look = self.look(self.look_norm(largest_look(heat, centers[:, -4:].float(), features)))
        x = torch.cat([self.counts(counts.to(look.dtype)), look], -1)
        names = self.classes(torch.arange(x.shape[1], device=x.device))  # not `weight`, which can be offloaded
        tokens: torch.Tensor = names + self.to_hidden(nn.functional.gelu(x))
        return tokens


def largest_look(heat: torch.Tensor, shape: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Mean [B,K,D] of a feature map [B,D,h,w] in the box of the largest object of each class; 0 without one.

    Args:
        heat: scores [B,K,rows,columns] of peaks; a likely object counts as larger than an unlikely one.
        shape: [B,4,rows,columns] of the center head.
    """
    cells = (heat * shape[:, :2].sum(1, keepdim=True).exp()).flatten(2).argmax(-1)  # score × area: [B,K]
    x, y, width, height = (one[..., None] for one in places_of(cells, shape))
    # From the middle of the box to those of its 3 × 3 parts.
    parts = torch.arange(-1, 2, dtype=shape.dtype, device=shape.device) / 3
    x, y = x + width * parts, y + height * parts  # [B,K,3]
    places = torch.stack(torch.broadcast_tensors(x[..., None, :], y[..., None]), -1).flatten(2, 3)  # [B,K,9,2]
    # A place is -1 at the left or upper edge of the image and 1 at the right or lower one; found is [B,D,K,9].
    found = nn.functional.grid_sample(features.float(), 2 * places - 1, padding_mode="border", align_corners=False)
    is_found = heat.flatten(2).amax(-1, keepdim=True) > 0
    return (found.mean(-1).transpose(1, 2) * is_found).to(features.dtype)


def places_of(cells: torch.Tensor, shape: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Center x and y, width and height, each [B,N], of objects in cells [B,N]; fractions of the image's sides.

    Args:
        cells: index of the row times the number of columns, plus index of the column.
        shape: [B,4,rows,columns] of the center head.
    """
    rows, columns = shape.shape[2:]
    log_width, log_height, right, down = shape.flatten(2).gather(2, cells[:, None].expand(-1, 4, -1)).unbind(1)
    return (cells % columns + right) / columns, (cells // columns + down) / rows, log_width.exp(), log_height.exp()


def peaks(logits: torch.Tensor) -> torch.Tensor:
    """Scores [B,K,rows,columns] of cells that are the highest of their 3 × 3 neighbors; 0 elsewhere and if faint."""
    heat = logits.float().sigmoid()
    is_peak = (nn.functional.max_pool2d(heat, 3, 1, 1) == heat) & (heat > FAINT)
    return heat * is_peak


def find_objects(centers: torch.Tensor, index: int, threshold: float) -> list[Found]:
    """Score, box and point of each object of one class in one image, best first; fractions of its width and height.

    Args:
        centers: [K + 4,rows,columns] of a center head.
        index: of the class.
        threshold: objects below this score are left out.
    """
    heat = peaks(centers[None, index : index + 1]).flatten(1)
    scores, cells = heat.topk(min(MOST, heat.numel()))  # [1,N]
    places = torch.stack(places_of(cells, centers[None, -4:].float()), -1)
    found: list[Found] = []
    for score, (x, y, width, height) in zip(scores[0].tolist(), places[0].tolist()):
        if score < max(threshold, FAINT):
            break
        sides = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        box, point = ([min(max(value, 0.0), 1.0) for value in some] for some in (sides, (x, y)))
        if all(overlap(box, other) < MAX_OVERLAP for _, other, _ in found):
            found.append((score, box, point))
    return found


def overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """Intersection over union of two boxes (left, top, right, bottom)."""
    width, height = (min(one[i + 2], other[i + 2]) - max(one[i], other[i]) for i in range(2))
    shared = max(width, 0.0) * max(height, 0.0)
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return shared / max(areas - shared, 1e-9)

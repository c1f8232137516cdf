"""Dense supervision of the tower, a target for each patch. For training only, not shipped."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.demo_model.model import GRID, PATCHES
from examples.demo_model.pictures.palette import COLOURS
from examples.demo_model.pictures.scenes import SHAPES, Scene

KINDS = ("nothing", *SHAPES, "number")  # classes of the dense heads
INK = 64  # a patch's own mask, 8 x 8
DIGITS = 11  # 0..9 and "no such digit"


class Heads(nn.Module):
    """Heads that predict the content of each patch; for training only, not part of the shipped model."""

    WIDTHS = (len(KINDS), len(COLOURS), 1, 1, 2, 3 * DIGITS)

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, sum(self.WIDTHS))
        self.glyph = nn.Linear(width, 10)
        self.early_norm = nn.LayerNorm(width)
        self.ink = nn.Linear(width, INK)

    def forward(self, features: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.split(self.out(self.norm(features)).float(), list(self.WIDTHS), dim=-1))


def dense_targets(scene: Scene) -> list[list[float]]:
    """What each patch shows, (81, 10).

    Kind, colour, whether a thing's centre lies here, its log size, the way to its centre (x, y),
    its three digits, and the one digit that lies here.
    """
    rows: list[list[float]] = []
    centres = {}
    for thing in scene.things:
        column, row = int(thing.x * GRID), int(thing.y * GRID)
        centres[row * GRID + column] = thing
    for patch in range(PATCHES):
        x, y = (patch % GRID + 0.5) / GRID, (patch // GRID + 0.5) / GRID
        owner = centres.get(patch)
        if owner is None:
            for thing in scene.things:
                inside_x = abs(x - thing.x) < thing.w * 0.42
                if inside_x and abs(y - thing.y) < thing.h * 0.42:
                    owner = thing
        if owner is None:
            rows.append([0, -1, 0, 0, 0, 0, -1, -1, -1, -1])
            continue
        digits, here = [-1, -1, -1], -1
        if owner.is_number:
            place = (x - owner.x) / owner.w + 0.5
            many = len(owner.value)
            here = int(owner.value[min(many - 1, max(0, int(place * many)))])
            padded = owner.value.rjust(3)
            digits = [10 if d == " " else int(d) for d in padded]
        rows.append(
            [
                KINDS.index(owner.shape),
                COLOURS.index(owner.colour),
                float(centres.get(patch) is owner),
                math.log(owner.size),
                owner.x - x,
                owner.y - y,
                *digits,
                here,
            ]
        )
    return rows


def dense_loss(
    heads: Heads, features: Tensor, early: Tensor, targets: Tensor, ink: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the heads and how many of each they get right: shares, on the same device.

    features, early: (batch, 81, 192); targets: (batch, 81, 10) float as `dense_targets` gives them;
    ink: (batch, 81, 64).
    """
    kind, colour, centre, size, offset, digits = heads(features)
    want_kind, want_colour = targets[..., 0].long(), targets[..., 1].long()
    is_thing, is_centre = want_kind > 0, targets[..., 2] > 0
    weight = 1.0 + 4.0 * is_centre
    kind_loss = F.cross_entropy(kind.flatten(0, 1), want_kind.flatten(), reduction="none")
    loss = (kind_loss * weight.flatten()).mean()
    loss = (
        loss + F.cross_entropy(colour.flatten(0, 1), want_colour.flatten(), ignore_index=-1) * 0.5
    )
    loss = loss + F.binary_cross_entropy_with_logits(
        centre[..., 0], targets[..., 2], pos_weight=centre.new_tensor(4.0)
    )
    near = (size[..., 0] - targets[..., 3]).abs() + 3 * (offset - targets[..., 4:6]).abs().sum(-1)
    loss = loss + 0.3 * (near * is_thing).sum() / is_thing.sum().clamp(min=1)
    digits = digits.view(*digits.shape[:2], 3, DIGITS)
    want_digits, here = targets[..., 6:9].long(), targets[..., 9].long()
    digit_loss = F.cross_entropy(
        digits.flatten(0, 2), want_digits.flatten(), ignore_index=-1, reduction="none"
    )
    of_number = want_digits >= 0
    digit_weight = of_number * (1.0 + 4.0 * is_centre[..., None])
    digit_sum = (digit_loss * digit_weight.flatten()).sum() / digit_weight.sum().clamp(min=1)
    glyph = heads.glyph(heads.norm(features)).float()
    glyph_loss = F.cross_entropy(
        glyph.flatten(0, 1), here.flatten(), ignore_index=-1, reduction="sum"
    )
    loss = loss + glyph_loss / (here >= 0).sum().clamp(min=1)
    mask = heads.ink(heads.early_norm(early)).float()
    loss = loss + digit_sum + 2.0 * F.binary_cross_entropy_with_logits(mask, ink)
    with torch.no_grad():
        n = is_centre.sum().clamp(min=1)
        number = is_centre & (want_digits[..., 0] >= 0)
        right = {
            "kind": ((kind.argmax(-1) == want_kind) & is_centre).sum() / n,
            "colour": ((colour.argmax(-1) == want_colour) & is_centre).sum() / n,
            "centre": ((centre[..., 0] > 0) & is_centre).sum() / n,
            "ink": ((mask > 0) == (ink > 0.5)).float().mean(),
            "glyph": ((glyph.argmax(-1) == here) & (here >= 0)).sum()
            / (here >= 0).sum().clamp(min=1),
            "number": ((digits.argmax(-1) == want_digits).all(-1) & number).sum()
            / number.sum().clamp(min=1),
        }
    return loss, right

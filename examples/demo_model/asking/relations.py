"""Whether one thing is clearly to one side of another, or clearly larger."""

from __future__ import annotations

from examples.demo_model.pictures.scenes import Thing

LARGER = 1.25  # times: how much larger counts as larger
BESIDE = 0.12  # of the picture: how far aside counts as aside
LEVEL = 0.06  # below this it does not; between the two nobody is asked


def relation_of(a: Thing, b: Thing) -> str | None:
    """How a lies to b: "above left"; None where a direction is ambiguous."""
    dx, dy = a.x - b.x, a.y - b.y
    if any(LEVEL < abs(d) < BESIDE for d in (dx, dy)):
        return None
    across = "" if abs(dx) <= LEVEL else "left" if dx < 0 else "right"
    along = "" if abs(dy) <= LEVEL else "above" if dy < 0 else "below"
    return f"{along} {across}".strip() or None


def differs(a: Thing, b: Thing) -> bool:
    """Whether one is clearly the larger, by its box and by its ink."""
    fills = {
        "circle": 0.785,
        "square": 1.0,
        "triangle": 0.5,
        "star": 0.42,
        "diamond": 0.5,
        "cross": 0.55,
    }
    by_box = a.size / b.size
    by_ink = by_box * (fills[a.shape] / fills[b.shape]) ** 0.5
    return bool(min(by_box, by_ink) >= LARGER or max(by_box, by_ink) <= 1 / LARGER)

"""Heads of attention that are wider than the model's, because a device wants them so."""


def head_places(count: int, size: int, width: int) -> list[int]:
    """Where the elements of `count` heads of `size` are in heads of `width`, for `LinearWeight.spread`: each half,
    which is rotated with the other, at the begin of a half."""
    if size == width:
        return list(range(count * size))
    starts = range(0, count * width, width // 2)
    return [start + place for start in starts for place in range(size // 2)]

"""How long a step would take on an Ascend NPU, from the bytes and operations of its kernels: a projection.

Nothing is measured. Each kernel takes the longer of two times: its bytes at 80 % of the memory's bandwidth, its
operations at 60 % of the peak in float16. Both figures of a device are assumed, from what is published of it. Time of
the host and gaps between kernels are not in it; a collective between ranks counts `--collective-us`.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

GIB = 1 << 30
_ELEMENT = 2  # bytes of float16 and bfloat16
_BANDWIDTH_SHARE, _COMPUTE_SHARE = 0.8, 0.6
_MEMORY_SHARE = 0.9  # for weights, cache and all else


@dataclass(frozen=True)
class Npu:
    """`bandwidth` in bytes and `peak` in operations a second, `memory` in bytes."""

    name: str
    bandwidth: float
    peak: float
    memory: int


@dataclass(frozen=True)
class Model:
    """The shape of a decoder."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int


@dataclass(frozen=True)
class Load:
    """`rows` sequences that compute `tokens` each and then have `length`."""

    name: str
    rows: int
    tokens: int
    length: int


@dataclass(frozen=True)
class Kernel:
    """What a kernel moves and computes."""

    name: str
    bytes: float
    operations: float = 0.0

    def seconds(self, npu: Npu) -> float:
        """By the slower of memory and arithmetic."""
        moving = self.bytes / (npu.bandwidth * _BANDWIDTH_SHARE)
        return max(moving, self.operations / (npu.peak * _COMPUTE_SHARE))


NPUS = (
    Npu("910B4", 0.8e12, 280e12, 32 * GIB),
    Npu("910B3", 1.6e12, 313e12, 64 * GIB),
    Npu("310P3", 0.204e12, 70e12, 24 * GIB),
)
MODELS = (
    Model("Qwen2-VL-7B", 3584, 18944, 28, 28, 4, 128, 152064),
    Model("Qwen2-VL-72B", 8192, 29568, 80, 64, 8, 128, 152064),
)
LOADS = (
    Load("decode 1 x 1024", 1, 1, 1024),
    Load("decode 32 x 1024", 32, 1, 1024),
    Load("prompt 2048", 1, 2048, 2048),
)


def _product(name: str, tokens: int, inner: int, outer: float) -> Kernel:
    moved = _ELEMENT * (tokens * inner + inner * outer + tokens * outer)
    return Kernel(name, moved, 2.0 * tokens * inner * outer)


def _elementwise(name: str, elements: float) -> Kernel:
    return Kernel(name, _ELEMENT * elements)


def layer(model: Model, load: Load, ranks: int) -> Iterator[Kernel]:
    """The kernels of one layer, on one of `ranks`."""
    tokens = load.rows * load.tokens
    heads, kv_heads = model.heads / ranks, max(1.0, model.kv_heads / ranks)
    width, kv_width = heads * model.head_size, kv_heads * model.head_size
    inner = model.intermediate / ranks
    # Of a prompt's keys a query sees half on average.
    seen = load.length - (load.tokens - 1) / 2
    yield _elementwise("add_rms_norm", 4 * tokens * model.hidden)
    yield _product("qkv", tokens, model.hidden, width + 2 * kv_width)
    yield _elementwise("rotary", 2 * tokens * (width + kv_width))
    yield _elementwise("write", 4 * tokens * kv_width)
    moved = _ELEMENT * (2 * tokens * width + 2 * load.rows * load.length * kv_width)
    yield Kernel("attention", moved, 4.0 * tokens * seen * width)
    yield _product("output", tokens, int(width), model.hidden)
    yield _elementwise("add_rms_norm", 4 * tokens * model.hidden)
    yield _product("gate_up", tokens, model.hidden, 2 * inner)
    yield _elementwise("swiglu", 3 * tokens * inner)
    yield _product("down", tokens, int(inner), model.hidden)


def step(model: Model, load: Load, ranks: int) -> list[Kernel]:
    """All kernels of a step on one of `ranks`; the last row of each sequence goes through the head."""
    kernels = list(layer(model, load, ranks)) * model.layers
    return [*kernels, _product("head", load.rows, model.hidden, model.vocabulary / ranks)]


def weight_bytes(model: Model, ranks: int) -> float:
    """Of one rank: its share of all matrices, and the whole embedding."""
    one = Load("", 1, 1, 1)
    inner = {"qkv", "output", "gate_up", "down"}
    matrices = sum(k.operations / 2 for k in step(model, one, ranks) if k.name in inner | {"head"})
    return _ELEMENT * (matrices + model.vocabulary * model.hidden)


def cache_bytes(model: Model, load: Load, ranks: int) -> float:
    """Keys and values of all sequences, on one rank."""
    width = max(1.0, model.kv_heads / ranks) * model.head_size
    return _ELEMENT * 2 * model.layers * load.rows * load.length * width


def fits(model: Model, load: Load, ranks: int, npu: Npu) -> bool:
    """Whether weights and cache leave something of a rank's memory."""
    return weight_bytes(model, ranks) + cache_bytes(model, load, ranks) < npu.memory * _MEMORY_SHARE


def seconds(model: Model, load: Load, ranks: int, npu: Npu, collective: float = 0.0) -> float:
    """A step; two collectives a layer and one at its end, where there are several ranks."""
    calls = 2 * model.layers + 1 if ranks > 1 else 0
    return sum(kernel.seconds(npu) for kernel in step(model, load, ranks)) + calls * collective


def main(arguments: list[str]) -> int:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(prog="roofline", description=__doc__)
    parser.add_argument(
        "--collective-us", type=float, default=20.0, help="time of an all_reduce (default 20)"
    )
    collective = parser.parse_args(arguments).collective_us
    print(
        "Projections, not measurements: milliseconds a step; - where weights and cache do not fit."
    )
    print(
        f"{_BANDWIDTH_SHARE:.0%} of bandwidth, {_COMPUTE_SHARE:.0%} of peak, {collective:g} us a collective."
    )
    for model in MODELS:
        print(
            f"\n| {model.name} | ranks | GiB weights each | "
            + " | ".join(load.name for load in LOADS)
            + " |"
        )
        print("|---|---|---|" + "---|" * len(LOADS))
        for npu in NPUS[:2]:
            for ranks in (1, 2, 4, 8):
                print(f"| {npu.name} | {ranks} | {_row(model, ranks, npu, collective / 1e6)} |")
    return 0


def _row(model: Model, ranks: int, npu: Npu, collective: float) -> str:
    if (model.heads % ranks) or (model.intermediate % ranks):
        return "does not divide" + " | -" * len(LOADS)
    times = [
        f"{seconds(model, load, ranks, npu, collective) * 1e3:.1f}"
        if fits(model, load, ranks, npu)
        else "-"
        for load in LOADS
    ]
    return " | ".join([f"{weight_bytes(model, ranks) / GIB:.1f}", *times])

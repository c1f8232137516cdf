"""What `tessera doctor --npu` tries of towers: every operation at telling shapes, against the reference on the host."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from services.vision_encoder.devices.base.ops import Norm, Rotation, TowerOps
from services.vision_encoder.devices.npu.ops import NpuOps
from shared.artifacts.pixel_scaling import PixelScaling
from shared.hardware.operation_check import Case
from shared.weights.linear_weight import in_memory

_HEADS = ((4, 32), (16, 64), (16, 72), (16, 80), (16, 88), (8, 128))  # and their size
_SEGMENTS = (1, 70, 256, 256, 3)  # tokens
_WIDTH, _INNER = 256, 688
_TOLERANCES = {torch.float16: 0.02, torch.bfloat16: 0.15}
_SCALING = PixelScaling(1 / 255, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28))


class Cases:
    """Of the operations of one device; values are the same each time."""

    def __init__(self, ops: NpuOps) -> None:
        self._ops = ops
        self._plain = TowerOps(torch.device("cpu"), ops.dtype)
        self._generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Case]:
        return self.named("")

    def named(self, begin: str) -> Iterator[Case]:
        """Those whose names begin so; others are not made."""
        for heads, size in _HEADS:
            for kind in ("heads", "rotated heads"):
                name = f"attention of pictures, {heads} {kind} of {size}"
                if name.startswith(begin):
                    yield self._attention(name, heads, size, is_rotated=kind != "heads")
        others: dict[str, Callable[[str], Case]] = {
            "layer norm of pictures, alone and of a sum": partial(self._norm, has_bias=True),
            "RMS norm of pictures, alone and of a sum": partial(self._norm, has_bias=False),
            "linear with gelu, of pictures": partial(
                self._linear, activation="gelu", is_gated=False
            ),
            "linear with a gate by silu, of pictures": partial(
                self._linear, activation="silu", is_gated=True
            ),
            "values of pixels": self._pixels,
        }
        for name, make in others.items():
            if name.startswith(begin):
                yield make(name)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._ops.dtype)

    def _attention(self, name: str, heads: int, size: int, is_rotated: bool) -> Case:
        """Between the two linear layers, whose weights are packed for it."""
        width, tokens = heads * size, sum(_SEGMENTS)
        x = self._draw(tokens, width)
        qkv, out = (self._draw(rows, width) * width**-0.5 for rows in (3 * width, width))
        angles = torch.randn(tokens, size // 2, generator=self._generator).repeat(1, 2)

        def of(ops: TowerOps) -> Callable[[], Sequence[Tensor]]:
            first = ops.pack_qkv(in_memory(qkv, None), heads)
            last = ops.pack_output(in_memory(out, None), heads)
            segments = ops.segments(_SEGMENTS, heads, size)
            tables = ops.rotary_table(angles.cos(), angles.sin()) if is_rotated else None
            turn = tables and Rotation(*(table.to(ops.device) for table in tables))
            sent = x.to(ops.device)

            def run() -> Sequence[Tensor]:
                mixed = ops.attention(ops.linear(sent, first), heads, segments, turn)
                return (ops.linear(mixed, last),)

            return run

        return Case(
            name,
            of(self._ops),
            of(self._plain)(),
            2 * x.nbytes + qkv.nbytes + out.nbytes,
            self._tolerance,
            self._ops.attention_by(size),
        )

    def _norm(self, name: str, has_bias: bool) -> Case:
        x, residual, weight = self._draw(300, _WIDTH), self._draw(300, _WIDTH), self._draw(_WIDTH)
        bias = self._draw(_WIDTH) if has_bias else None

        def of(ops: TowerOps) -> Callable[[], Sequence[Tensor]]:
            vectors = [None if v is None else ops.vector(v) for v in (weight, bias)]
            assert vectors[0] is not None
            norm = Norm(vectors[0], vectors[1], 1e-6)
            sent, before = x.to(ops.device), residual.to(ops.device)
            return lambda: (ops.norm(sent, norm), *ops.add_norm(sent, before.clone(), norm))

        return Case(name, of(self._ops), of(self._plain)(), 6 * x.nbytes, self._tolerance)

    def _linear(self, name: str, activation: str, is_gated: bool) -> Case:
        x, bias = self._draw(300, _WIDTH), self._draw(_INNER)
        weight = self._draw(_INNER, _WIDTH) * _WIDTH**-0.5

        def of(ops: TowerOps) -> Callable[[], Sequence[Tensor]]:
            layer = ops.pack(in_memory(weight, bias), activation, is_gated)
            sent = x.to(ops.device)
            return lambda: (ops.linear(sent, layer),)

        expected = of(self._plain)()
        nbytes = x.nbytes + weight.nbytes + expected[0].nbytes
        return Case(name, of(self._ops), expected, nbytes, self._tolerance)

    def _pixels(self, name: str) -> Case:
        raw = torch.randint(256, (4, 3, 1024), generator=self._generator, dtype=torch.uint8)

        def of(ops: TowerOps) -> Callable[[], Sequence[Tensor]]:
            sent = raw.to(ops.device)
            return lambda: (ops.scale_pixels(sent, _SCALING),)

        return Case(name, of(self._ops), of(self._plain)(), 3 * raw.nbytes, self._tolerance)

    @property
    def _tolerance(self) -> float:
        return _TOLERANCES[self._ops.dtype]

"""What `tessera doctor --npu` tries: every operation at shapes that tell, against the reference on the host."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from services.decoder.devices.base.adapters import LinearPlace, Segment
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.steps.attention_meta import KVSpec, PagedKV
from shared.hardware.operation_check import Case
from shared.weights.linear_weight import in_memory

_TOKENS = (1, 48, 2176)  # the last as many as a step has, unless another number is given
_HIDDEN, _INNER = 896, 4864
_ROTATED = ((14, 64), (28, 128), (16, 80))  # heads and their size
_TOLERANCES = {torch.float16: 0.02, torch.bfloat16: 0.15}

Run = Callable[[], Sequence[Tensor]]


class Cases:
    """Of one device; values are the same each time."""

    def __init__(self, device: NpuDevice) -> None:
        self._device, self._ops = device, device.ops
        self._plain = BaseOps(torch.device("cpu"), device.ops.dtype, device.block_size)
        self._generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Case]:
        for tokens in _TOKENS:
            yield from self._layer(tokens)
            yield from self._rotations(tokens)
        yield self._linear_layer(48, 16)
        yield self._linear_layer(48, 17)  # sizes of which one is no multiple of 16
        yield self._linear_layer(_TOKENS[-1], 16)
        yield self._addition()
        yield from self._cache(2, 64)
        yield from self._cache(2, 80)
        yield from self._cache(1, 128)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._ops.dtype)

    def _layer(self, tokens: int) -> Iterator[Case]:
        x, residual = self._draw(tokens, _HIDDEN), self._draw(tokens, _HIDDEN)
        weight, gate_up = self._draw(_HIDDEN), self._draw(tokens, 2 * _INNER)
        yield self._case(f"rms_norm, {tokens} rows", "rms_norm", x, weight, 1e-6)
        yield self._case(f"add_rms_norm, {tokens} rows", "add_rms_norm", x, residual, weight, 1e-6)
        yield self._case(f"swiglu, {tokens} rows", "swiglu", gate_up)

    def _rotations(self, tokens: int) -> Iterator[Case]:
        for heads, size in _ROTATED:
            x = self._draw(tokens, heads, size)
            half = torch.randn(tokens, 1, size // 2, generator=self._generator)
            cos = torch.cat([half.cos()] * 2, -1).to(x.dtype)
            sin = torch.cat([-half.sin(), half.sin()], -1).to(x.dtype)
            here, there = (ops.rotary_table(cos, sin) for ops in (self._ops, self._plain))
            yield Case(
                f"rope, {tokens} rows of {heads} heads of {size}",
                partial(_tuple_of, self._ops.rope, x.to(self._ops.device), *here),
                [self._plain.rope(x, *there)],
                2 * x.nbytes,
                self._tolerance,
            )

    def _linear_layer(self, tokens: int, odd: int) -> Case:
        weight, bias = self._draw(odd * 32, _HIDDEN) * 0.03, self._draw(odd * 32)
        x = self._draw(tokens, _HIDDEN)
        packed, plain = (ops.pack(in_memory(weight, bias)) for ops in (self._ops, self._plain))
        return Case(
            f"linear, {tokens} rows, {_HIDDEN} to {odd * 32}",
            partial(_tuple_of, self._ops.linear, x.to(self._ops.device), packed),
            [self._plain.linear(x, plain)],
            weight.nbytes,
            self._tolerance,
        )

    def _addition(self) -> Case:
        """To outputs in the middle of a product, of every third row."""
        place = LinearPlace("up_proj", "gate_up", 512, 1536, _HIDDEN)
        down, up = self._draw(16, _HIDDEN) * 0.03, self._draw(1024, 16)
        x, product = self._draw(48, _HIDDEN), self._draw(48, 2048)
        rows = torch.arange(1, 48, 3)

        def of(ops: BaseOps) -> Run:
            addition = ops.pack_addition(place, in_memory(down), in_memory(up))
            segments = [Segment(rows.to(ops.device), addition)]
            sent, before = x.to(ops.device), product.to(ops.device)

            def run() -> Sequence[Tensor]:
                out = before.clone()
                ops.adapt(sent, out, segments)
                return (out,)

            return run

        name = f"a low-rank addition to {len(rows)} rows"
        expected = of(self._plain)()
        return Case(name, of(self._ops), expected, down.nbytes + up.nbytes, self._tolerance)

    def _cache(self, heads: int, size: int) -> Iterator[Case]:
        """Keys and values that are written, copied, swapped and scrubbed come back as they should."""
        spec, tokens = KVSpec(heads, size, size, self._ops.dtype), self._device.block_size
        k, v = (self._draw(tokens, heads, size) for _ in range(2))
        of = f"{heads} {'head' if heads == 1 else 'heads'} of {size}"
        order = torch.randperm(tokens, generator=self._generator)
        cache = self._ops.alloc_kv(spec, 4)
        names = ["written", "copied"]
        if self._device.swap_bytes(1):
            names.append("swapped")
        for name in names:
            yield Case(
                f"a block of {of} is {name}",
                partial(self._moved, cache, spec, k, v, order, name),
                [k, v],
                2 * k.nbytes,
                0.0,
            )
        yield Case(
            f"a token of {of} is scrubbed",
            partial(self._scrubbed, cache, k, v),
            [torch.zeros_like(k[3]), torch.zeros_like(v[3]), k[4], v[4]],
            2 * k[3].nbytes,
            0.0,
        )

    def _moved(
        self, cache: PagedKV, spec: KVSpec, k: Tensor, v: Tensor, order: Tensor, how: str
    ) -> Sequence[Tensor]:
        ops, tokens = self._ops, len(k)
        table, slots, src, dst = self._device.upload(
            torch.tensor([[1]], dtype=torch.int32).numpy(),
            (tokens + order).numpy(),
            torch.tensor([1]).numpy(),
            torch.tensor([2]).numpy(),
        )
        meta = ops.make_meta([tokens], [tokens], table, slots)
        ops.kv_write(k[order].to(ops.device), v[order].to(ops.device), cache, meta)
        if how == "written":
            return ops.export_block(cache, 1)
        if how == "copied":
            ops.copy_blocks(cache, src, dst)
            return ops.export_block(cache, 2)
        host = ops.alloc_host_kv(spec, 2)
        ops.swap_blocks(cache, host, torch.tensor([1]), torch.tensor([0]))
        ops.swap_blocks(host, cache, torch.tensor([0]), torch.tensor([3]))
        return ops.export_block(cache, 3)

    def _scrubbed(self, cache: PagedKV, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        self._ops.import_block(cache, 1, k, v)
        [slot] = self._device.upload(torch.tensor([self._device.block_size + 3]).numpy())
        self._ops.scrub(cache, slot)
        keys, values = self._ops.export_block(cache, 1)
        return keys[3], values[3], keys[4], values[4]

    def _case(self, name: str, op: str, *arguments: Tensor | float) -> Case:
        sent = [x.to(self._ops.device) if isinstance(x, Tensor) else x for x in arguments]
        own = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
        expected = _tuple_of(getattr(self._plain, op), *own)
        nbytes = sum(x.nbytes for x in [*arguments, *expected] if isinstance(x, Tensor))
        run = partial(_tuple_of, getattr(self._ops, op), *sent)
        return Case(name, run, expected, nbytes, self._tolerance)

    @property
    def _tolerance(self) -> float:
        return _TOLERANCES[self._ops.dtype]


def _tuple_of(
    op: Callable[..., Tensor | tuple[Tensor, ...]], *arguments: object
) -> Sequence[Tensor]:
    found = op(*arguments)
    return found if isinstance(found, tuple) else (found,)

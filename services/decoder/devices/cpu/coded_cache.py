"""Keys and values as codes of 8 bits, as the kernels have them (`cpu_kernels/source/attention/coded_pages.h`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.decoder.steps.attention_meta import KVSpec

_SCALE_BYTES = 4
_ZERO_KEY = 0x80  # keys' codes are stored with their upper bit turned


def kept_memory(spec: KVSpec) -> Tensor:
    """int32 [kv heads, most elements of any head] as the kernels read what is kept beside codes; -1 for none."""
    most = max(map(len, spec.kept), default=0)
    kept = torch.full((spec.num_kv_heads, most), -1, dtype=torch.int32)
    for head, elements in enumerate(spec.kept):
        kept[head, : len(elements)] = torch.tensor(elements, dtype=torch.int32)
    return kept


@dataclass(frozen=True)
class BlockBytes:
    """One block of codes [kv heads, pages, bytes of a page], and the bytes of its tokens [tokens, kv heads, bytes]: of
    a key its codes [D], its scale and what is kept of it; of a value its codes and its scale. These are the same for
    every instruction set."""

    pages: Tensor
    size: int  # D
    padded: int
    kept: int  # elements beside a key's codes
    page: int  # tokens
    itemsize: int  # of kept elements

    def read(self) -> tuple[Tensor, Tensor]:
        """Copies of the bytes of keys and of values."""
        tokens, heads = self.pages.shape[1] * self.page, self.pages.shape[0]

        def flat(part: Tensor, width: int) -> Tensor:
            return part.reshape(tokens, heads, -1)[..., :width]

        keys, values, key_scales, value_scales, kept = self._parts()
        codes = flat(keys, self.size) ^ _ZERO_KEY
        scales = (flat(part, _SCALE_BYTES) for part in (key_scales, value_scales))
        beside = flat(kept, self.kept * self.itemsize)
        return (
            torch.cat([codes, next(scales), beside], -1),
            torch.cat([flat(values, self.size), next(scales)], -1),
        )

    def write(self, k: Tensor, v: Tensor) -> None:
        """Takes over what `read` gave of a block of the same sizes."""
        parts, size = self._parts(), self.size
        more = torch.zeros((*k.shape[:2], self.padded - size), dtype=torch.uint8)
        beside = k[..., size + _SCALE_BYTES :]
        given = (
            torch.cat([k[..., :size], more], -1) ^ _ZERO_KEY,
            torch.cat([v[..., :size], more], -1),
            k[..., size : size + _SCALE_BYTES],
            v[..., size:],
            beside,
        )
        for part, new in zip(parts, given, strict=True):
            part.copy_(new.reshape(part.shape))

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Views [pages, tokens, kv heads, ...] of keys, values, scales of both, and what is kept."""
        raw, size, page, width = self.pages, self.padded, self.page, self.itemsize
        heads, pages, codes = raw.shape[0], raw.shape[1], page * self.padded
        first = 2 * codes + 2 * page * _SCALE_BYTES  # of what is kept
        keys = raw[..., :codes].view(heads, pages, size // 4, page, 4)
        values = raw[..., codes : 2 * codes].view(heads, pages, page // 4, size, 4)
        scales = raw[..., 2 * codes : first].view(heads, pages, 2, page, _SCALE_BYTES)
        kept = raw[..., first : first + self.kept * page * width]
        kept = kept.view(heads, pages, self.kept, page, width)
        return (
            keys.permute(1, 3, 0, 2, 4),
            values.permute(1, 2, 4, 0, 3),  # tokens in fours
            scales[:, :, 0].permute(1, 2, 0, 3),
            scales[:, :, 1].permute(1, 2, 0, 3),
            kept.permute(1, 3, 0, 2, 4),
        )

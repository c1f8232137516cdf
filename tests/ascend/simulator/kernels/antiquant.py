"""Keys and values of 8 bits of the fused kernel, whose scales are given for each of them (`key_antiquant_scale`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ascend.simulator.errors import require
from tests.ascend.simulator.kernels.layer import require_contiguous

_PER_TOKEN_AND_HEAD = 5


@dataclass(frozen=True)
class Antiquant:
    """Of one call: scales of mode 5, for each token and head, in blocks as the codes are."""

    key: Tensor | None
    value: Tensor | None
    key_mode: int
    value_mode: int

    def check(self, shape: list[int]) -> None:
        """Raises Refused where a documented limit is not kept. shape: blocks, heads of keys, tokens of a block."""
        key, value = self.key, self.value
        require(key is not None and value is not None, "FIA: one antiquant_scale without the other")
        assert key is not None and value is not None
        modes = self.key_mode, self.value_mode
        require(modes == (_PER_TOKEN_AND_HEAD,) * 2, f"FIA: antiquant modes {modes} not simulated")
        require_contiguous("FIA", key_antiquant_scale=key, value_antiquant_scale=value)
        for scale in (key, value):
            require(scale.dtype == torch.float32, f"FIA: antiquant_scale of {scale.dtype}")
            require(
                list(scale.shape) == shape,
                f"FIA: antiquant_scale {list(scale.shape)} for blocks, heads and tokens {shape}",
            )

    def numbers(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What the codes of two caches [blocks, tokens, heads * size] mean."""
        assert self.key is not None and self.value is not None
        return _numbers(key, self.key), _numbers(value, self.value)


def _numbers(codes: Tensor, scales: Tensor) -> Tensor:
    heads = scales.shape[1]
    wide = codes.float().unflatten(-1, (heads, -1)) * scales.transpose(1, 2)[..., None]
    found: Tensor = wide.flatten(-2)
    return found

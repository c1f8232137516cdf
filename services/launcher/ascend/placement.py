"""Which process computes on which NPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from shared.errors import InvalidRequest


@dataclass(frozen=True)
class Placement:
    """Numbers of devices for each decoder and each vision encoder."""

    decoders: list[list[int]]
    encoders: list[list[int]]

    @property
    def sharers(self) -> int:
        """Decoders on one device, at most."""
        used = list(chain.from_iterable(self.decoders))
        return max((used.count(device) for device in used), default=1)

    @property
    def is_shared_with_encoder(self) -> bool:
        """Whether a decoder and an encoder have a device in common."""
        return bool(set(chain(*self.decoders)) & set(chain(*self.encoders)))


def place(devices: Sequence[int], decoders: int, encoders: int, ranks: int = 1) -> Placement:
    """Gives each decoder `ranks` devices of its own as far as they go, and encoders the devices that are left, or
    else the last ones. Decoders of one rank share devices where there are too few. Raises InvalidRequest if one
    decoder needs more devices than there are, or several would have to share them.
    """
    if ranks > 1 and decoders * ranks > len(devices):
        raise InvalidRequest(
            "TOO_FEW_DEVICES",
            f"--decoders {decoders} with --tensor-parallel-size {ranks} need {decoders * ranks} NPUs, and"
            f" {len(devices)} are visible (ASCEND_RT_VISIBLE_DEVICES)",
            field="tensor_parallel_size",
        )
    count = len(devices)
    taken = [
        [devices[(decoder * ranks + rank) % count] for rank in range(ranks)]
        for decoder in range(decoders)
    ]
    left = list(devices[decoders * ranks :]) or list(reversed(devices))
    return Placement(taken, [[left[encoder % len(left)]] for encoder in range(encoders)])

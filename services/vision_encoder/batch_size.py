"""How many patches a tower takes at a time: as many as the memory of its device allows, tried at start."""

import structlog
import torch

from services.families.family import ItemSize
from services.vision_encoder.devices.base.accelerator import Accelerator
from services.vision_encoder.towers.encoder import Encoder, Item
from shared.errors import Unavailable

log = structlog.get_logger(__name__)

_GIB = 1 << 30


def fit_batch(
    model: Encoder, device: Accelerator, largest: ItemSize, patches: int, share: float
) -> int:
    """Limits this process to `share` of the device's memory and encodes the largest item as often as `patches` allow,
    but once at least; returns `patches`, halved until that fits. Runs on the tower's thread.

    Raises Unavailable, naming what takes the memory, if the item does not fit by itself.
    """
    budget = device.limit_memory(share)
    item = model.sample(largest)
    cost = model.cost(item)
    while not _fits(model, device, [item] * max(1, patches // cost)):
        if patches <= cost:
            raise Unavailable(
                "DEVICE_MEMORY_TOO_SMALL",
                f"the largest picture ({largest.width}x{largest.height}, {cost} patches) cannot be encoded in"
                f" {budget.allowed / _GIB:.2f} GiB: --encoder-memory-utilization allows {share:.0%} of"
                f" {budget.total / _GIB:.2f} GiB, of which operators keep {budget.reserved / _GIB:.2f} GiB;"
                f" weights take {budget.weights / _GIB:.2f} GiB. Give more, or limit the size of pictures"
                " (max_pixels of preprocessor_config.json)",
            )
        patches = max(cost, patches // 2)
    log.info(
        "memory of the encoder",
        batch_patches=patches,
        allowed_gb=round(budget.allowed / _GIB, 2),
        weights_gb=round(budget.weights / _GIB, 2),
        peak_gb=round(device.peak_bytes() / _GIB, 2),
    )
    return patches


def _fits(model: Encoder, device: Accelerator, items: list[Item]) -> bool:
    device.free_unused()
    try:
        model.encode(items)
    except torch.OutOfMemoryError:
        return False
    finally:
        device.free_unused()  # what the trial took is for others to use
    return True

"""How many patches an encoder takes at a time on a simulated NPU whose memory is scarce."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_npu

from services.families import registry
from services.families.family import ItemSize
from services.vision_encoder.batch_size import fit_batch
from services.vision_encoder.devices.npu.device import NpuDevice
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.queue import Encoded, TowerQueue
from services.vision_encoder.towers.encoder import Encoder, pixel_item
from shared.artifacts.store import ArtifactStore
from shared.checkpoint.folder import Checkpoint
from shared.errors import Precondition, Unavailable
from tessera.common.v1.media_pb2 import Modality
from tests.reference_models import wemm
from tests.support.checkpoints import make_checkpoint

MIB = 1 << 20
PATCHES = 2048


@pytest.fixture
def device() -> Iterator[NpuDevice]:
    gc.collect()  # what earlier tests had on the device
    torch_npu.npu.empty_cache()
    yield NpuDevice(torch.float16)
    torch_npu.npu.set_per_process_memory_fraction(1.0)


def load(folder: Path, device: NpuDevice) -> tuple[Encoder, ItemSize]:
    """An encoder and the largest picture of its family."""
    checkpoint = Checkpoint(wemm.write_checkpoint(folder))
    encoder = load_encoder(checkpoint, device)
    assert encoder is not None
    return encoder, registry.find(checkpoint).largest(checkpoint, Modality.MODALITY_IMAGE)


def share_of(nbytes: int) -> float:
    """The share of the device's memory that leaves tensors so many bytes."""
    return float(nbytes / torch_npu.npu.mem_get_info()[1] + 0.03)


def test_a_batch_is_halved_until_it_fits(tmp_path: Path, device: NpuDevice) -> None:
    encoder, largest = load(tmp_path / "model", device)
    many = 4 * PATCHES  # that take more than the parts in which torch's pools grow
    torch_npu.npu.reset_peak_memory_stats()
    assert fit_batch(encoder, device, largest, many, 0.9) == many
    taken = device.peak_bytes()
    weights = int(torch_npu.npu.memory_allocated())
    fits = fit_batch(encoder, device, largest, many, share_of(weights + (taken - weights) // 2))
    assert 400 <= fits < many
    encoder.encode([encoder.sample(largest)])


def test_a_picture_that_does_not_fit_is_refused_with_what_takes_the_memory(
    tmp_path: Path, device: NpuDevice
) -> None:
    encoder, largest = load(tmp_path / "model", device)
    with pytest.raises(Unavailable) as caught:
        fit_batch(encoder, device, largest, PATCHES, share_of(1 * MIB))
    for part in ("280x280, 400 patches", "weights take", "--encoder-memory-utilization", "of 2.00"):
        assert part in caught.value.message


async def test_only_the_picture_that_does_not_fit_fails(
    tmp_path: Path, short_tmp: Path, device: NpuDevice
) -> None:
    encoder = load_encoder(Checkpoint(make_checkpoint(tmp_path, "qwen2_vl")), device)
    assert encoder is not None
    small = [encoder.sample(ItemSize(28, 28)) for _ in range(2)]
    values = small[0].pixels.shape[1]
    large = pixel_item(np.zeros((2304, values), np.float32), (1, 48, 48))
    expected = encoder.encode(small[:1])[0]
    taken = []
    for item in (small[0], large):
        device.free_unused()
        torch_npu.npu.reset_peak_memory_stats()
        encoder.encode([item])
        taken.append(int(torch_npu.npu.max_memory_reserved()))
    device.free_unused()
    allowed = sum(taken) / 2
    torch_npu.npu.set_per_process_memory_fraction(allowed / torch_npu.npu.mem_get_info()[1])
    store = ArtifactStore(short_tmp / "artifacts", "producer", "")
    queue = TowerQueue(encoder, device, 2 * PATCHES)  # all run together
    await queue.on_thread(lambda: device.enter_thread(encoder.uses_ops))
    items = [small[0], large, small[1]]
    places = [store.reserve(bytes([number]) * 16) for number in range(len(items))]
    calls = [queue.encode(item, place) for item, place in zip(items, places, strict=True)]
    first, failure, last = await asyncio.gather(*calls, return_exceptions=True)
    queue.close()
    assert isinstance(failure, Precondition) and "2304 patches" in failure.message
    for result in (first, last):
        assert isinstance(result, Encoded) and result.rows == len(expected)

"""`full_device.py FOLDER SETTINGS`: loads a decoder that fills its NPU, and runs the largest step that a scheduler may
send it. Prints, as JSON, the bytes of its cache, those that the step takes of torch's pools, as predicted and as it
was, what is free at last, and how often memory did not suffice."""

import json
import sys
from pathlib import Path

import torch
import torch_npu

from services.decoder.devices.npu.device import NpuDevice
from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.decoder.worker.plans.plan import read_plan
from tessera.decoder.v1.decoder_pb2 import StepResult
from tests.support.decoder.largest_step import largest_plan


def main(folder: str, options: str) -> None:
    """Ends with an error if a row of the step fails."""
    loaded = load(DecoderSettings.model_validate({"model": Path(folder), **json.loads(options)}))
    device, limits = loaded.device, loaded.worker.limits
    assert isinstance(device, NpuDevice)
    emptied = 0
    empty = device.free_unused

    def counted() -> None:
        nonlocal emptied
        emptied += 1
        empty()

    device.free_unused = counted  # type: ignore[method-assign]
    plan = read_plan(largest_plan(limits), limits)
    results: list[StepResult] = []
    took = device.peak_bytes(lambda: loaded.worker.step(plan, results.append))
    assert not results[0].failed, results[0].failed
    caches = [part for kv in loaded.worker.caches for part in (kv.k, kv.v)]
    found = {
        "cache": sum(part.untyped_storage().nbytes() for part in caches),
        "predicted": loaded.profile.step_bytes,
        "took": took,
        "free": device.memory().free,
        "emptied": emptied,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert torch_npu.npu.is_available()
    main(*sys.argv[1:])

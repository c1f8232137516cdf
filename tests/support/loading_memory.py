"""`python -m tests.support.loading_memory PART FOLDER [QUANTIZATION]`: prints what loading takes: [most, in the end].

Parts are native, transformers (decoders) and encoder. Bytes are those of the resident set, mapped files included,
beside what the process had before.
"""

import json
import sys
from pathlib import Path

import torch

from services.decoder.loading.load import load
from services.decoder.models.generic import decoder as _generic  # noqa: F401  imported before memory is counted
from services.decoder.settings import DecoderSettings
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.loading import load_encoder
from shared.checkpoint.folder import Checkpoint
from shared.model_backends import ModelBackend


def main(part: str, folder: Path, quantization: str = "none") -> None:
    """Loads once."""
    torch.set_num_threads(1)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    loaded: object
    if part == "encoder":
        loaded = load_encoder(Checkpoint(folder), CpuDevice(torch.float32))
    else:
        loaded = load(
            DecoderSettings(
                model=folder,
                dtype="float32",
                kv_cache_memory_bytes=16 << 20,
                max_model_len=256,
                max_batched_tokens=64,
                model_backend=ModelBackend(part),
                quantization=quantization,
            )
        )
    print(json.dumps([_status("VmHWM") - before, _status("VmRSS") - before]))
    del loaded


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])

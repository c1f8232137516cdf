"""Every tensor of a checkpoint is read by exactly one room."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.checkpoints import SPELLINGS, make_checkpoint

from services.decoder.models import model_class
from services.decoder.ops import load_ops
from services.vision_encoder.models import load_vision_model
from shared.checkpoint import Checkpoint

# The tower's last norm and its layers after the feature layer lead to no embedding row.
_UNUSED = ("post_layernorm", "layers.", "head.")


def names_read(folder: Path, load: Callable[[Checkpoint], object]) -> set[str]:
    """What a room asks its checkpoint for."""
    read: set[str] = set()

    class Recording(Checkpoint):
        def tensor(self, name: str) -> torch.Tensor:
            read.add(name)
            return super().tensor(name)

    load(Recording(folder))
    return read


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("tower", "language"), [("clip", "llama"), ("siglip", "qwen2")])
def test_decoder_and_encoder_share_a_checkpoint_out(
    tmp_path: Path, tower: str, language: str, spelling: str
) -> None:
    folder = make_checkpoint(tmp_path, "llava", tower=tower, language=language, spelling=spelling)

    def load_decoder(checkpoint: Checkpoint) -> object:
        ops = load_ops("cpu", torch.float32)
        return model_class(checkpoint).load(checkpoint, ops, 128)

    def load_encoder(checkpoint: Checkpoint) -> object:
        return load_vision_model(checkpoint, torch.device("cpu"), torch.float32)

    decoders = names_read(folder, load_decoder)
    encoders = names_read(folder, load_encoder)
    assert not decoders & encoders
    left = set(Checkpoint(folder).names()) - decoders - encoders
    assert all("vision" in name and any(part in name for part in _UNUSED) for name in left), left

"""Every tensor of a checkpoint is read by exactly one service."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.models.generic.loading import load_model
from services.families import generic, registry
from services.families.family import load_part
from services.vision_encoder.devices.cpu.device import CpuDevice as EncoderCpu
from services.vision_encoder.generic import GenericEncoder
from services.vision_encoder.loading import load_encoder
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.model_half import model_class, read_config
from tests.reference_models import internvl_chat, qwen_vl
from tests.reference_models.text_models import chatglm, chatglm_6b
from tests.support.checkpoints import (
    GENERIC,
    SPELLINGS,
    TEXT_FAMILIES,
    load_reference,
    make_checkpoint,
)
from tests.support.generic_models import parameters

# The tower's last norm and its layers after the feature layer lead to no embedding row.
_UNUSED = ("post_layernorm", "layers.", "head.")
CASES: list[dict[str, Any]] = [
    *({"family": "llava", "spelling": spelling} for spelling in SPELLINGS),
    *(
        {"family": "llava", "tower": "siglip", "language": "qwen2", "spelling": spelling}
        for spelling in SPELLINGS
    ),
    *(
        {"family": "llava_next", "language": language, "spelling": spelling}
        for language, spelling in zip(("llama", "mistral", "qwen2"), SPELLINGS, strict=True)
    ),
    {"family": "llava_next", "tower": "siglip", "language": "qwen3"},
    *({"family": "qwen2_vl", "spelling": spelling} for spelling in SPELLINGS),
    {"family": "qwen2_5_vl", "old_rope": True},
    {"family": "qwen2_5_vl", "spelling": "new", "text": {"tie_word_embeddings": True}},
    {"family": "llava", "text": {"tie_word_embeddings": True}},
    *({"family": "internvl_chat", "language": kind} for kind in ("internlm2", "qwen2", "qwen3")),
]


def names_read(folder: Path, load: Callable[[Checkpoint], object]) -> set[str]:
    """What a service asks its checkpoint for."""
    read: set[str] = set()

    class Recording(Checkpoint):
        def tensor(self, name: str) -> torch.Tensor:
            read.add(name)
            return super().tensor(name)

        def part(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
            read.add(name)
            return super().part(name, rows, columns)

    load(Recording(folder))
    return read


@pytest.mark.parametrize("family", GENERIC)
def test_halves_of_a_class_make_the_whole(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path, family))
    encoder = load_encoder(checkpoint, EncoderCpu(torch.float32))
    assert isinstance(encoder, GenericEncoder)
    kind, config = model_class(checkpoint), read_config(checkpoint)
    decoder = load_model(checkpoint, kind, config, torch.float32)
    halves = [set(parameters(half)) for half in (encoder._model, decoder)]
    # The rows of Chameleon's pictures are those of the embedding table.
    both = {"model.embed_tokens.weight"} if family == "chameleon" else set()
    assert halves[0] & halves[1] == both
    whole = {name for name, _ in load_reference(checkpoint.folder).named_parameters()}
    assert halves[0] | halves[1] == whole


def load_decoder(checkpoint: Checkpoint) -> object:
    """As the decoder does."""
    ops = CpuDevice(torch.float32).ops
    return load_part(registry.find_decoder(checkpoint).decoder).load(checkpoint, ops, 128)


@pytest.mark.parametrize("family", ["idefics3", "llava_onevision"])
def test_a_native_decoder_takes_what_the_class_leaves_it(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path, family))

    decoders = names_read(checkpoint.folder, load_decoder)
    encoder = load_encoder(checkpoint, EncoderCpu(torch.float32))
    assert isinstance(encoder, GenericEncoder)
    encoders = {name for name, _ in encoder._model.named_parameters()}
    assert not decoders & encoders and len(encoders) + len(decoders) == len(checkpoint.names())
    taken = sum(checkpoint.tensor(name).numel() for name in decoders)
    taken += sum(parameter.numel() for parameter in encoder._model.parameters())
    assert taken == sum(checkpoint.tensor(name).numel() for name in checkpoint.names())


@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
def test_decoder_and_encoder_share_a_checkpoint_out(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    _assert_shared_out(make_checkpoint(tmp_path, **options))


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_a_decoder_reads_all_of_a_text_model(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family)
    checkpoint = Checkpoint(folder)
    if registry.find_decoder(checkpoint) is generic.GENERIC:
        kind, config = model_class(checkpoint), read_config(checkpoint)
        model = load_model(checkpoint, kind, config, torch.float32)
        read = set(parameters(model))
    else:
        read = names_read(folder, load_decoder)
    left = set(checkpoint.names()) - read
    assert all(name.endswith("inv_freq") for name in left), left


@pytest.mark.parametrize("family", [chatglm, chatglm_6b, internvl_chat, qwen_vl])
def test_checkpoints_of_reference_models_are_shared_out(tmp_path: Path, family: Any) -> None:
    _assert_shared_out(family.write_checkpoint(tmp_path / "model"))


def _assert_shared_out(folder: Path) -> None:
    def encoder_of(checkpoint: Checkpoint) -> object:
        return load_encoder(checkpoint, EncoderCpu(torch.float32))

    decoders = names_read(folder, load_decoder)
    encoders = names_read(folder, encoder_of)
    assert not decoders & encoders
    left = set(Checkpoint(folder).names()) - decoders - encoders
    left = {name for name in left if not name.endswith("inv_freq")}
    assert all("vision" in name and any(part in name for part in _UNUSED) for name in left), left

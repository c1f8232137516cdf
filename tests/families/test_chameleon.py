"""Chameleon beyond what every model has that the code of transformers runs: separators, codes that are never said."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.models.generic.comparison import agree
from services.decoder.models.generic.decoder import GenericDecoder
from services.families import registry
from services.families.check import Parts, require_servable
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tessera.common.v1.media_pb2 import Modality
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest
from tests.support.checkpoints import generic, load_config, make_checkpoint
from tests.support.preprocess.service import (
    PreprocessMaker,
    file_of,
    ids_of,
    image,
    picture,
    text,
    turn,
)


async def test_every_turn_of_a_conversation_ends_with_the_separator(
    tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    folder = make_checkpoint(tmp_path, "chameleon")
    processor, seen = generic.processor(folder), picture()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    async with make_preprocess(folder, "m") as service:
        answer = await service.chat(
            turn("user", text("Who is "), image(file_of(seen)), text("?")),
            turn("assistant", text("A dog.")),
            turn("user", text("And?")),
        )
        words = "Who is <image>?<reserved08706>A dog.<reserved08706>And?"
        assert answer.text == words
        made = processor(text=[words], images=[seen], return_tensors="np")
        assert ids_of(answer) == made["input_ids"][0].tolist()
        size = registry.find(Checkpoint(folder)).largest(
            Checkpoint(folder), Modality.MODALITY_IMAGE
        )
        assert answer.media[0].length == size.tokens
        ids = np.array([5, 6, 7], "<i4")
        sent = await service.prepare(PrepareRequest(token_ids=ids.tobytes()))
        assert ids_of(sent) == [5, 6, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_of_pictures_are_never_said(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_checkpoint(tmp_path, "chameleon")
    ops = CpuDevice(dtype).ops
    decoder = GenericDecoder.load(Checkpoint(folder), ops, 256)
    map_ = load_config(folder)["vocabulary_map"]
    codes = [number for name, number in map_.items() if name.startswith("IMGIMG")]
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        logits = decoder.logits(rows)
    assert (logits[:, codes] < -1e30).all()
    others = np.setdiff1d(np.arange(logits.shape[1]), codes)
    assert (logits[:, others] > -1e4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_that_excludes_other_tokens_or_none_disagrees(dtype: torch.dtype) -> None:
    theirs = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    unmasked, others = theirs.clone(), theirs.clone()
    theirs[:, 3:9] = others[:, 4:10] = torch.finfo(dtype).min
    assert agree(theirs.clone(), theirs, dtype)
    assert not agree(unmasked, theirs, dtype) and not agree(others, theirs, dtype)
    assert not agree(theirs + (theirs > -1e4) * torch.linspace(0, 2, 32), theirs, dtype)


def test_a_vocabulary_without_codes_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "chameleon")
    config = load_config(folder) | {"vocabulary_map": {"<image>": 3}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="vocabulary_map") as refused:
        require_servable(folder, parts=Parts.TOKENIZER)
    assert refused.value.reason == "UNSUPPORTED_MODEL"

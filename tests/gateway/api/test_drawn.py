"""`do_sample: true` draws tokens of a checkpoint whose own answers are not drawn, too."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.gateway.stage import MODEL, PLAIN, Stage, StagedModel


def _write(folder: Path, tokenizer: Tokenizer) -> Path:
    """A checkpoint that says not to draw."""
    made = PLAIN.write(folder, tokenizer)
    (made / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return made


STAGED_MODEL = StagedModel(PLAIN.tokenizer, _write, PLAIN.answer)
TRITON = f"/v2/models/{MODEL}/generate"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "x"}),
        ("/infer", {"inputs": "x"}),
        (TRITON, {"text_input": "x"}),
    ],
)
@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": False}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.5}, 0.5),
    ],
)
async def test_do_sample(
    stage: Stage, path: str, body: dict[str, Any], given: dict[str, Any], temperature: float
) -> None:
    reply = await stage.http.post(path, json=body | {"parameters": given})
    assert reply.status_code == 200, reply.text
    [played] = stage.scheduler.played.values()
    assert played.spec.sampling.temperature == temperature

"""Text models by the code of transformers: what `tessera check` says of a folder is what a decoder does on it."""

import re
from pathlib import Path

import pytest

from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.families.check import Parts, require_servable
from services.launcher import check
from shared.errors import InvalidRequest
from tests.support.checkpoints import any_text_type

# Of a random model: by how much it differs. The small model of `tessera check` has other numbers.
_NUMBERS = r"[\d.e+-]+ standard|nan standard"
# One of each reason, and of each kind of layers that is served; "": served.
TYPES = {
    "bart": "decoder of a seq2seq model",
    "bert": "is an encoder",
    "bloom": "give --max-model-len",
    "codegen": "do not attend through the attention interface",
    "cohere2": "",
    "diffllama": "",
    "doge": "masks its attention by itself",
    "falcon": "do not attend through the attention interface",
    "gemma3n_text": "",
    "glm_moe_dsa": "layers of indexed_attention",
    "gpt_oss": "",
    "hrm_text": "how the tokens of its images see each other is not known",
    "longcat_flash": "differs from its own forward",
    "mamba": "recurrent layers",
    "modernbert-decoder": "",
    "musicgen": "its code says",
    "olmo_hybrid": "layers of linear_attention",
    "opt": "",
    "pegasus": "decoder of a seq2seq model",
    "trocr": "do not take position_ids",
}
BY_DEFAULT = ("bart", "bloom")  # which need no comparison


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k in BY_DEFAULT else pytest.mark.full) for k in TYPES],
)
def test_check_says_what_a_decoder_does(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = any_text_type.build(tmp_path / "model", kind)
    reason = decoder_refusal(folder)
    assert bool(reason) == bool(TYPES[kind]) and TYPES[kind] in reason
    assert check.main([str(folder)]) == bool(reason)
    said = capsys.readouterr().out
    assert re.sub(_NUMBERS, "", reason) in re.sub(_NUMBERS, "", said)


def decoder_refusal(folder: Path) -> str:
    """Why a decoder ends at its start; "" for one that serves."""
    try:
        require_servable(folder, parts=Parts.WEIGHTS, trust_remote_code=False)
        load(DecoderSettings(model=folder, threads=1))
    except InvalidRequest as error:
        return error.message
    return ""

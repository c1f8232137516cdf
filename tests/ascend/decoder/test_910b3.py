"""On an Ascend 910B3: the tokens of transformers, as on the 910B4 that all other tests have."""

from pathlib import Path

from tests.ascend.decoder.test_310p import generate
from tests.support.checkpoints import make_checkpoint


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2")
    assert generate(folder, "910B3", dtype="bfloat16") == "served"

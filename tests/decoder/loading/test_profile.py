"""What a decoder says of its steps before anyone has asked for one, and what that costs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.decoder.loading.load import load
from services.decoder.models.llama import Llama
from services.decoder.server import hello
from services.decoder.settings import DecoderSettings
from tests.support.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[3]
# What takes the memory: logits, or the layers.
WIDE = {
    "logits": (
        {"vocab_size": 60_000},
        {"max_num_seqs": 256, "max_num_batched_tokens": 272},
    ),
    "layers": (
        {"hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 4},
        {"max_num_seqs": 8, "max_num_batched_tokens": 1024},
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=pytest.mark.full if i else ())
        for i, k in enumerate(sorted(WIDE)[::-1])
    ],
)
def test_the_largest_step_takes_the_memory_that_was_predicted(tmp_path: Path, kind: str) -> None:
    text, options = WIDE[kind]
    folder = make_checkpoint(tmp_path, "llama", text={"max_position_embeddings": 2048, **text})
    told = {"device": "cpu", "threads": 1, "dtype": "bfloat16", "kv_cache_memory_bytes": 32 << 20}
    found = largest_step(folder, {**told, **options})
    assert found["took"] > 12 << 20, "far above what the kernel may take back meanwhile"
    took, noise = found["took"], 8 << 20
    assert 0.8 * took - noise < found["predicted"] < 1.25 * took + noise


def largest_step(folder: Path, options: dict[str, Any]) -> dict[str, int]:
    """The bytes `predicted`, and those that it `took`."""
    module = "tests.support.decoder.largest_step"
    command = [sys.executable, "-m", module, str(folder), json.dumps(options)]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "protos")))
    said = subprocess.check_output(command, env={**os.environ, "PYTHONPATH": path}, text=True)
    answer: dict[str, int] = json.loads(said.splitlines()[-1])
    return answer


def test_a_start_computes_less_than_one_step_of_the_largest_size(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_in_layers: list[int] = []
    rows_of_logits: list[int] = []
    forward, logits = Llama.forward, Llama.logits

    def counted_forward(self: Any, hidden: Any, step: Any, caches: Any) -> Any:
        tokens_in_layers.append(len(hidden) * len(caches))
        return forward(self, hidden, step, caches)

    def counted_logits(self: Any, hidden: Any) -> Any:
        rows_of_logits.append(len(hidden))
        return logits(self, hidden)

    monkeypatch.setattr(Llama, "forward", counted_forward)
    monkeypatch.setattr(Llama, "logits", counted_logits)
    loaded = load(DecoderSettings(model=llama_folder, device="cpu", threads=1))
    assert 0 < sum(tokens_in_layers) < loaded.worker.limits.max_batched_tokens * 2  # of 2 layers
    assert sum(rows_of_logits) < 8


def test_the_scheduler_is_told_what_a_step_and_a_token_take(llama_folder: Path) -> None:
    loaded = load(DecoderSettings(model=llama_folder, device="cpu", threads=1))
    said = hello("decoder", loaded)
    # On a busy machine the share of a token may be measured as nothing.
    assert said.token_us >= 0 and said.step_us + said.token_us > 0
    assert (said.step_us, said.token_us) == (loaded.profile.step_us, loaded.profile.token_us)

"""On an Ascend 310P: the same tokens in float16, and what it does not have is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ascend.environment import npu_environment
from tests.ascend.support import run_python
from tests.support.checkpoints import make_checkpoint

_GENERATE = """
import asyncio, json, sys, tempfile
from pathlib import Path
from shared.errors import ServingError
from tests.ascend.decoder.test_tokens import check
folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
with tempfile.TemporaryDirectory(dir="/tmp") as socket:
    try:
        asyncio.run(check(folder, Path(socket) / "s", **options))
    except ServingError as error:
        print(json.dumps(error.message))
    else:
        print(json.dumps("served"))
"""

_CHECK = """
import json, torch
from services.decoder.devices.npu.trials import trials
from services.decoder.devices.npu.check import result_of_forms
from services.decoder.devices.npu.checks.check_cases import Cases
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.errors import explain
from services.decoder.devices.npu.forms import Heads, Writing
from shared.hardware.operation_check import try_case
device = NpuDevice(torch.float16)
results = [try_case(case, "", device.synchronize, explain) for case in Cases(device)]
for asked in (Heads(4, 2, 64), Writing(2, 64)):
    forms = device.ops.known_forms(asked)
    tried = list(trials.here(device.ops, [(asked, form) for form in forms]))
    assert all(trial.agrees for trial in tried if trial.form.name != "NZ-host"), tried
    results.append(result_of_forms(device, asked, tried, ""))
with_sinks = Heads(4, 2, 64, sinks=True)
assert not device.ops.known_forms(with_sinks)
sinks = result_of_forms(device, with_sinks, [], "")
assert sinks.ok and "not served" in sinks.detail
print(json.dumps([result.to_json() for result in results if not result.ok]))
"""


def generate(folder: Path, npu: str = "310P3", **options: Any) -> str:
    """ "served" if the tokens are those of transformers, or why the model is refused."""
    arguments = [str(folder), json.dumps(options)]
    code = f"import sys; sys.argv[1:] = {arguments!r}\n{_GENERATE}"
    said: str = json.loads(run_python(code, npu_environment(npu)).splitlines()[-1])
    return said


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama", {"max_position_embeddings": 512}),
        ("mistral", {"sliding_window": 130, "max_position_embeddings": 512}),
        pytest.param("qwen3", {"max_position_embeddings": 512}, marks=pytest.mark.full),
        pytest.param(
            "llama",
            {"head_dim": 256, "max_position_embeddings": 512},
            marks=pytest.mark.full,
        ),
        pytest.param(
            "llama",
            {"head_dim": 80, "num_attention_heads": 4, "max_position_embeddings": 512},
            marks=pytest.mark.full,
        ),
    ],
)
def test_tokens_are_those_of_transformers(
    tmp_path: Path, family: str, text: dict[str, Any]
) -> None:
    folder = make_checkpoint(tmp_path, family, text=text)
    assert generate(folder, chunk=100, longest=300) == "served"


@pytest.mark.parametrize(
    ("family", "text", "dtype", "said"),
    [
        ("llama", {"head_dim": 272}, "float16", "heads of 272 elements"),
        pytest.param("llama", {}, "bfloat16", "use float16", marks=pytest.mark.full),
    ],
)
def test_what_it_does_not_have_is_refused(
    tmp_path: Path, family: str, text: dict[str, Any], dtype: str, said: str
) -> None:
    assert said in generate(make_checkpoint(tmp_path, family, text=text), dtype=dtype)


_ATTEND = """
import json, torch
from services.decoder.devices.npu.trials import trials
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.steps.attention_meta import KVSpec
from tests.ascend.decoder.test_ops import Pair, random
from tests.ascend.decoder.test_experts import ASKED, SWIGLU, difference
trials.apart_or_here = trials.here
found, device = {}, NpuDevice(torch.float16)
counts, keys, spans = [1, 1, 20, 140], [1, 300, 260, 140], [(2, 250, 258), (3, 0, 20), (3, 50, 130)]
with torch.inference_mode():
    for size, windows in ((64, (None, 60)), (256, (60,))):
        for window in windows:
            pair = Pair(device, KVSpec(2, size, size, torch.float16), 13)
            found[f"{size}, {window}"] = pair.attention(4, counts, keys, spans, window=window)
            found[f"{size}, {window}, decode"] = pair.attention(4, [1, 1], [7, 300], window=window)
        ops, k, v = device.ops, random(128, 2, size, seed=1), random(128, 2, size, seed=2)
        ops.import_block(pair.kv, 5, k, v)
        ops.copy_blocks(pair.kv, torch.tensor([5]).npu(), torch.tensor([7]).npu())
        ops.scrub(pair.kv, torch.tensor([7 * 128 + 100]).npu())
        k[100] = v[100] = 0
        copied = [part.cpu() for part in ops.export_block(pair.kv, 7)]
        found[f"{size}, a copied block"] = float(not all(map(torch.equal, copied, (k, v))))
    found["experts"] = difference(device, SWIGLU)
print(json.dumps([device.ops.forms.form(ASKED).name, found]))
"""


def test_windows_spans_and_large_heads_are_the_references() -> None:
    form, found = json.loads(run_python(_ATTEND, npu_environment("310P3")).splitlines()[-1])
    assert form == "grouped_nz"
    for name, error in found.items():
        assert error < 0.02, name


def test_every_operation_is_right() -> None:
    """As `tessera doctor --npu` tries them."""
    said = run_python(_CHECK, npu_environment("310P3"))
    assert json.loads(said.splitlines()[-1]) == []


def test_attention_is_the_references_by_whatever_kernel() -> None:
    """A mixed step, by a form that agrees with the reference, or by the reference itself."""
    program = "import runpy; runpy.run_module('tests.ascend.programs.tiled_attention', run_name='__main__')"
    found = json.loads(run_python(program, npu_environment("310P3")).splitlines()[-1])
    assert {name: form for name, (form, _) in found.items()} == {
        "as_documented": "NZ",
        "with_lengths_on_the_host": "NZ-host",
        "with_the_mask_of_the_next_query": None,
        "without_a_mask": None,
    }
    for name, (_, error) in found.items():
        assert error < 0.01, name

"""The profile of ops: it sees every op, and changes no result."""

from pathlib import Path

import pytest
import torch

from services.decoder.devices.base.op_profile import profile_ops
from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.decoder.worker.plans.plan import read_plan
from services.launcher import cli
from shared.telemetry.op_profile import OpProfile
from tests.support.decoder.step_stream import Text, greedy, introduce, make_plan, read_ints


def one_step(folder: Path, profiled: bool) -> tuple[list[int], OpProfile | None]:
    """The token after a prompt of 40, and what was measured."""
    told = {"model": folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20, "threads": 1}
    loaded = load(DecoderSettings.model_validate(told))
    measured = profile_ops(loaded.device) if profiled else None
    plan = make_plan(
        new=[introduce(Text(0, list(range(40)), greedy()))],
        edit_slot=[0], edit_index=[0], edit_len=[3], edit_blocks=[1, 2, 3],
        row_slot=[0], row_start=[0], row_count=[40], sample_row=[0], sample_slot=[0],
    )  # fmt: skip
    results: list[list[int]] = []
    step = read_plan(plan, loaded.worker.limits)
    loaded.worker.step(step, lambda result: results.append(read_ints(result.tokens)))
    return results[0], measured


def test_every_op_of_a_step_is_counted(llama_folder: Path) -> None:
    plain, _ = one_step(llama_folder, profiled=False)
    token, measured = one_step(llama_folder, profiled=True)
    assert token == plain
    assert measured is not None
    calls = {name: total.calls for name, total in measured.totals.items()}
    layers = 2
    assert calls == {
        "embedding": 1,
        "rms_norm": 1,
        "add_rms_norm": 2 * layers,
        "linear": 3 * layers,
        "gate_up_swiglu": layers,
        "qkv_rope_write": layers,
        "paged_attention": layers,
        "largest": 1,
    }
    assert all(total.seconds > 0 and total.nbytes > 0 for total in measured.totals.values())


def test_bytes_are_those_of_weights_and_rows() -> None:
    device = CpuDevice(torch.float32, threads=1)
    x, weight = torch.randn(3, 64), torch.ones(64)
    measured = profile_ops(device)
    device.ops.rms_norm(x, weight, 1e-6)
    assert measured.totals["rms_norm"].nbytes == 4 * (3 * 64 + 64 + 3 * 64)
    measured.clear()
    assert not measured.totals


def test_the_command_prints_a_table_for_prompt_and_decode(
    llama_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(llama_folder), "--device", "cpu", "--threads", "1", "--sequences", "2"]
    assert cli.run(["profile", *arguments, "--prompt", "30", "--steps", "4"]) == 0
    said = capsys.readouterr().out
    prompt, decode = said[said.index("prompt: 2 steps") :].split("decode: 4 steps")
    for table in (prompt, decode):
        assert "paged_attention" in table and "outside of ops" in table and "total" in table


def test_a_folder_that_is_no_model_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["profile", str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--sequences", "--prompt", "--steps"])
def test_counts_begin_at_one(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run(["profile", "folder", flag, "0"])
    assert flag in capsys.readouterr().err

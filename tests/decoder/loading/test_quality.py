"""What the start says of weights that become codes: what they take, and what that costs where it was measured."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.decoder.loading.load import load
from services.decoder.loading.quality import (
    FILE,
    Quality,
    read_quality,
    write_quality,
)
from services.decoder.settings import DecoderSettings
from shared.checkpoint.content import content_digest
from shared.checkpoint.folder import Checkpoint


def start_log(folder: Path, quantization: str, **changes: Any) -> dict[str, dict[str, Any]]:
    values = {"model": folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20, "threads": 1}
    with capture_logs() as logs:
        load(DecoderSettings.model_validate({**values, "quantization": quantization, **changes}))
    return {line["event"]: dict(line) for line in logs}


def with_measurement(llama_folder: Path, folder: Path) -> Quality:
    shutil.copytree(llama_folder, folder)
    content = content_digest(Checkpoint(folder))
    kl = {"int8": 0.00012345, "int4": 0.25, "kv int8": 0.001, "int8, kv int8": 0.002}
    quality = Quality(content, "pages", 100, kl)
    write_quality(folder, quality)
    return quality


def test_the_start_says_what_codes_take_and_what_they_cost(
    llama_folder: Path, tmp_path: Path
) -> None:
    with_measurement(llama_folder, tmp_path / "model")
    line = start_log(tmp_path / "model", "int8")["quantized weights"]
    assert (line["scheme"], line["group"], line["kl"]) == ("int8", "row", 0.000123)
    assert 0 < line["mb"] < line["mb_before"] / 2  # float32 before
    unmeasured = start_log(llama_folder, "int8")["quantized weights"]
    assert "kl" not in unmeasured


@pytest.mark.parametrize(("quantization", "kl"), [("auto", 0.001), ("int8", 0.002)])
def test_the_start_says_what_a_cache_of_codes_costs(
    quantization: str, kl: float, llama_folder: Path, tmp_path: Path
) -> None:
    with_measurement(llama_folder, tmp_path / "model")
    of_cache = "quantized keys and values"
    line = start_log(tmp_path / "model", quantization, kv_cache_dtype="int8")[of_cache]
    assert (line["kv_dtype"], line["kl"]) == ("int8", kl)
    unmeasured = start_log(llama_folder, quantization, kv_cache_dtype="int8")
    assert "kl" not in unmeasured[of_cache]
    assert of_cache not in start_log(tmp_path / "model", quantization)


def test_four_bits_in_a_small_model_are_warned_of_with_a_figure(
    llama_folder: Path, tmp_path: Path
) -> None:
    with_measurement(llama_folder, tmp_path / "model")
    said = start_log(tmp_path / "model", "int4")
    [warning] = [line for line in said.values() if "weights of 4 bits change" in line["event"]]
    assert said["quantized weights"]["kl"] == warning["kl"] == 0.25
    unmeasured = start_log(llama_folder, "int4")
    assert 0.01 < unmeasured[warning["event"]]["kl_of_demo_model"] < 1
    assert unmeasured["quantized weights"]["group"] == 32  # what int4 means for so few parameters
    assert warning["event"] not in start_log(llama_folder, "int8")


def test_figures_of_other_weights_are_not_those_of_a_model(
    llama_folder: Path, tmp_path: Path
) -> None:
    quality = with_measurement(llama_folder, tmp_path / "model")
    rounded = {**quality.kl, "int8": 0.000123}
    assert read_quality(tmp_path / "model", quality.content) == replace(quality, kl=rounded)
    assert read_quality(tmp_path / "model", b"other") is None
    assert read_quality(llama_folder, quality.content) is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"content": 1}', "[" * 1000, '{"content": "aa", "kl": [1]}'),
        *('{"content": "aa", "kl": {"int8": -1}}', '{"content": "aa", "kl": {"int8": NaN}}'),
    ],
)
def test_a_file_that_is_not_as_measured_ends_no_start(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with capture_logs() as logs:
        assert read_quality(tmp_path, b"\xaa") is None
    assert not logs or logs[0]["log_level"] == "warning"

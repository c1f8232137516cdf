"""Checkpoints that are served, and those that are refused by name."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.decoder.devices.base.device import Memory
from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.loading.load import load
from services.decoder.loading.memory import count_blocks, count_host_blocks, kv_bytes
from services.decoder.settings import DecoderSettings
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest, NotFound, ServingError
from shared.net.channels import open_channel
from shared.queue import connect
from shared.queue.keys import Keys
from shared.queue.registry import Directory
from tests.support.checkpoints import make_checkpoint
from tests.support.queue.members import first_member

ROOT = Path(__file__).parents[3]


def settings(folder: Path, **changes: Any) -> DecoderSettings:
    values = {"model": folder, "device": "cpu", "kv_cache_memory_bytes": 4 << 20, "threads": 1}
    return DecoderSettings.model_validate({**values, **changes})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_checkpoint_reads_what_it_is_asked_for(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llava", shard_bytes=20_000, eos_token_ids=(7, 3))
    checkpoint = Checkpoint(folder)
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert checkpoint.architecture == "LlavaForConditionalGeneration"
    assert checkpoint.text_config["model_type"] == "llama"
    assert checkpoint.vision_config and checkpoint.vision_config["patch_size"] == 14
    assert checkpoint.eos_token_ids() == (3, 7)
    name = "language_model.model.embed_tokens.weight"
    assert name in checkpoint.names() and checkpoint.dtype(name) == "F32"
    assert tuple(checkpoint.tensor(name).shape) == checkpoint.shape(name)
    assert Checkpoint(make_checkpoint(tmp_path / "text", "llama")).vision_config is None


def test_reading_configurations_needs_no_torch(llama_folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from shared.checkpoint.folder import Checkpoint;"
        f"Checkpoint(Path({str(llama_folder)!r})).eos_token_ids(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}


def test_incomplete_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(NotFound, match=r"config\.json"):
        _ = Checkpoint(tmp_path).config
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"config\.json is not JSON"):
        _ = Checkpoint(tmp_path).config
    with pytest.raises(NotFound, match=r"model\.safetensors"):
        Checkpoint(tmp_path).names()
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InvalidRequest, match=r"model\.safetensors cannot be read"):
        Checkpoint(tmp_path).names()


def test_missing_shards_and_tensors_are_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", shard_bytes=20_000)
    with pytest.raises(NotFound, match="no tensor 'x'"):
        Checkpoint(folder).tensor("x")
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(NotFound, match=shard.name):
        Checkpoint(folder).names()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "novel"}, "novel"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "low_freq_factor"),
        (
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "factor": 2.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial_rotary_factor",
        ),
        ({"hidden_size": 128}, "embed_tokens"),
        ({"num_hidden_layers": 3}, r"lacks layers\.2"),
        ({"num_hidden_layers": 1}, r"no use for model\.layers\.1"),
        ({"num_key_value_heads": 3}, "groups"),
    ],
)
def test_configurations_that_cannot_be_served(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    edit_config(folder, **changes)
    with pytest.raises(ServingError, match=message):
        load(settings(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"layer_types": None, "sliding_window": -3}, "sliding_window -3"),
    ],
)
def test_windows_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", text={"use_sliding_window": True})
    edit_config(folder, **changes)
    with pytest.raises(InvalidRequest, match=message):
        load(settings(folder))


def test_unknown_and_missing_tensors_are_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llava")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    norm = "language_model.model.norm.weight"
    for extra, message in (("q_norm", "no use for"), ("sinks", "the model has no place for")):
        name = f"language_model.model.layers.0.self_attn.{extra}.weight"
        save_file({**tensors, name: tensors[norm].clone()}, file, {"format": "pt"})
        with pytest.raises(InvalidRequest, match=rf"{message} .*{extra}"):
            load(settings(folder))
    save_file({k: v for k, v in tensors.items() if k != norm}, file, {"format": "pt"})
    with pytest.raises(InvalidRequest, match=r"lacks norm\.weight"):
        load(settings(folder))
    old = "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**tensors, old: tensors[norm].clone()}, file, {"format": "pt"})
    load(settings(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "npu"}, "npu"),
        ({"device": "toaster"}, "toaster"),
        ({"dtype": "float16"}, "float16"),
        ({"graphs": "on"}, r"\(cpu\) has no graphs"),
        ({"kv_cache_memory_bytes": 1000}, "kv-cache-memory-bytes"),
    ],
)
def test_settings_that_cannot_be_served(
    llama_folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        load(settings(llama_folder, **changes))


def test_what_is_chosen_by_itself(llama_folder: Path) -> None:
    loaded = load(settings(llama_folder, block_size=32, max_model_len=100, graphs="auto"))
    limits = loaded.worker.limits
    assert (limits.block_size, limits.max_model_len, limits.max_batched_tokens) == (32, 100, 272)
    assert str(loaded.device.ops.dtype) == "torch.float32"
    assert loaded.worker.graphs is None
    other = load(settings(llama_folder, dtype="bfloat16"))
    assert other.fingerprint != loaded.fingerprint


GIGA = 1 << 30


class Host(CpuDevice):
    """A CPU whose host has 1000 GiB, half of them free."""

    def memory(self) -> Memory:
        return Memory(500 * GIGA, 1000 * GIGA)


def test_the_cache_takes_the_least_of_its_bounds() -> None:
    assert kv_bytes(0, GIGA, 50 * GIGA) == GIGA
    assert kv_bytes(0, 100 * GIGA, 5) == 5
    assert kv_bytes(7, GIGA, GIGA) == 7
    assert count_blocks(100, 10, 16 * 9, 16) == 10
    assert count_host_blocks(None, 100, 50, 10) == 5
    assert count_host_blocks(None, 4, 50, 10) == 3
    assert count_host_blocks(7, 4, 0, 10) == 7


def test_the_cpu_bounds_the_cache_by_the_size_of_the_model() -> None:
    assert Host(torch.float32).cache_budget(None, 1, 0).nbytes == 4 * GIGA
    assert Host(torch.float32, small_model=True).cache_budget(None, 1, 0).nbytes == GIGA // 2
    assert Host(torch.float32).cache_budget(0.004, 1, GIGA).nbytes == GIGA
    assert Host(torch.float32).swap_bytes(2) == 25 * GIGA


def test_several_decoders_divide_the_memory_and_leave_some_for_a_step() -> None:
    device = Host(torch.float32)
    whole = device.cache_budget(0.006, 1, 0).nbytes
    quarter = device.cache_budget(0.006, 4, 0).nbytes
    assert quarter == whole // 4
    assert device.cache_budget(0.006, 4, quarter // 2).nbytes == quarter - quarter // 2
    assert device.cache_budget(0.006, 4, 1 << 50).nbytes == 0


def test_the_memory_of_the_host_is_seen() -> None:
    found = CpuDevice(torch.float32).memory()
    assert 0 < found.free < found.total < 1 << 60


def test_the_memory_of_a_step_is_seen() -> None:
    device = CpuDevice(torch.float32)
    size = 256 << 20  # far above what the kernel may take back of other pages meanwhile
    assert device.peak_bytes(lambda: None) < size // 4

    def allocate() -> None:
        torch.ones(size // 4).sum()

    seen = device.peak_bytes(allocate)
    assert size * 0.9 < seen < size * 1.5


async def test_the_service_starts_announces_itself_and_leaves_when_told(
    llama_folder: Path, redis_url: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.decoder", "--model", str(llama_folder),
        "--redis-url", redis_url, "--kv-cache-memory-bytes", str(4 << 20), "--threads", "1",
        env=environment(), cwd=ROOT, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    redis = connect(redis_url)
    keys = Keys(llama_folder.name)
    try:
        async with Directory(redis, keys, "decoder") as directory:
            member = await first_member(directory)
        from tests.support.decoder.step_stream import StepStream

        async with StepStream.open(member.address, decoder_id=member.instance_id) as stream:
            assert stream.hello.decoder_id == member.instance_id
        async with open_channel(member.address) as connection:
            from grpc_health.v1 import health_pb2, health_pb2_grpc

            stub: Any = health_pb2_grpc.HealthStub(connection)
            name = "tessera.decoder.v1.DecoderService"
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        log = (await process.stderr.read()).decode()
        assert await process.wait() == 0, log
        assert "blocks=" in log and "Traceback" not in log
        async with Directory(redis, keys, "decoder") as directory:
            assert directory.members == ()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await redis.aclose()


def test_the_decoder_does_not_import_transformers() -> None:
    code = (
        "import sys; import services.decoder.server, services.decoder.models.llama;"
        "import services.decoder.devices.cpu.ops; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())

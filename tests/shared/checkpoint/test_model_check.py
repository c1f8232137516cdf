"""Whether a model can be served is decided from its files, before anything is loaded."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.families import registry
from services.families.check import Parts, require_servable
from shared.errors import InvalidRequest
from shared.hardware import devices
from shared.settings import DEMO_MODEL
from tessera.common.v1.media_pb2 import Modality
from tests.support.checkpoints import GENERIC, make_checkpoint

Change = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that can be served."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    return model


def config(text: bool = False, **changes: Any) -> Change:
    """Changes config.json, or its text_config; None takes a key away."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        content = json.loads(path.read_text())
        part = content["text_config"] if text else content
        part |= changes
        path.write_text(json.dumps(content))

    return change


def removed(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def written(name: str, content: str | bytes) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def renamed(name: str, new: str, content: str | None = None) -> Change:
    """Renames a file, and replaces its content if one is given."""

    def change(folder: Path) -> None:
        (folder / name).rename(folder / new)
        if content is not None:
            (folder / new).write_text(content)

    return change


def sharded(folder: Path) -> None:
    """Three shards by its index, of which one is there."""
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    files = {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"}
    index = json.dumps({"weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index)


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def pickled_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-10])


def unreadable(name: str) -> Change:
    """A regular file of which nobody, not even root, can read the beginning."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("/proc/self/mem")

    return change


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n"


def indexed(folder: Path) -> None:
    """By an index that names a tensor more than the file has."""
    files = dict.fromkeys(
        (*load_file(folder / "model.safetensors"), "more.weight"), "a.safetensors"
    )
    renamed("model.safetensors", "a.safetensors")(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def entry(name: str = "a", **changes: Any) -> Change:
    """A file of two tensors in which that of one says something else, or another one is added."""

    def change(folder: Path) -> None:
        tensor = {"dtype": "F32", "shape": [2, 2]}
        header: dict[str, Any] = {
            "a": tensor | {"data_offsets": [0, 16]},
            "b": tensor | {"data_offsets": [16, 32]},
        }
        header[name] = header.get(name, header["a"]) | changes
        written = json.dumps(header).encode()
        content = len(written).to_bytes(8, "little") + written + bytes(48 if name == "b" else 32)
        (folder / "model.safetensors").write_bytes(content)

    return change


def longer(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + bytes(8))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shutil.rmtree, "no checkpoint folder at"),
        (removed("config.json"), "it has no config.json"),
        (written("config.json", "{"), "cannot read .*config.json"),
        (written("config.json", "[]"), "is not a JSON object"),
        (written("config.json", LFS), "git lfs pull"),
        (unreadable("config.json"), "cannot read .*config.json: Input/output error"),
        (written("config.json", "[" * 100_000), "config.json is nested deeper than 64"),
        (config(architectures=None), 'has no "architectures"'),
        (config(architectures=["NovelForCausalLM"]), "NovelForCausalLM cannot be served; these"),
        (config(True, model_type="novel"), "has the text model 'novel'"),
        (
            config(quantization_config={"quant_method": "gptq"}),
            "gptq: bits is None and may be 4 or 8",
        ),
        (config(True, compression_config={"a": 1}), "of quantized checkpoints those"),
        (
            config(vision_config={"quantization_config": {"quant_method": "awq"}}),
            r"vision_config\.quantization_config says awq: bits is None",
        ),
        (config(True, hidden_act="novel"), "hidden_act 'novel'"),
        (config(True, num_key_value_heads=3), "do not divide"),
        (config(True, rope_parameters={"rope_type": "novel"}), "rope_type 'novel'; there are"),
        (config(True, rope_parameters={"rope_type": "yarn"}), "'yarn' needs factor"),
        (
            config(
                True,
                rope_parameters={
                    "rope_type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                },
            ),
            "short_factor has 1 entries",
        ),
        (config(True, hidden_size="wide"), "hidden_size is .wide., which is no whole number"),
        (config(True, num_attention_heads=0), "0 attention heads"),
        (config(vision_config={"model_type": "novel"}), "LLaVA with a novel tower"),
        (config(vision_feature_layer=99), "vision_feature_layer 99 is outside"),
        (config(projector_hidden_act="novel"), "with the activation novel"),
        (removed("tokenizer.json"), "has no tokenizer.json$"),
        (renamed("tokenizer.json", "vocab.json"), "only vocab.json: write one with"),
        (written("tokenizer.json", ""), "tokenizer.json is empty"),
        (renamed("tokenizer.json", "tokenizer.model", ""), "tokenizer.model is empty"),
        (removed("processor_config.json"), "no preprocessor_config.json"),
        (removed("model.safetensors"), "has no weights"),
        (renamed("model.safetensors", "model.pth"), "in model.pth; only model.safetensors and"),
        (renamed("model.safetensors", "pytorch_model.bin"), "not in the zip format of torch.save"),
        (pickled_short, "only the beginning of a file of torch.save"),
        (renamed("model.safetensors", "model-1.safetensors"), "download that too"),
        (written("model.safetensors", ""), "model.safetensors is empty"),
        (written("model.safetensors", LFS), "git lfs pull"),
        (unreadable("model.safetensors"), "cannot read .*model.safetensors: Input/output error"),
        (written("model.safetensors", b"\xff" * 99), "no safetensors file"),
        (cut_short, "bytes of .*: download it again"),
        (entry(data_offsets=[-8, 8]), r"the tensor a has the data_offsets \[-8, 8\]: download"),
        (entry(data_offsets=[0, 8]), "the tensor a is F32 \\[2, 2\\], of 16 bytes, and has 8"),
        (entry(shape="ab"), "the tensor a has the shape 'ab'"),
        (entry(dtype=None), "the tensor a has the dtype None"),
        (entry("b", data_offsets=[0, 16]), "the tensor a and the tensor b overlap"),
        (entry("b", data_offsets=[32, 48]), "nothing is said of bytes 16 to 32 before .* b"),
        (entry("c", dtype="F16", shape=[8]), "the tensor a and the tensor c overlap"),
        (entry("c", shape=[8], data_offsets=[32, 64]), "has .* bytes of .*: download it again"),
        (longer, "8 bytes follow its last tensor"),
        (sharded, "lacks 2 of 3 files that .* names: b.safetensors, c.safetensors"),
        (written("model.safetensors.index.json", "{}"), 'no "weight_map"'),
        (indexed, "a.safetensors lacks more.weight, which model.safetensors.index.json says is in"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    change: Change, said: str, folder: Path
) -> None:
    require_servable(folder)
    change(folder)
    with pytest.raises(InvalidRequest, match=said):
        require_servable(folder)


@pytest.mark.parametrize("family", GENERIC)
def test_models_with_images_that_no_family_serves_can_be_served(
    family: str, tmp_path: Path
) -> None:
    checkpoint = require_servable(make_checkpoint(tmp_path, family))
    assert registry.find(checkpoint).takes_media
    size = registry.find(checkpoint).largest(checkpoint, Modality.MODALITY_IMAGE)
    # 0: only the processor knows.
    assert size.tokens == {"gemma3": 6, "chameleon": 66, "molmo2": 25, "mllama": 1}.get(family, 0)
    (tmp_path / "preprocessor_config.json").unlink()
    if family != "molmo2":  # it has defaults
        with pytest.raises(InvalidRequest, match=r"no preprocessor_config\.json"):
            require_servable(tmp_path)
    changed = {**checkpoint.config, "architectures": ["NovelForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with pytest.raises(InvalidRequest, match="NovelForConditionalGeneration"):
        require_servable(tmp_path)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"device": "tpu"}, "--device tpu: this version computes on cpu, cuda and npu"),
        ({"device": "cuda"}, "--device cuda: .*give --device cpu"),
        ({"device": "npu"}, "--device npu: torch_npu is not installed .*give --device cpu"),
        ({"dtype": "int4"}, "--dtype int4: it may be auto, float32, bfloat16, float16"),
        ({"dtype": "float16", "device": "cpu"}, "--dtype float16 needs a CUDA device"),
    ],
)
def test_a_device_or_type_that_is_not_here_is_refused(wanted: dict[str, Any], said: str) -> None:
    if wanted.get("device") == "cuda" and not devices.cuda_fault():
        pytest.skip("there is a CUDA device")
    with pytest.raises(InvalidRequest, match=said):
        require_servable(DEMO_MODEL, **wanted)


def test_a_service_requires_the_files_that_it_reads(folder: Path) -> None:
    removed("model.safetensors")(folder)
    require_servable(folder, parts=Parts.TOKENIZER | Parts.PROCESSOR)
    removed("tokenizer.json")(folder)
    require_servable(folder, parts=Parts.PROCESSOR)
    removed("processor_config.json")(folder)
    require_servable(folder, parts=Parts(0))


@pytest.mark.parametrize(
    "name",
    [
        *("gateway", "decoder"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("preprocess", "vision_encoder")),
    ],
)
def test_a_service_refuses_in_one_line_with_the_status_of_a_permanent_failure(
    name: str, folder: Path
) -> None:
    config(architectures=["NovelForCausalLM"])(folder)
    result = service(name, "--model", str(folder))
    assert result.returncode == 2
    said = result.stderr.strip()
    named = said.split("NovelForCausalLM cannot be served; these can: ")[1]
    assert "LlamaForCausalLM" in named and "qwen3" in named
    assert len(said.splitlines()) == 1


def test_the_check_needs_neither_torch_nor_transformers() -> None:
    source = (
        "import sys; from services.families.check import require_servable;"
        "from services.families.prepare import find_servable; from shared.settings import DEMO_MODEL;"
        "require_servable(DEMO_MODEL, device='auto');"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", source]
    path = {"PYTHONPATH": f"{root}:{root / 'protos'}"}
    found = subprocess.run(command, env=path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_header_with_metadata_is_whole(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path), path, {"format": "pt", "note": "x" * 1000})
    require_servable(folder)


def service(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """A service started alone, as a container starts it."""
    root = Path(__file__).parents[3]
    return subprocess.run(
        [sys.executable, "-m", f"services.{name}", *flags],
        env={"PYTHONPATH": f"{root}:{root / 'protos'}", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

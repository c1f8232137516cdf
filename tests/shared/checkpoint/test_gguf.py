"""GGUF files that are broken or hostile are refused by name at once; those that are whole become folders."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from transformers import AutoTokenizer

from services.families.check import require_servable
from services.launcher.settings import ServeSettings
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.gguf.architecture import GgufModel
from shared.checkpoint.gguf.block_types import TYPES
from shared.checkpoint.gguf.families import ARCHITECTURES
from shared.checkpoint.gguf.header import read_header
from shared.checkpoint.gguf.prepared import prepared_folder
from shared.errors import InvalidRequest
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.gguf_files import write_gguf

_TEXT, _LIST, _U32, _U64 = 8, 9, 4, 10
_F32, _Q8_0 = 0, 8


def text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, *sizes: int, kind: int = _F32, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        + struct.pack("<IQ", kind, offset)
    )


def header(
    *parts: bytes, keys: int = 0, tensors: int = 0, version: int = 3, magic: bytes = b"GGUF"
) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts) + bytes(256)


LLAMA = key("general.architecture", _TEXT, text("llama"))
HUGE = 1 << 62


def test_every_architecture_that_is_read_is_said() -> None:
    said = (Path(__file__).parents[3] / "docs/models.md").read_text()
    assert [name for name in ARCHITECTURES if f"`{name}`" not in said] == []


def test_sizes_of_blocks_are_those_of_the_library() -> None:
    for number, block in TYPES.items():
        kind = Kind(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (
            block.name,
            block.elements,
            block.nbytes,
        )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"GGU", "it is no GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        (b"GGUF\x03\x00\x00\x00\x01", "its first bytes: the file ends in it"),
        (header(version=1), "it has version 1; 2 and 3 are read"),
        (header(version=3 << 24), "version 3, in big-endian order"),
        (header(keys=HUGE), "says that it has 4,611,686,018,427,387,904 keys"),
        (header(tensors=HUGE), "says that it has 4,611,686,018,427,387,904 tensors"),
        (header(struct.pack("<Q", HUGE), keys=1), "key number 0 of 1: a text of 4,611"),
        (header(key("a", _TEXT, struct.pack("<Q", 1 << 20)), keys=1), "key a: the file ends in it"),
        (header(key("a", 77, b""), keys=1), "key a: a value of type 77"),
        (header(key("a", _LIST, struct.pack("<IQ", _U32, HUGE)), keys=1), "key a: lists of more"),
        (
            header(key("a", _LIST, struct.pack("<IQ", _U64, 3_000_000)), keys=1),
            "key a: the file ends in it",
        ),
        (
            header(key("a", _LIST, struct.pack("<IQQ", _TEXT, 3, HUGE)), keys=1),
            "key a: the file ends in it",
        ),
        (header(key("a", _LIST, struct.pack("<IQ", _LIST, 1)), keys=1), "key a: a value of type 9"),
        (header(LLAMA, LLAMA, keys=2), "key general.architecture: it is there twice"),
        (
            header(key("general.alignment", _U32, struct.pack("<I", 3)), keys=1),
            "general.alignment is 3, which is no power of two",
        ),
        (header(tensor("w", 4), tensor("w", 4, offset=32), tensors=2), "tensor w is there twice"),
        (header(tensor("w", 4), tensor("v", 4), tensors=2), "tensors w and v overlap"),
        (header(tensor("w", 4, offset=7), tensors=1), "tensor w begins at 7, which is no multiple"),
        (header(tensor("w", 4, offset=1 << 40), tensors=1), r"tensor w \[4\] ends at byte"),
        (header(tensor("w", HUGE, HUGE, HUGE), tensors=1), r"tensor w \[4611.* ends at byte"),
        (header(tensor("w", 0, 4), tensors=1), r"tensor w: its sizes are \[0, 4\]: it is empty"),
        (header(tensor("w"), tensors=1), "tensor w: it has 0 dimensions"),
        (header(tensor("w", 1, 1, 1, 1, 1), tensors=1), "tensor w: it has 5 dimensions"),
        (header(tensor("w", 4, kind=24), tensors=1), "tensor w: it has the type 24, which is not"),
        (header(tensor("w", 40, kind=_Q8_0), tensors=1), "rows of 40 are no whole blocks of Q8_0"),
        (header(tensor("w" * 5000, 4), tensors=1), "a text of 5,000 bytes; 4,096 are read"),
    ],
)
def test_what_is_no_whole_file_is_refused_by_its_header(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=said):
        read_header(path)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("numbers"), "llama", text={"num_hidden_layers": 1}
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders that are prepared are the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def added(name: str, *shape: int) -> Callable[[GGUFWriter], None]:
    return lambda writer: writer.add_tensor(name, np.ones(shape, np.float32))


def left_out(name: str) -> Callable[[GGUFWriter], None]:
    def change(writer: GGUFWriter) -> None:
        del writer.tensors[0][name]

    return change


def said(name: str, value: int) -> Callable[[GGUFWriter], None]:
    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop(name, None)
        writer.add_uint32(name, value)

    return change


def architecture(name: str) -> Callable[[GGUFWriter], None]:
    def change(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["general.architecture"]
        writer.add_string("general.architecture", name)

    return change


def of_a_later_part(writer: GGUFWriter) -> None:
    """It names no architecture."""
    del writer.kv_data[0]["general.architecture"]
    said("split.count", 3)(writer)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (architecture("mamba"), r"is 'mamba'; llama, .* are read: serve the checkpoint that it"),
        (
            architecture("clip"),
            r"is 'clip': it is the vision part of a model \(mmproj\); give the file",
        ),
        (left_out("blk.0.attn_k.weight"), r"it lacks blk\.0\.attn_k\.weight \[32, 64\]"),
        (left_out("token_embd.weight"), r"it lacks token_embd\.weight"),
        (left_out("output_norm.weight"), r"it lacks output_norm\.weight \[64\]"),
        (added("blk.0.ffn_gate_exps.weight", 4, 4), r"ffn_gate_exps\.weight has no place in a mo"),
        (added("blk.7.attn_norm.weight", 64), r"no place for the tensor blk\.7\.attn_norm\.weight"),
        (said("llama.block_count", 2), r"it lacks blk\.1\.attn_norm\.weight"),
        (said("llama.block_count", 1 << 30), r"llama\.block_count is 1,073,741,824"),
        (
            said("llama.embedding_length", 32),
            r"\.weight is \[464, 64\], and by its keys \[464, 32\]",
        ),
        (said("llama.feed_forward_length", 0), r"llama\.feed_forward_length is 0"),
        (said("llama.expert_count", 8), r"ffn_\w+\.weight has no place in a model of the arc"),
        (said("llama.rope.dimension_count", 8), r"rope\.dimension_count is 8, and heads have 16"),
        (said("split.count", 3), r"split\.count is 3: it is one of several files"),
        (of_a_later_part, r"split\.count is 3: it is one of several files"),
    ],
)
def test_a_model_that_is_not_whole_is_refused_by_key_or_tensor(
    tmp_path: Path, numbers: Path, change: Callable[[GGUFWriter], None], why: str
) -> None:
    file = write_gguf(tmp_path / "model.gguf", numbers, {"": Kind.Q8_0}, change)
    with pytest.raises(InvalidRequest, match=why):
        prepared_folder(file)


def test_a_file_that_ends_early_is_refused_and_said_by_check(
    tmp_path: Path, numbers: Path, cache: Path
) -> None:
    file = write_gguf(tmp_path / "model.gguf", numbers, {"": Kind.Q8_0})
    whole = file.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 5000, 24, 3):
        file.write_bytes(whole[:length])
        with pytest.raises(InvalidRequest, match=r"model\.gguf cannot be used"):
            prepared_folder(file)
    command = [sys.executable, "-P", "-m", "services.launcher", "check", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("refused ") and "cannot be used" in done.stdout
    assert not cache.exists() or not list((cache / "tessera").glob("gguf/*"))


def test_a_file_becomes_a_folder_that_is_served(tmp_path: Path, numbers: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(1)

    file = write_gguf(tmp_path / "small.gguf", numbers, {"": Kind.Q8_0}, add)
    settings = ServeSettings.model_validate({"model": file})
    assert settings.model_name == "small"
    folder = prepared_folder(file)
    assert prepared_folder(file) == folder and prepared_folder(folder) == folder
    assert prepared_folder(tmp_path / "nothing") == tmp_path / "nothing"
    checkpoint = require_servable(folder, device="cpu")
    theirs = json.loads((numbers / "config.json").read_text())
    for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim"):
        assert checkpoint.config[name] == theirs[name]
    assert checkpoint.config["quantization_config"] == {
        "quant_method": "gguf",
        "tensors": {"F32": 3, "Q8_0": 9},
    }
    # That of its keys, and by their texts <|endoftext|> and <|im_end|>.
    assert checkpoint.eos_token_ids() == (0, 1, 2)
    question = "Hello wörld, don't 12345\n\n<|im_end|> x"
    original = AutoTokenizer.from_pretrained(numbers)
    made = AutoTokenizer.from_pretrained(folder)
    assert made(question).input_ids == original(question).input_ids
    assert made.chat_template == original.chat_template


def test_a_file_is_known_by_its_content_whatever_its_name(tmp_path: Path, numbers: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", numbers, {"": Kind.Q8_0})
    for name, called in (("sha256-0a1b", "sha256-0a1b"), ("Model-Q8_0.GGUF", "Model-Q8_0")):
        other = file.rename(tmp_path / name)
        assert ServeSettings.model_validate({"model": other}).model_name == called
        require_servable(prepared_folder(other), device="cpu")
        file = other
    assert prepared_folder(tmp_path) == prepared_folder(file)
    (tmp_path / "model.safetensors").write_bytes(bytes(64))
    with pytest.raises(InvalidRequest, match=r"safetensors is a file, and no GGUF: give the folde"):
        prepared_folder(tmp_path / "model.safetensors")


def test_files_beside_it_go_before_what_it_says(tmp_path: Path, numbers: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_gguf(folder / "some.gguf", numbers, {"": Kind.Q8_0})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((numbers / name).read_bytes())
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    made = prepared_folder(folder)
    assert (made / "tokenizer.json").read_bytes() == (numbers / "tokenizer.json").read_bytes()
    assert Checkpoint(made).eos_token_ids() == (7,)
    (folder / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(InvalidRequest, match=r"several GGUF files, other\.gguf, some\.gguf"):
        prepared_folder(folder)


def test_a_tokenizer_that_cannot_be_made_is_refused(tmp_path: Path, numbers: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.model"]
        writer.add_tokenizer_model("unknown")

    file = write_gguf(tmp_path / "model.gguf", numbers, {"": Kind.Q8_0}, change)
    with pytest.raises(InvalidRequest, match=r"its tokenizer cannot be used: .*unknown"):
        prepared_folder(file)


@pytest.mark.parametrize(
    ("add", "expected"),
    [
        (
            lambda writer: writer.add_tensor("rope_freqs.weight", np.full(8, 4, np.float32)),
            {"rope_type": "longrope", "long_factor": [4.0] * 8, "attention_factor": 1.0},
        ),
        (
            lambda writer: (
                writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
                writer.add_rope_scaling_factor(4.0),
            ),
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            lambda writer: (
                writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
                writer.add_rope_scaling_factor(4.0),
                writer.add_rope_scaling_orig_ctx_len(128),
            ),
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_positions_are_scaled_as_the_file_says(
    tmp_path: Path, numbers: Path, add: Callable[[GGUFWriter], Any], expected: dict[str, Any]
) -> None:
    file = write_gguf(tmp_path / "model.gguf", numbers, {"": Kind.Q8_0}, add)
    found = GgufModel(read_header(file)).config()["rope_parameters"]
    assert expected.items() <= found.items()

"""Checkpoint folders that are out of bounds: how each is made of a sound one, and what is said of it."""

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[Path], object]


def written(name: str, content: str | bytes) -> Change:
    """A file with another content."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def changed(name: str, **changes: Any) -> Change:
    """A JSON file with other values; `text_config` and other parts are completed, not replaced."""

    def change(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        for key, value in changes.items():
            part = content.get(key)
            if isinstance(part, dict) and isinstance(value, dict):
                part |= value
            else:
                content[key] = value
        path.write_text(json.dumps(content))

    return change


def text(**changes: Any) -> Change:
    """`config.json` with other values in the part of the language model."""
    return changed("config.json", text_config=changes)


def replaced(name: str, make: Callable[[Path], object]) -> Change:
    """Something that is no file in a file's place."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def linked_fifo(path: Path) -> None:
    """A link to a FIFO."""
    os.mkfifo(path.with_suffix(".pipe"))
    path.symlink_to(path.with_suffix(".pipe"))


def bound_socket(path: Path) -> None:
    """A socket."""
    with socket.socket(socket.AF_UNIX) as made:
        # A relative name: that of a test's folder may be too long for an address.
        here = os.open(path.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


def sparse(nbytes: int) -> Callable[[Path], object]:
    """A file of so many bytes that takes no space."""

    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(nbytes)

    return make


def crowded(path: Path) -> None:
    """Weights with a header of a million entries."""
    entry = '"t%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(entry % i for i in range(1_000_000)) + "}").encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def long_header(path: Path) -> None:
    """Weights that say that their header has 90 MB."""
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 90_000_000) + b"{")
        file.truncate(100_000_000)


def moved(name: str, target: str, change: Change) -> Change:
    """A file under another name, changed."""

    def move(folder: Path) -> None:
        (folder / name).rename(folder / target)
        change(folder)

    return move


DEEP = '{"a":' * 500 + "1" + "}" * 500

# What stands in each folder, and what is said of it: the file, and the key or the bound.
HOSTILE: dict[str, tuple[Change, str]] = {
    "fifo": (replaced("config.json", os.mkfifo), r"config.json is a FIFO, not a file"),
    "linked fifo": (replaced("config.json", linked_fifo), r"config.json is a FIFO, not a file"),
    "device": (
        replaced("config.json", lambda path: path.symlink_to("/dev/zero")),
        r"config.json is a device, not a file",
    ),
    "socket": (replaced("config.json", bound_socket), r"config.json is a socket, not a file"),
    "directory": (replaced("config.json", Path.mkdir), r"config.json is a folder, not a file"),
    "loop": (
        replaced("config.json", lambda path: path.symlink_to(path.name)),
        r"it has no config.json|config.json",
    ),
    "fifo of generation": (
        replaced("generation_config.json", os.mkfifo),
        r"generation_config.json is a FIFO",
    ),
    "fifo of the tokenizer": (replaced("tokenizer.json", os.mkfifo), r"tokenizer.json is a FIFO"),
    "fifo of its configuration": (
        replaced("tokenizer_config.json", os.mkfifo),
        r"tokenizer_config.json is a FIFO",
    ),
    "fifo of the processor": (
        replaced("processor_config.json", os.mkfifo),
        r"processor_config.json is a FIFO",
    ),
    "fifo of the template": (
        replaced("chat_template.jinja", os.mkfifo),
        r"chat_template.jinja is a FIFO",
    ),
    "fifo of weights": (
        replaced("model.safetensors", os.mkfifo),
        r"model.safetensors is a FIFO",
    ),
    "fifo that no reader here looks at": (
        replaced("special_tokens_map.json", os.mkfifo),
        r"special_tokens_map.json is a FIFO",
    ),
    "large": (replaced("config.json", sparse(5 << 30)), r"config.json has more than 16 MiB"),
    "large tokenizer": (
        replaced("tokenizer.json", sparse(5 << 30)),
        r"tokenizer.json has more than 64 MiB",
    ),
    "large template": (
        replaced("chat_template.jinja", sparse(5 << 30)),
        r"chat_template.jinja has more than 4 MiB",
    ),
    "deep": (written("config.json", DEEP), r"config.json is nested deeper than 64 levels"),
    "very deep": (
        written("config.json", "[" * 1_000_000),
        r"config.json is nested deeper than 64 levels",
    ),
    "deep tokenizer": (
        written("tokenizer.json", DEEP),
        r"tokenizer.json is nested deeper than 64 levels",
    ),
    "deep generation": (
        written("generation_config.json", DEEP),
        r"generation_config.json is nested deeper than 64 levels",
    ),
    "many values": (
        written("config.json", '{"a":[' + "[]," * 2_000_000 + "[]]}"),
        r"config.json has more than 1,000,000 JSON values",
    ),
    "not UTF-8": (written("config.json", b'{"a":"\xff\xfe"}'), r"config.json"),
    "layers": (
        text(num_hidden_layers=10**9),
        r"config.json .*text_config.num_hidden_layers is 1000000000; 0 to 10,000",
    ),
    "layers of another part": (
        changed("config.json", vision_config={"num_hidden_layers": 10**9}),
        r"vision_config.num_hidden_layers is 1000000000",
    ),
    "digits": (
        written("config.json", '{"num_hidden_layers": ' + "9" * 5000 + "}"),
        r"config.json",
    ),
    "large number": (text(num_hidden_layers=10**400), r"num_hidden_layers is 10+\.\.\."),
    "NaN": (text(rms_norm_eps=float("nan")), r"text_config.rms_norm_eps is NaN"),
    "infinity": (text(rms_norm_eps=float("inf")), r"text_config.rms_norm_eps is inf"),
    "NaN layers": (text(num_hidden_layers=float("nan")), r"num_hidden_layers is NaN"),
    "infinite length": (
        text(max_position_embeddings=float("inf")),
        r"max_position_embeddings is inf",
    ),
    "negative heads": (text(num_attention_heads=-4), r"text_config.num_attention_heads is -4"),
    "negative groups": (text(num_key_value_heads=-2), r"text_config.num_key_value_heads is -2"),
    "negative vocabulary": (text(vocab_size=-1), r"text_config.vocab_size is -1"),
    "negative size": (text(hidden_size=-64), r"text_config.hidden_size is -64"),
    "vocabulary": (text(vocab_size=10**12), r"text_config.vocab_size is 1000000000000"),
    "length": (text(max_position_embeddings=10**15), r"max_position_embeddings is 10+;"),
    "picture": (
        changed("config.json", vision_config={"image_size": 10**9}),
        r"vision_config.image_size is 1000000000",
    ),
    "patch of nothing": (changed("config.json", vision_config={"patch_size": 0}), r"config.json"),
    "layers in words": (text(num_hidden_layers="many"), r"num_hidden_layers is .many., which"),
    "heads in a list": (
        text(num_attention_heads=[1, 2]),
        r"num_attention_heads is \[1, 2\], which",
    ),
    "parts that are none": (changed("config.json", vision_config=7), r"vision_config is no JSON"),
    "architectures that are none": (
        changed("config.json", architectures=[{"a": 1}]),
        r".",
    ),
    "types that are none": (text(model_type=["llama"]), r"config.json|text model"),
    "positions that are none": (text(rope_parameters=3), r"config.json"),
    "NaN of positions": (
        text(rope_parameters={"rope_type": "default", "rope_theta": float("nan")}),
        r"rope_theta is NaN",
    ),
    "ends that are none": (
        changed("generation_config.json", eos_token_id={"a": [1]}),
        r"eos_token_id is .* no token's id",
    ),
    "NaN of ends": (
        changed("generation_config.json", eos_token_id=float("nan")),
        r"eos_token_id is nan",
    ),
    "ids of tokens": (
        changed("tokenizer.json", model={"vocab": {"a": 10**12}}),
        r"tokenizer.* the id 1000000000000",
    ),
    "tokens that are none": (changed("tokenizer.json", added_tokens=[7]), r"tokenizer"),
    "a tokenizer of nothing": (written("tokenizer.json", '{"model": 3}'), r"tokenizer"),
    "a template that is none": (
        changed("tokenizer_config.json", added_tokens_decoder={"x": 1}),
        r"tokenizer_config.json|tokenizer",
    ),
    "a template that grows": (
        written("chat_template.jinja", "{{ 'a' * 10**10 }}"),
        r"the chat template took more than 512 MB of memory",
    ),
    "a million tensors": (
        replaced("model.safetensors", crowded),
        r"model.safetensors has more than 4,000,000 JSON values",
    ),
    "a long header": (
        replaced("model.safetensors", long_header),
        r"model.safetensors has a header of 90,000,000 bytes",
    ),
    "offsets that are none": (
        written(
            "model.safetensors",
            struct.pack("<Q", 44) + b'{"a":{"data_offsets":[0,Infinity],"dtype":1}}'[:44],
        ),
        r"model.safetensors",
    ),
    "an index of nothing": (
        moved(
            "model.safetensors",
            "a.safetensors",
            written("model.safetensors.index.json", '{"weight_map": {"a": ["b"]}}'),
        ),
        r"model.safetensors.index.json",
    ),
    "a deep index": (
        written("model.safetensors.index.json", DEEP),
        r"model.safetensors.index.json is nested deeper",
    ),
}

"""The packed form of an item for which a request sets options of its processor: one file, so that its digest, and with
it the names of its pixels and embeddings, is another than without them, and they can be made again from it anywhere.

0  8s   magic TSROPTS
8  u32  bytes of the options
12      the options, a JSON object with its keys in order
...     the item's file, or another packed form of it
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

_MAGIC = b"TSROPTS\x01"
_HEAD = struct.Struct("<8sI")

# What an image processor is called with beside its settings, in JSON's types.
Options = Mapping[str, Any]


def pack(options: Options, data: bytes) -> bytes:
    """Packs an item with its options; as it is where there are none."""
    if not options:
        return data
    text = json.dumps(options, sort_keys=True, separators=(",", ":")).encode()
    return _HEAD.pack(_MAGIC, len(text)) + text + data


def is_packed(data: bytes) -> bool:
    """Whether data is packed with options."""
    return data.startswith(_MAGIC)


def unpack(data: bytes) -> tuple[Options, bytes]:
    """The options, none for what has none, and the item. Raises ValueError for what `pack` did not write."""
    if not is_packed(data):
        return {}, data
    if len(data) < _HEAD.size:
        raise ValueError("the item is cut off")
    _, length = _HEAD.unpack_from(data)
    end = _HEAD.size + length
    options: Options = json.loads(data[_HEAD.size : end])
    return options, data[end:]

"""What a tokenizer's normalizer makes of a token. Standard library only.

The tokenizers library shows an added token that is searched in normalized text by its normalized
form: with a normalizer that puts a ▁ in front, such a token has a space.
"""

import unicodedata
from typing import Any, Literal

_FORMS: dict[str, Literal["NFC", "NFD", "NFKC", "NFKD"]] = {
    "NFC": "NFC",
    "NFD": "NFD",
    "NFKC": "NFKC",
    "NFKD": "NFKD",
}


def normalized(config: dict[str, Any] | None, text: str) -> str:
    """`text` by a `normalizer` entry; steps that are not here leave it as it is."""
    if config is None:
        return text
    kind = config.get("type")
    if kind == "Sequence":
        for step in config["normalizers"]:
            text = normalized(step, text)
    elif kind == "Prepend":
        text = config["prepend"] + text if text else text
    elif kind == "Replace" and "String" in config["pattern"]:
        text = text.replace(config["pattern"]["String"], config["content"])
    elif kind in _FORMS:
        text = unicodedata.normalize(_FORMS[kind], text)
    elif kind == "Lowercase":
        text = text.lower()
    elif kind == "Strip":
        text = text.lstrip() if config.get("strip_left") else text
        text = text.rstrip() if config.get("strip_right") else text
    return text

"""What quantization costs, for docs/models.md: the figures that ship with our models."""

import json

from benchmarks.quality.text_model.export import CHECKPOINT as TEXT_MODEL
from services.decoder.loading.quality import FILE
from shared.settings import DEMO_MODEL

_TEXT = """
## What quantization costs

The mean divergence (KL, in nats) of the next token's distribution from that of float32, which transformers computed in
the same run: of the small text model that this project trains for this purpose (`benchmarks/quality/text_model`), and
of the demo model, over {places}. Schemes are those of
[`--quantization`](operations.md#weights-of-8-and-4-bits); `kv int8` is `--kv-cache-dtype int8`, alone with all else in
bfloat16. Tests hold both models to bounds close above, and show that quantizers with a wrong zero, a wrong scale or
half the codes are beyond, and a cache with half the codes. Larger models lose less by the same scheme.

"""
_AFTER = """
`make bench ARGS='quality FOLDER'` measures any model that transformers knows, and with `--also NAME=PATH` the same
model with weights that are stored as codes; `--write` puts the figures beside its weights (`quality.json`), and every
start with a scheme or a cache of codes logs what it costs there. Figures belong to weights: a file beside others is not
believed.

"""


def section() -> str:
    """In Markdown."""
    text, demo = (json.loads((folder / FILE).read_text()) for folder in (TEXT_MODEL, DEMO_MODEL))
    places = " and ".join(f"{one['places']:,} tokens of {one['text']}" for one in (text, demo))
    lines = ["| | text model | demo model |", "| --- | --- | --- |"]
    lines += [f"| {name} | {kl:.2g} | {demo['kl'][name]:.2g} |" for name, kl in text["kl"].items()]
    return _TEXT.format(places=places) + "\n".join(lines) + "\n" + _AFTER

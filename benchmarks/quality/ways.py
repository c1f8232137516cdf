"""Ways of computing a model whose quality is measured: settings of the decoder, by the name that tables have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.decoder.loading.quality import way_name
from shared.kv_cache_dtype import INT8
from shared.weights.scheme import NONE, SCHEMES


@dataclass(frozen=True)
class Way:
    """`settings` of `DecoderSettings`; `model`: another checkpoint of the same model, such as one whose weights are
    stored as codes, in the place of the one that is measured."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    model: Path | None = None


# Whatever the decoder learns to compute in another way gets a line here. What `--quantization` has is there already.
WAYS: Mapping[str, Way] = {
    "float32": Way({"dtype": "float32"}),
    "bfloat16": Way({"dtype": "bfloat16"}),
    **{name: Way({"quantization": name}) for name in SCHEMES},
    way_name(NONE, INT8): Way({"dtype": "bfloat16", "kv_cache_dtype": INT8}),
    way_name("int8", INT8): Way({"quantization": "int8", "kv_cache_dtype": INT8}),
}

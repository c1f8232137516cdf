"""The tensors of a quantized checkpoint, checked by their headers before anything is started."""

import re
from collections.abc import Iterable, Iterator

from services.families import registry
from services.families.family import is_generic
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.headers import HeaderFiles
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from shared.model_config.decoder import DecoderConfig
from shared.model_config.quantization import (
    FLOAT8,
    StoredCodes,
    quantization_said,
    read_encoder_codes,
    read_stored_codes,
)
from shared.weights.layouts.stored_layers import LAYOUTS, StoredLayers, is_unused

# Layers that are computed as one.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Tensors that codes have beside them, by the last part of their names, and files in which tools tell of these.
_OF_CODES = frozenset(
    (
        "qweight",
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "deq_scale",
        "absmax",
        "SCB",
        "_data",
    )
)
_OF_TOOLS = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_OF_QUANTO = "quanto_qmap.json"
_NUMBERED = re.compile(r"(.*\.)(\d+)(\.[^0-9]+)")
_LANGUAGE = re.compile(r"(model\.)?(language_model|text_model)\.|lm_head\.")
_OF_BLOCKS = re.compile(r".*\.\d+\.(self_attn|mlp)\.(\w+)")


def coded_layers(checkpoint: Checkpoint, backend: ModelBackend) -> StoredLayers | None:
    """Those of a decoder of ours; None where it is not quantized, or its tensors are not in safetensors. Raises
    InvalidRequest, naming the tensor, for layers that are not stored as the configuration says."""
    if is_generic(registry.find_decoder(checkpoint, backend).decoder):
        return None
    headers = HeaderFiles.open(checkpoint.folder)
    if headers is None:
        return None
    own = encoder_names(checkpoint, headers.names())
    others = set(headers.names()) - own
    return _stored_layers(checkpoint, headers, read_stored_codes(checkpoint), others)


def require_coded_tensors(checkpoint: Checkpoint, backend: ModelBackend) -> None:
    """Raises InvalidRequest, naming the tensor, for a quantized checkpoint of which a part that is ours would be
    refused when it is loaded: a layer without one of its tensors, or with one of another shape, type or content than
    is needed."""
    if is_generic(registry.find_decoder(checkpoint, backend).decoder):
        _require_all_parts(checkpoint)
        return
    _require_encoder(checkpoint)
    layers = coded_layers(checkpoint, backend)
    if layers is None:
        return
    config = registry.text_sizes(checkpoint, backend)
    if isinstance(config, DecoderConfig) and not config.attends_to_media:
        _require_all(checkpoint, layers, config.num_layers)
        for name in layers:
            if (sizes := _sizes(config, name)) is not None:
                layers.require_sizes(name, *sizes)
    for fused in _fused(layers):
        layers.require_one_order(fused)
    for name in layers:
        layers.require_middle(name)


def encoder_names(checkpoint: Checkpoint, names: Iterable[str]) -> set[str]:
    """Those among the names of a checkpoint's tensors that are of its encoder and projector: as its family says, or
    all but those of a language model, by the names that classes of transformers give it."""
    family, every = registry.find(checkpoint), set(names)
    if family.takes_media and not family.encoder_tensors:
        language = {name for name in every if _LANGUAGE.match(name)}
        return every - language if language else set()
    parts = "|".join(map(re.escape, family.encoder_tensors))
    own = re.compile(rf"(model\.)?({parts})(\.|$)" if parts else "(?!)")
    return {name for name in every if own.match(name)}


def _require_encoder(checkpoint: Checkpoint) -> None:
    """`require_coded_tensors` for the encoder's part. Its sizes are known to its code alone."""
    headers = HeaderFiles.open(checkpoint.folder)
    if headers is None:
        return
    own = encoder_names(checkpoint, headers.names())
    layers = _stored_layers(checkpoint, headers, read_encoder_codes(checkpoint), own)
    if layers is not None:
        _require_layers(layers)


def _require_all_parts(checkpoint: Checkpoint) -> None:
    """`require_coded_tensors` where the code of transformers runs the layers, to which codes are given as numbers."""
    headers = HeaderFiles.open(checkpoint.folder)
    codes = read_stored_codes(checkpoint)
    if headers is None or codes is None:
        return
    names = {name for name in headers.names() if not is_unused(codes, name)}
    layers = _stored_layers(checkpoint, headers, codes, names)
    assert layers is not None
    layers.require_no_others()
    _require_layers(layers)


def _require_layers(layers: StoredLayers) -> None:
    for name in layers:
        layers.order(name)
        layers.require_middle(name)


def _stored_layers(
    checkpoint: Checkpoint, headers: HeaderFiles, codes: StoredCodes | None, names: set[str]
) -> StoredLayers | None:
    """Those of a part of the checkpoint, of the tensors `names`, that are stored as `codes` say."""
    if codes is None:
        _refuse_unexplained(checkpoint, names)
        return None
    layout = LAYOUTS[codes.layout](codes)
    return StoredLayers(headers, layout, {name: name for name in names})


def _refuse_unexplained(checkpoint: Checkpoint, names: set[str]) -> None:
    """Raises InvalidRequest for codes among the tensors `names` of which nothing says what they mean."""
    if quantization_said(checkpoint) is not None:  # all of whose layers are numbers
        return
    name = next((n for n in sorted(names) if n.rpartition(".")[2] in _OF_CODES), None)
    if name is None:
        return
    if (checkpoint.folder / _OF_QUANTO).is_file():
        raise InvalidRequest(
            "UNSUPPORTED_WEIGHTS",
            f"{checkpoint.folder}: {name} is of a quantized layer, and by {_OF_QUANTO} it is optimum-quanto's, which is"
            " not read; serve the model in float32, float16 or bfloat16",
            field="model",
        )
    beside = next((file for file in _OF_TOOLS if (checkpoint.folder / file).is_file()), "")
    advice = (
        f"{beside} says it as older tools did: put its content there, with quant_method"
        if beside
        else "use the config.json that these weights came with"
    )
    raise InvalidRequest(
        "UNSUPPORTED_WEIGHTS",
        f"{checkpoint.folder}: {name} is of a quantized layer, and config.json has no quantization_config, which says"
        f" what its codes mean: {advice}",
        field="model",
    )


def _sizes(config: DecoderConfig, layer: str) -> tuple[int, int] | None:
    """Outputs and inputs of a layer by its usual name; None where it has another."""
    found = _OF_BLOCKS.fullmatch(layer)
    if found is None:
        return None
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = (heads * config.head_size for heads in (config.num_heads, config.num_kv_heads))
    known = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "qkv_proj": (queries + 2 * keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "gate_up_proj": (2 * inner, hidden),
        "down_proj": (hidden, inner),
    }
    return known.get(found[2])


def _fused(layers: StoredLayers) -> Iterator[list[str]]:
    """Layers that are computed as one, and all others alone. Raises InvalidRequest where some are quantized alone."""
    seen: set[str] = set()
    for name in layers:
        stem, _, last = name.rpartition(".")
        together = next((fused for fused in _FUSED if last in fused), ())
        found = [f"{stem}.{part}" for part in together] if _OF_BLOCKS.fullmatch(name) else []
        found = found or [name]
        if found[0] in seen:
            continue
        seen.add(found[0])
        missing = [part for part in found if part not in layers]
        if missing and layers.layout.codes.layout != FLOAT8:
            raise InvalidRequest(
                "UNSUPPORTED_WEIGHTS",
                f"{layers.folder}: {missing[0]} is not quantized, or not there, and {name} is, with which it is"
                " computed as one",
                field="model",
            )
        yield [part for part in found if part in layers]


def _require_all(checkpoint: Checkpoint, layers: StoredLayers, count: int) -> None:
    """Raises InvalidRequest where one of `count` blocks lacks a layer that others have."""
    found: dict[tuple[str, str], set[int]] = {}
    for name in layers.all_layers():
        if (parts := _NUMBERED.fullmatch(name)) is not None:
            found.setdefault((parts[1], parts[3]), set()).add(int(parts[2]))
    coded = {
        (parts[1], parts[3]) for name in layers if (parts := _NUMBERED.fullmatch(name)) is not None
    }
    for stem, end in sorted(coded):
        if missing := sorted(set(range(count)) - found[stem, end]):
            raise InvalidRequest(
                "BAD_CHECKPOINT",
                f"{checkpoint.folder}: the checkpoint lacks {stem}{missing[0]}{end}.{layers.layout.main}",
                field="model",
            )

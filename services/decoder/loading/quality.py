"""What quantization costs a checkpoint, where it was measured: `quality.json` beside its weights."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from services.decoder.devices.base.ops import BaseOps
from shared import kv_cache_dtype
from shared.bounded_file import read_value
from shared.checkpoint.folder import Checkpoint
from shared.settings import DEMO_MODEL
from shared.text.cutting import cut
from shared.weights.scheme import AUTO, NONE, SMALL

FILE = "quality.json"
log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Quality:
    """`kl`: mean Kullback-Leibler divergence of the next token's distribution from that of float32, in nats, by what
    `--quantization` says ("bfloat16" for none of it in that type) and `way_name` of a cache of codes, over `places`
    tokens of `text`."""

    content: bytes  # the digest of the weights (`shared/checkpoint/content.py`)
    text: str
    places: int
    kl: Mapping[str, float]


def way_name(quantization: str, kv_cache: str) -> str:
    """What figures of both are called: the scheme's name alone unless the cache is of codes."""
    if kv_cache == kv_cache_dtype.AUTO:
        return quantization
    cache = f"kv {kv_cache}"
    return cache if quantization in (AUTO, NONE) else f"{quantization}, {cache}"


def write_quality(folder: Path, quality: Quality) -> Path:
    """Replaces what the folder has; returns the file."""
    file = folder / FILE
    rounded = {name: float(f"{value:.3g}") for name, value in quality.kl.items()}
    told = {
        "content": quality.content.hex(),
        "text": quality.text,
        "places": quality.places,
        "kl": rounded,
    }
    file.write_text(json.dumps(told, indent=2) + "\n")
    return file


def read_quality(folder: Path, content: bytes) -> Quality | None:
    """None where the folder has no such file, or one that was measured with other weights; so a fine-tune that was
    copied with it does not have the figures of its origin. One that cannot be read is left out with a warning."""
    try:
        value = read_value(folder / FILE)
        return _read(value) if value["content"] == content.hex() else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning(f"{FILE} is left out: it is not as measured", reason=cut(str(error), 200))
        return None


def tell_codes(checkpoint: Checkpoint, quantization: str, ops: BaseOps, content: bytes) -> None:
    """Logs which layers were packed as codes, what they take and took, and what that costs: the divergence that was
    measured with this checkpoint, and of 4 bits in a small model at least the demo model's.

    content: see `Quality`; empty where another rank tells this.
    """
    if not ops.coded_layers:
        return
    told = {
        "layers": ops.coded_layers,
        "mb": _megabytes(ops.coded_bytes),
        "mb_before": _megabytes(ops.coded_weights * ops.dtype.itemsize),
    }
    if ops.scheme is None:
        log.info("quantized weights", scheme="of the checkpoint", **told)
        return
    quality = read_quality(checkpoint.folder, content) if content else None
    known = quality.kl if quality else {}
    if quantization in known:
        told["kl"] = known[quantization]
    log.info("quantized weights", scheme=quantization, group=ops.scheme.group or "row", **told)
    if ops.scheme.bits == 4 and checkpoint.num_parameters < SMALL and content:
        compared = (
            {"kl": told["kl"]}
            if "kl" in told
            else {"kl_of_demo_model": _of_demo_model(quantization)}
        )
        log.warning(
            "weights of 4 bits change answers of so small a model; int8 and calibrated codes do less",
            parameters_m=round(checkpoint.num_parameters / 1e6),
            **compared,
        )


def tell_cache(checkpoint: Checkpoint, quantization: str, kv_cache: str, content: bytes) -> None:
    """Logs that keys and values are codes, and the divergence that was measured with this checkpoint, of bfloat16 or
    `quantization` together with them.

    content: see `tell_codes`.
    """
    if kv_cache == kv_cache_dtype.AUTO:
        return
    quality = read_quality(checkpoint.folder, content) if content else None
    name = way_name(quantization, kv_cache)
    measured = {"kl": quality.kl[name]} if quality and name in quality.kl else {}
    log.info("quantized keys and values", kv_dtype=kv_cache, **measured)


def _of_demo_model(quantization: str) -> float | None:
    """Of 7 million parameters. None where its folder lacks the figure."""
    try:
        return float(read_value(DEMO_MODEL / FILE)["kl"][quantization])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _megabytes(size: int) -> float:
    return round(size / (1 << 20), 1)


def _read(value: dict[str, Any]) -> Quality:
    kl = {str(name): float(one) for name, one in value["kl"].items()}
    if not all(math.isfinite(one) and one >= 0 for one in kl.values()):
        raise ValueError("a divergence is a number that is not negative")
    return Quality(bytes.fromhex(value["content"]), str(value["text"]), int(value["places"]), kl)

"""How the keys and values of a decoder's cache are kept: what `--kv-cache-dtype` may say. Without torch."""

from typing import Literal

from shared.errors import InvalidRequest

KvCacheDtype = Literal["auto", "int8"]
AUTO: KvCacheDtype = "auto"  # as the model computes
INT8: KvCacheDtype = "int8"  # codes of 8 bits, with a scale for each token and head


def refused(name: str, why: str) -> InvalidRequest:
    """The error of a cache that cannot be had."""
    return InvalidRequest(
        "UNSUPPORTED_KV_CACHE", f"--kv-cache-dtype {name}: {why}", field="kv_cache_dtype"
    )

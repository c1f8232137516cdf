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


def require_on_npu(name: str, is_310p: bool) -> None:
    """Raises InvalidRequest for a cache that no operator of these NPUs attends to."""
    if name != AUTO and is_310p:
        raise refused(
            name,
            "on an Ascend 310P no operator attends to codes (a 910B has one); leave the flag away",
        )

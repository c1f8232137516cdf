"""Which requests share computed prefixes: the salt with which the hashes of a request's KV blocks begin.

A hit shows in `cached_tokens` and in the time to the first token, so a caller who may hit a prefix can find out its
text, guess by guess.
"""

import hashlib

_SALT_BYTES = 16


def salt_of(tenant: str, cache_salt: str) -> bytes:
    """16 bytes from the tenant whose prefixes are its own (empty: shared by all) and the request's salt; nothing where
    both are empty. Requests share blocks if these are equal.
    """
    if not tenant and not cache_salt:
        return b""
    # A tenant's name is a digest: none has a zero byte.
    content = f"{tenant}\0{cache_salt}".encode()
    return hashlib.blake2b(content, digest_size=_SALT_BYTES).digest()

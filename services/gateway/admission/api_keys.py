"""API keys."""

import hashlib
import hmac
from collections.abc import Sequence

from services.gateway.admission.caller import Caller
from shared.environment import monotonic
from shared.errors import Unauthenticated


class ApiKeys:
    """The keys that are accepted; without any, every caller is accepted.

    A token is compared with every key, and by digests of one length: the time that it takes tells neither which key
    was nearly right nor how long one is.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [(_digest(key), key) for key in keys]

    def caller(
        self, request_id: str, authorization: str, traceparent: str, *, needed: bool = True
    ) -> Caller:
        """The caller. Raises Unauthenticated for a missing or unknown key where one is `needed`."""
        scheme, _, token = authorization.partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        now = monotonic()
        if not self._keys:
            return Caller(request_id, "", token, traceparent, now)
        key = self._find(token)
        if needed and not key:
            raise Unauthenticated(
                "INVALID_API_KEY", "send a valid API key as `Authorization: Bearer <key>`"
            )
        return Caller(request_id, key, "", traceparent, now)

    def _find(self, token: str) -> str:
        """The key that the token is; empty for none."""
        asked = _digest(token)
        found = ""
        for digest, key in self._keys:
            if hmac.compare_digest(digest, asked):
                found = key
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()

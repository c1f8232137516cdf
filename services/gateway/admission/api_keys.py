"""API keys, and the headers in which they come."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.admission.caller import Caller, Header
from shared.environment import monotonic
from shared.errors import Unauthenticated
from shared.telemetry.request_names import trace_parent


@dataclass(frozen=True, slots=True)
class KeyHeader:
    """A header (or metadata of gRPC) in which clients of an API send their key: behind the name of a scheme
    (RFC 9110, 11.4), or alone where `scheme` is empty.
    """

    name: str
    scheme: str = ""

    def read(self, header: Header) -> str:
        """The key that came; empty for none."""
        value = header(self.name.lower())
        if not self.scheme:
            return value.strip()
        scheme, _, token = value.partition(" ")
        return token.strip() if scheme.lower() == self.scheme.lower() else ""

    def __str__(self) -> str:
        return f"`{self.name}: {self.scheme and self.scheme + ' '}<key>`"


BEARER = KeyHeader("Authorization", "Bearer")
X_API_KEY = KeyHeader("X-Api-Key")


class ApiKeys:
    """The keys that are accepted; without any, every caller is accepted.

    A token is compared with every key, and by digests of one length: the time that it takes tells neither which key
    was nearly right nor how long one is.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [(_digest(key), key) for key in keys]

    def caller(
        self,
        request_id: str,
        header: Header,
        where: Sequence[KeyHeader] = (BEARER,),
        *,
        needed: bool = True,
    ) -> Caller:
        """The caller, whose key stands in one of the headers `where`. Raises Unauthenticated for a missing or unknown
        key where one is `needed`.
        """
        tokens = [token for place in where if (token := place.read(header))]
        traceparent, now = header("traceparent"), monotonic()
        if traceparent and trace_parent(traceparent) is None:
            traceparent = ""
        if not self._keys:
            return Caller(request_id, "", tokens[0] if tokens else "", traceparent, now)
        key = next(filter(None, map(self._find, tokens)), "")
        if needed and not key:
            named = " or ".join(map(str, where))
            raise Unauthenticated("INVALID_API_KEY", f"send a valid API key as {named}")
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

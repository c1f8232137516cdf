"""API keys: who may ask, and who asks."""

import hmac
import time
from dataclasses import dataclass

from services.gateway.caller import Caller
from shared.errors import Unauthenticated


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The keys that are accepted; none means that everybody is let in."""

    keys: tuple[str, ...]

    def caller(
        self, request_id: str, authorization: str, traceparent: str, *, needed: bool = True
    ) -> Caller:
        """Who asks. Raises Unauthenticated."""
        scheme, _, token = authorization.partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else ""
        now = time.monotonic()
        if not self.keys:
            return Caller(request_id, "", token, traceparent, now)
        known = [key for key in self.keys if hmac.compare_digest(key.encode(), token.encode())]
        if needed and not known:
            raise Unauthenticated(
                "INVALID_API_KEY", "send a valid API key as `Authorization: Bearer <key>`"
            )
        return Caller(request_id, known[0] if known else "", "", traceparent, now)

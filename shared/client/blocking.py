"""The same client for code without an event loop."""

import asyncio
import ssl
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from shared.client.events import Event
from shared.client.resuming import Client


class BlockingClient:
    """A `Client` with its own event loop, which runs while an event is awaited. One thread, one stream at a time."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str = "",
        patience_s: float = 60.0,
        tries: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """The arguments are those of `Client`."""
        self._client = Client(urls, api_key=api_key, patience_s=patience_s, tries=tries, tls=tls)
        self._runner = asyncio.Runner()

    def get(self, path: str) -> Any:
        """A JSON document. Raises ClientError."""
        return self._runner.run(self._client.get(path))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Event]:
        """The events of a streamed completion. Raises ClientError. Leaving it, also by Ctrl-C, cancels the request."""
        events = self._client.stream(path, body)

        async def next_event() -> Event | None:
            return await anext(events, None)

        try:
            while (event := self._runner.run(next_event())) is not None:
                yield event
        finally:
            self._runner.run(events.aclose())

    def close(self) -> None:
        """Ends connections and loop."""
        self._client.close()
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

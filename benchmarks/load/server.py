"""The server under load: what it serves, and one completion as a client meets it."""

import asyncio
import json
import time

from benchmarks.load.errors import BenchError
from benchmarks.load.event_reader import EventReader
from benchmarks.load.recording import Recording
from shared.client.http import HttpClient, HttpError, HttpRefusal

_INVALID = (400, 422)  # OpenAI's and FastAPI's word for a field that is not known


class Server:
    """Streams completions from one endpoint and records each."""

    def __init__(self, client: HttpClient, endpoint: str, timeout_s: float) -> None:
        self._client = client
        self._endpoint = endpoint
        self._timeout_s = timeout_s

    async def only_model(self) -> str:
        """The name of the model that it serves. Raises BenchError if it is away or has none."""
        try:
            listed = json.loads(await self._client.get("/v1/models"))
            return str(listed["data"][0]["id"])
        except HttpError as error:
            raise BenchError(str(error)) from None
        except (ValueError, LookupError, TypeError):
            raise BenchError("/v1/models lists no model: give --model") from None

    async def complete(self, body: bytes) -> Recording:
        """Sends one request and reads its stream to the end. Never raises but for a cancel: see `error`."""
        reader = EventReader()
        recording = Recording(time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.request("POST", self._endpoint, body, reader.feed)
        except TimeoutError:
            recording.error = f"no complete answer within {self._timeout_s:g} s"
        except HttpError as error:
            recording.error = str(error)
        recording.ended = time.perf_counter()
        _fill(recording, reader)
        return recording

    async def refusal(self, body: bytes) -> str:
        """Why it refuses such a request as invalid, empty if it answers. Raises BenchError for all else."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._client.request("POST", self._endpoint, body, bytes)
        except HttpRefusal as error:
            if error.status in _INVALID:
                return str(error)
            raise BenchError(str(error)) from None
        except HttpError as error:
            raise BenchError(str(error)) from None
        except TimeoutError:
            raise BenchError(f"no complete answer within {self._timeout_s:g} s") from None
        return ""


def _fill(recording: Recording, reader: EventReader) -> None:
    usage = reader.usage()
    recording.times, recording.counts = reader.times, reader.counts
    recording.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    recording.output_tokens = int(usage.get("completion_tokens") or 0) or sum(reader.counts)
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict):
        recording.cached_tokens = int(details.get("cached_tokens") or 0)
    if not recording.error:
        recording.error = reader.error()
    if not recording.error and not recording.times:
        recording.error = "the answer has no tokens"

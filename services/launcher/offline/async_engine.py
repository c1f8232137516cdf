"""`AsyncEngine`: the same for programs with an event loop, with answers as they come. Names are those of vLLM's
`AsyncLLMEngine`.
"""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from services.launcher.offline.engine.engine_process import EngineProcess
from services.launcher.offline.outputs import RequestOutput
from services.launcher.offline.prompts.adapters import Adapter, adapted
from services.launcher.offline.prompts.prompts import read_prompt
from services.launcher.offline.requests.requests import Requests
from services.launcher.offline.sampling_params import SamplingParams

_UNSET: Any = object()


class AsyncEngineArgs:
    """A model, and the flags of `tessera serve` as keyword arguments."""

    def __init__(self, model: str | Path | None = None, **flags: Any) -> None:
        self.model = model
        self.flags = flags


class AsyncEngine:
    """A model and all that serves it, as child processes of this one."""

    def __init__(self, model: str | Path | None = None, **flags: Any) -> None:
        """See `LLM`. Blocks until the model is ready."""
        self._engine = EngineProcess(model, flags)
        self._close = weakref.finalize(self, self._engine.stop)
        # Connections belong to the loop that they were made in.
        self._requests: Requests | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[str, asyncio.Future[None]] = {}
        self._active = 0
        try:
            self._engine.wait_ready()
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> Self:
        """The engine that the arguments describe."""
        return cls(engine_args.model, **engine_args.flags)

    async def generate(
        self,
        prompt: Any = _UNSET,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        inputs: Any = _UNSET,
        lora_request: Adapter = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come, each with all that has come so far; the last one is `finished`. Leaving it before
        cancels the request. `prompt`, or `inputs` as older versions of vLLM call it, is what `LLM.generate` takes;
        `request_id` is the caller's name for the request, for `abort`; `lora_request` as of `LLM.generate`.

        Raises RequestRefused, EngineFailed.
        """
        if (prompt is _UNSET) == (inputs is _UNSET):
            raise TypeError("generate() takes either prompt or inputs")
        if request_id in self._open:
            raise ValueError(f"request_id {request_id!r} is that of another open request")
        [read] = adapted([read_prompt(inputs if prompt is _UNSET else prompt)], lora_request)
        aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if request_id:
            self._open[request_id] = aborted
        requests = self._of_loop()
        self._active += 1
        try:
            outputs = requests.stream(request_id, read, sampling_params, aborted)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
        finally:
            self._open.pop(request_id, None)
            self._active -= 1
            if not self._active:  # the loop may end now
                requests.close()

    async def abort(self, request_id: str) -> None:
        """Ends a request: its stream ends with a finished output of the reason "abort". One that is not open is left
        alone.
        """
        found = self._open.get(request_id)
        if found is not None and not found.done():
            found.set_result(None)

    def shutdown(self) -> None:
        """Ends all processes. Nothing can be asked any more."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _of_loop(self) -> Requests:
        """The requests of the running loop."""
        if not self._close.alive:
            raise RuntimeError("this engine is shut down")
        loop = asyncio.get_running_loop()
        if self._requests is None or self._loop is not loop:
            self._requests = self._engine.requests()
            self._loop = loop
        return self._requests


AsyncLLMEngine = AsyncEngine

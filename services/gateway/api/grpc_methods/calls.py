"""What methods of gRPC that make requests share: the caller, the reading of messages, and the end of the call."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from services.gateway.admission.api_keys import ApiKeys
from services.gateway.admission.caller import Caller, Header, tenant_of
from services.gateway.admission.request_options import (
    RequestOptions,
    Timeouts,
    digest,
    read_request_options,
)
from services.gateway.decoding.decode import in_thread, is_large
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.options import GenerationOptions
from services.gateway.telemetry.metrics.metrics import Metrics
from services.gateway.telemetry.refusals import Refusals, Refused
from shared.environment import monotonic
from shared.errors import ServingError
from shared.queue.keys import model_tag, new_request_id
from shared.telemetry import request_names

_T = TypeVar("_T")


@dataclass(slots=True)
class GrpcCall:
    """A call whose caller is known."""

    caller: Caller
    tenant: str  # until its message has been read by the key alone
    accepted: bool = False  # what goes wrong from then on is no refusal


class GrpcCalls:
    """Names calls, and reads their messages."""

    def __init__(
        self,
        model: ServedModel,
        metrics: Metrics,
        refusals: Refusals,
        keys: ApiKeys,
        timeouts: Timeouts,
    ) -> None:
        """`timeouts` are the server's own."""
        self._metrics = metrics
        self._refusals = refusals
        self._keys = keys
        self._timeouts = timeouts
        self._tag = model_tag(model.name)

    def caller(self, context: Any) -> Caller:
        """Who calls. Raises Unauthenticated."""
        return self._keys.caller("", _metadata(context))

    @contextlib.contextmanager
    def begun(self, method: str, context: Any) -> Iterator[GrpcCall]:
        """A call that makes a request: what is raised within the block before that is accepted is logged as its
        refusal. Raises Unauthenticated.
        """
        client_request_id = request_names.clients_name(_metadata(context)("x-request-id"))
        request_id = new_request_id(self._tag)
        request_names.bind(request_id, client_request_id, _metadata(context)("traceparent"))
        began = monotonic()
        call: GrpcCall | None = None
        try:
            caller = self._keys.caller(request_id, _metadata(context))
            caller = replace(caller, client_request_id=client_request_id)
            call = GrpcCall(caller, tenant_of(caller, ""))
            yield call
        except ServingError as error:
            if call is None or not call.accepted:
                error.metadata.setdefault("request_id", request_id)
                refused = Refused(
                    request_id,
                    client_request_id,
                    _metadata(context)("traceparent"),
                    f"grpc {method.capitalize()}",
                    call.tenant if call is not None else None,
                )
                self._refusals.note(error, refused, began)
            raise

    async def read(
        self,
        message: Message,
        read: Callable[[], tuple[_T, GenerationOptions]],
        method: str,
        context: Any,
        times: int = 1,
    ) -> tuple[_T, RequestOptions]:
        """What `read` makes of a message, whose values it may read so many times, and what metadata and options ask
        for beside it. Raises ServingError.
        """
        work = partial(self._read, message, read, method, context)
        return await in_thread(work) if is_large(message.ByteSize() * times) else work()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """What is raised within the block is counted as a refusal."""
        try:
            yield
        except ServingError as error:
            self._metrics.rejected(error.reason)
            raise

    def _read(
        self,
        message: Message,
        read: Callable[[], tuple[_T, GenerationOptions]],
        method: str,
        context: Any,
    ) -> tuple[_T, RequestOptions]:
        with self.counted():
            found, generation = read()
            options = read_request_options(
                _metadata(context),
                generation,
                self._timeouts,
                lambda: digest(method.encode() + message.SerializeToString(deterministic=True)),
            )
        return found, options


@contextlib.contextmanager
def until_done(context: Any) -> Iterator[ExitStack]:
    """What is to be done at the end of the block, or of the call: gRPC may drop a generator between two responses
    without closing it.
    """
    # The call keeps the callback until garbage is collected: that refers to an answer only as long as it is open.
    stack = ExitStack()
    context.add_done_callback(lambda _: stack.close())
    with stack:
        yield stack


def _metadata(context: Any) -> Header:
    found = dict(context.invocation_metadata() or ())
    return lambda name: str(found.get(name, ""))

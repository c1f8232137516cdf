"""Errors over gRPC: a `ServingError` becomes a google.rpc.Status with details, and back."""

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shared import errors
from shared.errors import Overloaded, ServingError, Unavailable
from shared.telemetry import request_names

_DOMAIN = "tessera"


@contextlib.contextmanager
def calling(peer: str) -> Iterator[None]:
    """Raises the gRPC errors of calls made inside as `ServingError`; `peer` names the service called."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _from_rpc_error(error, peer) from error


# Our servers attach an ErrorInfo to their errors. With these codes and without it the call broke: a server may be dead.
_BROKEN_CALL = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


def _from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> ServingError:
    """The `ServingError` that a server of ours raised, or the nearest one for a failure of the call itself."""
    number = errors.status_number(error.code())
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    for detail in status.details if status else []:
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == _DOMAIN:
            return errors.from_status_number(
                number, info.reason, error.details() or "", dict(info.metadata)
            )
    message = f"{peer}: {error.details() or error.code().name}"
    if error.code() in _BROKEN_CALL:
        return Unavailable("CALL_BROKEN", message)
    return errors.from_status_number(number, error.code().name, message, {})


def _to_status(error: ServingError) -> status_pb2.Status:
    """google.rpc.Status with ErrorInfo, and RetryInfo or BadRequest where the error says so."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=_DOMAIN, metadata=error.metadata)
    details: list[Any] = [info]
    if isinstance(error, Overloaded) and "retry_after_s" in error.metadata:
        delay = duration_pb2.Duration(seconds=int(error.metadata["retry_after_s"]))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if "field" in error.metadata:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.metadata["field"], description=error.message
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    packed = []
    for detail in details:
        wrapped = any_pb2.Any()
        wrapped.Pack(detail)
        packed.append(wrapped)
    return status_pb2.Status(
        code=errors.status_number(error.status), message=error.message, details=packed
    )


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServingError) -> NoReturn:
    """Ends a call with the error. Never returns."""
    status = rpc_status.to_status(_to_status(error))
    context.set_trailing_metadata((*status.trailing_metadata, *request_names.metadata()))
    await context.abort(status.code, status.details)
    raise AssertionError("abort does not return")

"""Server reflection under both of its names: v1, which today's clients ask for first, and v1alpha.

grpcio-reflection has v1alpha alone. v1 is the same file under another package, and the same bytes.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection, reflection_pb2

_OLD, _NEW = "v1alpha", "v1"
NAMES = (reflection.SERVICE_NAME, reflection.SERVICE_NAME.replace(_OLD, _NEW))


def enable(services: Iterable[str], server: Any) -> None:
    """Answers on `server`, which may run already, about services by their full names."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer(services)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": method}
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, methods) for name in NAMES]
    )


@cache
def _describe_v1() -> None:
    """Makes v1 known to the pool that reflection answers from."""
    old = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(old)
    text = text_format.MessageToString(old).replace(_OLD, _NEW)
    new = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(new.SerializeToString())

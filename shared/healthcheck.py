"""`python -m shared.healthcheck [TARGET]`: exits 0 if a room is ready, else 1.

For containers: HEALTHCHECK runs it beside the room. TARGET is the gRPC address of a room (`host:port` or
`unix:/path`), or the `http://` URL of a page that answers 200 when all is well.
"""

import sys
import urllib.error
import urllib.request

_DEFAULT_TARGET = "127.0.0.1:50051"
_TIMEOUT_S = 3.0


def check(target: str) -> str:
    """ "ready", or what there is instead."""
    return _check_page(target) if target.startswith("http://") else _check_grpc(target)


def _check_page(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S):
            return "ready"
    except urllib.error.HTTPError as error:
        with error:
            return f"{error.code} {error.read(500).decode(errors='replace')}"
    except OSError as error:
        return str(error)


def _check_grpc(address: str) -> str:
    # Imported only when needed: a check is a process of its own, every few seconds.
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)  # type: ignore[attr-defined]
        except grpc.RpcError as error:
            details = getattr(error, "details", None)
            return str(details() if details else error)
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return "ready"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main() -> None:
    """Checks the target on the command line, or the gRPC port of containers."""
    found = check(sys.argv[1] if len(sys.argv) > 1 else _DEFAULT_TARGET)
    print(found)
    sys.exit(found != "ready")


if __name__ == "__main__":
    main()

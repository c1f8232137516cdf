"""`python -m shared.net.healthcheck [TARGET]`: exits 0 if a service is ready, else 1.

For containers: HEALTHCHECK runs it beside the service. TARGET is the path of a service's heartbeat (`--heartbeat`),
which answers for a busy service as well; or the gRPC address of a service (`host:port` or `unix:/path`), or the URL of
a page that answers 200 when all is well. Over https the certificate is not looked at: it names the address that others
know, not the one within the container.
"""

import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

from shared.net.heartbeat import Question

_DEFAULT_TARGET = "127.0.0.1:50051"
_TIMEOUT_S = 3.0
_IDLE_S = 5.0  # in which the event loop's thread does nothing
_COMPUTED_S = 50.0  # without another turn of the event loop: it will not end


def check(target: str, idle_s: float = _IDLE_S) -> str:
    """ "ready", or the reason why not. `idle_s`: how long the thread of a service's event loop may do nothing."""
    if target.startswith("/"):
        return _check_heartbeat(Path(target), idle_s)
    is_page = target.startswith(("http://", "https://"))
    return _check_page(target) if is_page else _check_grpc(target)


def _check_heartbeat(path: Path, idle_s: float) -> str:
    try:
        with Question(path) as question:
            beat = question.wait(_TIMEOUT_S)
    except OSError as error:  # TimeoutError among them
        return f"no heartbeat at {path}: {error}"
    if beat.idle_s > idle_s:
        return f"its event loop has stood still for {beat.idle_s:.0f} s"
    if beat.computed_s > _COMPUTED_S:
        return f"its event loop has computed for {beat.computed_s:.0f} s without a turn"
    return "ready" if beat.is_ready else "not ready"


def _check_page(url: str) -> str:
    context = ssl._create_unverified_context() if url.startswith("https:") else None
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S, context=context):
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

"""What a process logs: one line an event from whatever source, and nothing that a client sent."""

import contextvars
import json
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from services.gateway.admission.api_keys import ApiKeys
from services.gateway.admission.caller import Caller
from services.gateway.settings import GatewaySettings
from shared.errors import NotFound, from_failure
from shared.settings import child_environment, python_path
from shared.telemetry import request_names
from shared.telemetry.log_lines import with_trace

_ROOT = Path(__file__).parents[3]
_PROGRAM = """
import asyncio, gc, logging, sys, threading, warnings
import structlog
from shared.telemetry.logs import configure_logs, on_loop_error

configure_logs("gateway", "debug", sys.argv[1], quotes_errors=sys.argv[2] == "quotes")
log = structlog.get_logger("program")

def fail(text):
    local = "LOCAL-" + "VALUE"
    raise KeyError(text)

def tell(how, *a):
    try:
        fail("QUOTED-" + "TEXT")
    except KeyError as error:
        try:
            raise RuntimeError("second") from error
        except RuntimeError:
            how(*a)

class Ends:
    def __del__(self):
        fail("QUOTED-" + "TEXT")

async def main():
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(on_loop_error)
    async def lost():
        fail("QUOTED-" + "TEXT")
    task = asyncio.create_task(lost())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task
    gc.collect()
    loop.call_soon(fail, "QUOTED-" + "TEXT")
    await asyncio.sleep(0.01)

log.debug("numbers", count=3, rate=float("inf"), ids=[1, 2])
log.info("long", text="x" * 5000, other=["y" * 5000])
tell(log.exception, "ours")
tell(logging.getLogger("library").exception, "theirs\\nin two lines")
logging.getLogger("library").warning("%d of %d", 1)
warnings.warn("do not")
thread = threading.Thread(target=fail, args=("QUOTED-" + "TEXT",))
thread.start()
thread.join()
Ends()
asyncio.run(main())
raise SystemError("the end")
"""


def output(style: str, quotes: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, style, quotes],
        env=child_environment(PYTHONPATH=python_path(_ROOT, _ROOT / "protos")),
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and done.stdout == ""
    return done.stderr


def test_every_line_is_json_from_whatever_logger() -> None:
    lines = [json.loads(line) for line in output("json", "").splitlines()]
    assert all(line["service"] == "gateway" and line["timestamp"] for line in lines)
    said = [line["event"] for line in lines]
    assert said[:4] == ["numbers", "long", "ours", "theirs\nin two lines"]
    assert any("UserWarning: do not" in event for event in said)
    for event in ("a thread ends", "an exception that could not be raised", "the process ends"):
        assert event in said
    assert said.count("error in the event loop") == 2
    assert lines[0]["count"] == 3 and lines[0]["rate"] == "inf"
    assert len(lines[1]["text"]) < 2100 and len(lines[1]["other"]) < 2100
    assert lines[1]["other"].startswith("yyy")  # a list is its parts, with commas between them


def test_text_does_not_repeat_which_service_it_is_from_and_ends_without_blanks() -> None:
    lines = output("text", "").splitlines()
    assert not any("service=" in line for line in lines)
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("style", ["json", "text"])
def test_tracebacks_have_source_lines_and_no_values(style: str) -> None:
    told = output(style, "")
    assert told.count("in fail") >= 6
    assert "LOCAL-VALUE" not in told and "QUOTED-TEXT" not in told
    assert "SystemError: the end" in told
    quoted = output(style, "quotes")
    assert quoted.count("QUOTED-TEXT") >= 6 and "LOCAL-VALUE" not in quoted


def test_a_full_disk_costs_the_line_and_nothing_else() -> None:
    program = (
        "import structlog; from shared.telemetry.logs import configure_logs\n"
        "configure_logs('gateway', stream=open('/dev/full', 'w'))\n"
        "structlog.get_logger().warning('nobody reads this')\n"
        "import logging; logging.getLogger('x').warning('nor this')\n"
        "print('went on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=child_environment(PYTHONPATH=python_path(_ROOT, _ROOT / "protos")),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "went on\n"


def test_errors_of_a_service_are_short() -> None:
    error = NotFound("NO_MODEL", "m" * 100_000, field="f" * 100_000)
    assert len(error.message) < 2100 and len(str(error)) < 2100
    assert error.message.endswith("(98000 more characters)")
    failure = error.to_failure()
    assert failure.ByteSize() < 3000
    failure.message = "z" * 100_000  # as another release would send it
    assert len(from_failure(failure).message) < 2100


def test_secrets_have_no_representation() -> None:
    settings = GatewaySettings(
        api_key="sk-planted", redis_url="redis://:pw-planted@h/0", tenant_weights="key:sk-planted=2"
    )
    shown = [repr(settings), str(settings), repr(Caller("r", "sk-planted", "sk-planted"))]
    shown.append(repr(ApiKeys(("sk-planted",))))
    assert not any("planted" in text for text in shown)
    assert "host='127.0.0.1'" in shown[0]


def test_a_secret_that_is_refused_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        GatewaySettings.load(["--api-key", "sk-planted", "--port", "70000"])
    said = capsys.readouterr().err
    assert "--port" in said and "70000" in said and "sk-planted" not in said


def test_a_name_that_metadata_cannot_hold_is_left_out() -> None:
    context = contextvars.copy_context()
    context.run(request_names.bind, "r_\n漢", "mine")
    assert context.run(request_names.metadata) == (("x-request-id", "mine"),)


TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_the_trace_travels_with_the_names() -> None:
    context, other = contextvars.copy_context(), contextvars.copy_context()
    rid = f"r_00000000_{5:032x}"
    context.run(request_names.bind, rid, "mine", f"00-{TRACE}-b7ad6b7169203331-01")
    given = context.run(request_names.metadata)
    other.run(request_names.bind_metadata, given)
    found = other.run(structlog.contextvars.get_contextvars)
    assert found == {"request_id": rid, "client_request_id": "mine", "trace_id": TRACE}


@pytest.mark.parametrize(
    "given", ["", "00-abc-def-01", f"ff-{TRACE}-b7ad6b7169203331-01", f"00-{TRACE}-{'0' * 16}-01"]
)
def test_what_is_no_trace_context_is_left_out(given: str) -> None:
    rid = f"r_00000000_{5:032x}"
    assert request_names.names(rid, "", given) == {"request_id": rid}
    assert request_names.trace_of(rid, given) == rid[-32:]


def test_json_lines_about_a_request_always_name_its_trace() -> None:
    rid = f"r_00000000_{5:032x}"
    assert with_trace(None, "info", {"request_id": rid})["trace_id"] == rid[-32:]
    line = {"request_id": rid, "trace_id": TRACE}
    assert with_trace(None, "info", dict(line)) == line
    assert with_trace(None, "info", {"event": "ready"}) == {"event": "ready"}

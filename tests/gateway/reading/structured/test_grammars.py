"""Forms compiled in confined processes: what a hostile one costs, and what is kept."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from services.gateway.reading.constraint import LONGEST, Constraint, Kind
from services.gateway.reading.structured.grammars import Grammars
from services.gateway.reading.valid_request import ValidRequest
from shared.confinement.work import JobLimit
from shared.environment import Environment, use
from shared.errors import Expired, InvalidRequest, Overloaded, Unavailable
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest
from tessera.scheduler.v1.queue_pb2 import ReplyFormat
from tests.support.gateway.served_model import model

FINE = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    with contextlib.closing(Grammars(model())) as opened:
        yield opened


def asking(kind: Kind, value: Any, field: str = "form") -> ValidRequest:
    return ValidRequest(
        prepare=PrepareRequest(),
        sampling=SamplingParams(),
        reply=ReplyFormat(),
        stream=False,
        user="",
        prompt_bound=1,
        constraint=Constraint(field, kind, json.dumps(value).encode()),
    )


def chain(count: int, link: Any) -> dict[str, Any]:
    """Definitions of which each refers to the next."""
    names = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**names, f"a{count}": {}}}


def doubled(count: int) -> str:
    """Terminals that each are twice the next."""
    rules = [f"T{i}: T{i + 1} T{i + 1}" for i in range(count)]
    return "\n".join(["start: T0", *rules, f'T{count}: "a"'])


REFUSED: list[tuple[Kind, Any, str]] = [
    ("json", chain(3000, lambda next_one: {"properties": {"x": next_one}}), "GRAMMAR_TOO_COMPLEX"),
    ("grammar", "\n".join([f"r{i}: r{i + 1}" for i in range(5000)] + ['r5000: "a"', "start: r0"]),
     "GRAMMAR_TOO_COMPLEX"),
    ("grammar", doubled(1000), "GRAMMAR_TOO_COMPLEX"),
    ("json", "[" * 100_000, "INVALID_GRAMMAR|GRAMMAR_TOO_COMPLEX"),
    ("json", '{"items":' * 500 + "{}" + "}" * 500, "INVALID_GRAMMAR"),
    ("regex", "(" * 50_000, "INVALID_GRAMMAR"),
    ("regex", "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}", "INVALID_GRAMMAR|"),
    ("grammar", "start: " + "(" * 50_000, "INVALID_GRAMMAR"),
    ("grammar", "root ::= " + "(" * 50_000, "INVALID_GRAMMAR|GRAMMAR_TOO_COMPLEX"),
    ("json", {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(500)]},
     "INVALID_GRAMMAR"),
    ("json", {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}},
     "INVALID_GRAMMAR"),
    ("structural_tag", json.loads('{"format":' + '{"type":"or","elements":[' * 50 + "1" + "]}" * 50 + "}"),
     "INVALID_GRAMMAR"),
    ("structural_tag", {"structures": [{"begin": "<f", "schema": {"enum": ["x" * 100] * 1000}, "end": ""}] * 3,
                        "triggers": ["<"]}, "GRAMMAR_TOO_COMPLEX"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "reasons"), REFUSED, ids=lambda v: str(v)[:40])
async def test_a_hostile_form_costs_its_own_request(
    grammars: Grammars, kind: Kind, value: Any, reasons: str
) -> None:
    """Nor may it stop the event loop, which goes on meanwhile."""
    try:
        await grammars.compile_for(asking(kind, value))
    except InvalidRequest as error:
        assert error.reason in reasons.split("|")
        assert error.message.startswith("form") and len(error.message) < 600
    else:
        assert "" in reasons.split("|"), "it was compiled"
    request = asking("json", FINE)
    await grammars.compile_for(request)
    assert request.sampling.grammar


TAKEN: list[tuple[Kind, Any]] = [
    ("json", {"enum": [f"value {i}" for i in range(5000)]}),
    ("json", {"type": "array", "minItems": 100_000, "items": {"type": "array", "minItems": 100_000}}),
    ("json", {"type": "string", "maxLength": 1_000_000}),
    ("json", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
    ("json", {"type": "object", "properties": {"next": {"$ref": "#"}}}),
    ("json", chain(60, lambda next_one: {"type": "object", "properties": {"x": next_one}})),
    ("regex", "a{1,1000000}"),
    ("choice", [f"choice {i}" for i in range(5000)]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value"), TAKEN, ids=lambda v: str(v)[:40])
async def test_what_is_large_and_not_hostile_is_taken(
    grammars: Grammars, kind: Kind, value: Any
) -> None:
    request = asking(kind, value)
    await grammars.compile_for(request)
    assert len(request.sampling.grammar) <= LONGEST
    assert LLMatcher.validate_grammar_with_warnings(request.sampling.grammar)[0] is False


async def test_an_error_names_the_field_and_the_place_within_it(grammars: Grammars) -> None:
    schema = {"properties": {"tags": {"type": "array", "uniqueItems": True}}}
    field = "response_format.json_schema.schema"
    for _ in range(2):  # once compiled, once kept
        with pytest.raises(InvalidRequest) as caught:
            await grammars.compile_for(asking("json", schema, field))
        assert caught.value.reason == "UNSUPPORTED_SCHEMA"
        assert caught.value.metadata["field"] == f"{field}.properties.tags"
        assert caught.value.message == (
            f'{field}.properties.tags: "uniqueItems" is not supported; leave it out'
        )


async def test_a_reference_to_an_entry_beyond_all_lists_is_named(grammars: Grammars) -> None:
    schema = {"$ref": "#/anyOf/" + "9" * 5000, "anyOf": [{}]}
    with pytest.raises(InvalidRequest, match="array index"):
        await grammars.compile_for(asking("json", schema))


async def test_what_is_known_is_not_compiled_again() -> None:
    with contextlib.closing(Grammars(model())) as grammars:
        first = asking("json", FINE)
        await grammars.compile_for(first)
    second, other = asking("json", FINE, "elsewhere"), asking("regex", "a")
    await grammars.compile_for(second)  # its processes have ended
    assert second.sampling.grammar == first.sampling.grammar
    with pytest.raises((Unavailable, RuntimeError)):
        await grammars.compile_for(other)


async def test_many_at_once_are_compiled_by_two_processes() -> None:
    with contextlib.closing(Grammars(model())) as grammars:
        requests = [asking("choice", [f"number {i % 9}"]) for i in range(40)]
        await asyncio.gather(*map(grammars.compile_for, requests))
        for number, request in enumerate(requests):
            assert f"number {number % 9}" in request.sampling.grammar


class _Counted:
    """How many forms the processes of some grammars are asked to compile."""

    def __init__(self, grammars: Grammars) -> None:
        self.asked = 0
        self._ask = grammars._processes.ask
        grammars._processes.ask = self.ask  # type: ignore[method-assign]

    def ask(self, job: Any) -> Any:
        """As the processes' own."""
        self.asked += 1
        return self._ask(job)


async def refused(grammars: Grammars) -> str:
    """The reason of the refusal of a form that ends its process."""
    with pytest.raises(InvalidRequest) as caught:
        await grammars.compile_for(asking("grammar", doubled(1000)))
    return caught.value.reason


async def test_a_form_that_takes_too_much_is_tried_once() -> None:
    """However many ask for it, at once or one after another."""
    with contextlib.closing(Grammars(model())) as grammars:
        counted = _Counted(grammars)
        reasons = await asyncio.gather(*(refused(grammars) for _ in range(50)))
        assert {*reasons, await refused(grammars)} == {"GRAMMAR_TOO_COMPLEX"}
        assert counted.asked == 1


async def test_what_took_too_much_time_is_tried_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine may have been busy."""
    now, asked = 0.0, 0

    def ask(job: Any) -> Any:
        nonlocal asked
        asked += 1
        raise JobLimit("took over 2 s of processor time", is_time=True)

    with contextlib.closing(Grammars(model())) as grammars:
        monkeypatch.setattr(grammars._processes, "ask", ask)
        with use(Environment(monotonic=lambda: now)):
            for seconds, times in ((0.0, 1), (59.0, 1), (61.0, 2)):
                now = seconds
                assert await refused(grammars) == "GRAMMAR_TOO_COMPLEX"
                assert asked == times


async def test_one_that_leaves_takes_nothing_from_those_that_wait_for_the_same() -> None:
    with contextlib.closing(Grammars(model())) as grammars:
        request = asking("json", FINE)
        leaving = asyncio.create_task(grammars.compile_for(asking("json", FINE)))
        staying = asyncio.create_task(grammars.compile_for(request))
        await asyncio.sleep(0)
        leaving.cancel()
        await staying
        assert request.sampling.grammar and leaving.cancelled()


@contextlib.contextmanager
def busy(grammars: Grammars) -> Iterator[None]:
    """Inside, nothing is compiled."""
    over = threading.Event()
    for _ in range(2):
        grammars._threads.submit(over.wait)
    try:
        yield
    finally:
        over.set()


async def test_what_nobody_waits_for_is_not_begun() -> None:
    with contextlib.closing(Grammars(model())) as grammars:
        counted = _Counted(grammars)
        with busy(grammars):
            asked = [
                asyncio.create_task(grammars.compile_for(asking("choice", [f"number {i}"])))
                for i in range(50)
            ]
            await asyncio.sleep(0)
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        await grammars.compile_for(asking("json", FINE))
        assert counted.asked == 1


async def test_a_form_is_waited_for_within_the_timeouts_of_its_request() -> None:
    with contextlib.closing(Grammars(model())) as grammars:
        with busy(grammars), pytest.raises(Expired, match=r"^form: was not compiled"):
            await grammars.compile_for(asking("json", FINE), timeout_ms=1)
        await grammars.compile_for(asking("json", FINE))


async def test_more_than_so_many_do_not_wait() -> None:
    with contextlib.closing(Grammars(model())) as grammars:
        found = await asyncio.gather(
            *(grammars.compile_for(asking("json", FINE)) for _ in range(257)),
            return_exceptions=True,
        )
        (error,) = filter(None, found)
        assert isinstance(error, Overloaded) and error.reason == "TOO_MANY_GRAMMARS"
        await grammars.compile_for(asking("json", FINE))
        await grammars.compile_for(asking("regex", "a"))


def test_a_gateway_does_not_load_the_library() -> None:
    """It would hold 12 MB, and what overflows the stack of one process would end it."""
    code = (
        "import sys, services.gateway.gateway; "
        "assert 'llguidance' not in sys.modules and 'jsonschema' not in sys.modules"
    )
    root = Path(__file__).parents[4]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=120)

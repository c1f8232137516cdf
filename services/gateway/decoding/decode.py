"""From the bytes of a request's body to a typed body, and from msgspec's errors to ours.

msgspec reads only what the type declares: unknown fields are skipped without being built.
"""

import asyncio
import contextvars
import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn, TypeVar

import msgspec

from services.gateway.decoding.bounds import wrong
from services.gateway.decoding.json_limits import check_json
from services.gateway.decoding.typed import decoder_of
from shared.errors import InvalidRequest

# Bytes; decoding and checking them takes about a millisecond.
_LARGE = 64 << 10
# They take turns at the interpreter: more of them would only hold more at once.
_THREADS = 2
_BOM = b"\xef\xbb\xbf"

# "Expected `int | null`, got `str` - at `$.n`"; "... - at `key` in `$.logit_bias`" for a wrong key.
_ERROR = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<kinds>[^`]*)`(?:, got `(?P<got>[^`]*)`)?")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_LONGEST_NAME = 64
# msgspec's names of JSON types. Whole numbers are declared as `Whole`, other numbers as `float`.
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_GOT = {
    "bool": "a boolean",
    "int": "a number",
    "float": "a number",
    "str": "a string",
    "array": "a list",
    "object": "an object",
    "null": "null",
}

# A whole number. Some clients write 16.0, which msgspec does not take for an `int`.
Whole = int | float

_B = TypeVar("_B", bound=msgspec.Struct)
_T = TypeVar("_T")


async def off_loop(read: Callable[[bytes], _T], body: bytes, times: int = 1) -> _T:
    """Returns `read(body)`: computed at once for a small body, in a thread for a large one. `times`: how often the
    values of a body may be read.
    """
    return await in_thread(partial(read, body)) if is_large(times * len(body)) else read(body)


def is_large(size: int) -> bool:
    """Whether so many bytes are read in a thread."""
    return size > _LARGE


async def in_thread(work: Callable[[], _T]) -> _T:
    """Returns `work()`, computed in one of few threads: others wait for theirs, so that what is needed meanwhile is
    not needed by many at once.
    """
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_threads(), context.run, work)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, "bodies")


def decode(body: bytes, kind: type[_B]) -> _B:
    """The JSON object in a request's body as a `kind`.

    Raises InvalidRequest, naming the field, for a value of the wrong type, for invalid JSON, and for
    a body that exceeds the limits of `json_limits.py`.
    """
    body = body.removeprefix(_BOM)
    check_json(body)
    try:
        if not body.isascii():
            body.decode()  # fields that are kept as they were sent (msgspec.Raw) are not looked into
        content: _B = decoder_of(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except RecursionError:
        raise InvalidRequest("INVALID_JSON", "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _refuse_malformed(body, str(error))
    return content


def convert(content: Any, kind: type[_B]) -> _B:
    """Values in another form than JSON as a `kind`. Raises InvalidRequest, naming the field, for a wrong type."""
    decoder_of(kind)
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None


def _explain(message: str) -> InvalidRequest:
    """Our error for msgspec's."""
    found = _ERROR.fullmatch(message)
    assert found is not None  # it matches every text
    path = found["path"]
    if (unknown := _UNKNOWN.fullmatch(found["what"])) is not None:
        name = unknown["name"][:_LONGEST_NAME]
        field = f"{path}.{name}" if path else name
        return wrong(field, "is not a field of this route: leave it out", "UNSUPPORTED_PARAMETER")
    if not path:
        return InvalidRequest("INVALID_JSON", "the body must be a JSON object")
    expected = _EXPECTED.match(found["what"])
    if expected is None:
        return wrong(path, "is out of range")
    kinds = expected["kinds"].replace("int | float", "int").removesuffix(" | null").split(" | ")
    must = " or ".join(_KINDS.get(kind, kind) for kind in kinds)
    got = f", not {_GOT[expected['got']]}" if expected["got"] in _GOT else ""
    return wrong(path, f"must be {must}{got}", "INVALID_TYPE")


def load_in_turns(text: str) -> Any:
    """`json.loads`, between whose values other threads can run: the hooks are Python. Raises ValueError."""
    return json.loads(
        text,
        object_hook=lambda found: found,
        parse_int=lambda digits: int(digits),
        parse_float=lambda digits: float(digits),
    )


def _refuse_malformed(body: bytes, error: str) -> NoReturn:
    """Raises InvalidRequest. Python's reader also takes NaN, infinities and halves of surrogate
    pairs, which are no JSON: where it reads the body, the field that holds one is named.
    """
    try:
        content = load_in_turns(body.decode("utf-8", "surrogatepass"))
    except ValueError as reason:
        raise InvalidRequest("INVALID_JSON", f"the body is not valid JSON: {reason}") from None
    for path, problem in _not_json(content, ""):
        raise wrong(path, problem)
    raise InvalidRequest("INVALID_JSON", f"the body is not valid JSON: {error}")


def _not_json(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """The paths of values that JSON does not have, each with what is wrong."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if not _is_unicode(name):
                yield path or "the body", "has a field whose name is half of a surrogate pair"
            else:
                yield from _not_json(inner, f"{path}.{name[:64]}" if path else name[:64])
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _not_json(inner, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"must be a finite number, not {value}"
    elif isinstance(value, str) and not _is_unicode(value):
        yield path, "holds half of a surrogate pair"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

"""`python -m tests.support.api_tables`: writes the tables of docs/api.md that are made from the types of fields.

Such a table stands between a comment and `<!-- end -->`. The comment is one of

    <!-- fields of package.module:Struct -->                      all fields that are not refused
    <!-- fields of package.module:Struct: name name -->           these
    <!-- fields of package.module:Struct; see name#heading -->    all, of which some lead to a heading

and may say `under options.` behind the Struct, where that is the value of another's field. Fields that have name and
meaning of one of `GenerationOptions` stand in one row, the last; neighbours of which the same is said share one.

    <!-- fields by API: name name@chat; see name#heading -->          those of chats, completions and gRPC

says of each which of these have it; `@chat` and `@completions` that the other one's Struct has it to refuse it.
"""

import importlib
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from google.protobuf.message import Message

from services.gateway.api.openai.schema import ChatRequest, CompletionRequest
from services.gateway.api.tessera.description.schemas import Schemas
from services.gateway.decoding.about import DEFAULT_KEY
from services.gateway.reading.options import GenerationOptions
from tessera.gateway.v1 import chat_pb2

FILE = Path(__file__).parents[2] / "docs/api.md"
_TABLE = re.compile(
    r"(?P<begin><!-- fields of (?P<module>[\w.]+):(?P<struct>\w+)(?: under (?P<under>[\w.]+))?"
    r"(?::\s(?P<names>[\w\s]+?))?(?:; see\s(?P<links>[\w\s#-]+?))?\s-->\n)(?P<table>.*?)(?P<end><!-- end -->)",
    re.DOTALL,
)
_BY_API = re.compile(
    r"(?P<begin><!-- fields by API:\s(?P<names>[\w\s@]+?)(?:; see\s(?P<links>[\w\s#-]+?))?\s-->\n)"
    r"(?P<table>.*?)(?P<end><!-- end -->)",
    re.DOTALL,
)
_REST: Mapping[str, type[msgspec.Struct]] = {"chat": ChatRequest, "completions": CompletionRequest}
_GRPC: Mapping[str, type[Message]] = {
    "`Chat`": chat_pb2.ChatRequest,
    "`Complete`": chat_pb2.CompleteRequest,
}
_GRPC_NAMES = {"prompt": "text"}  # what gRPC calls a field otherwise
_HEAD_BY_API = "| field | APIs | value | default |\n|---|---|---|---|\n"
_HEAD = "| field | value | default |\n|---|---|---|\n"
_ALIKE = "as [above](#how-to-choose-tokens) and in [what to answer](#what-to-answer)"


def written(text: str) -> str:
    """A document with all its tables as they should be."""
    text = _TABLE.sub(lambda found: found["begin"] + _table(found) + found["end"], text)
    return _BY_API.sub(lambda found: found["begin"] + _by_api(found) + found["end"], text)


def _table(found: re.Match[str]) -> str:
    kind = getattr(importlib.import_module(found["module"]), found["struct"])
    fields = Schemas([kind]).fields(kind)
    links = dict(link.split("#") for link in (found["links"] or "").split())
    names = (found["names"] or " ".join(fields)).split()
    own = {name for name in names if kind is GenerationOptions or name in _described(kind)}
    rows = [_row(name, fields[name], links) for name in names if name in own]
    shown = [
        ([name for name, _ in some], cells) for cells, some in groupby(rows, key=lambda row: row[1])
    ]
    if alike := [name for name in names if name not in own]:
        shown.append((alike, (_ALIKE, "as there")))
    return _HEAD + "".join(_written_row(some, cells, found["under"] or "") for some, cells in shown)


def _by_api(found: re.Match[str]) -> str:
    links = dict(link.split("#") for link in (found["links"] or "").split())
    fields = {api: Schemas([kind]).fields(kind) for api, kind in _REST.items()}
    rows: list[tuple[str, tuple[str, ...]]] = []
    for word in found["names"].split():
        name, _, alone = word.partition("@")
        said: dict[
            tuple[str, str], list[str]
        ] = {}  # by what is said of it, the APIs of which that holds
        for api, known in fields.items():
            if name in known and alone in ("", api):
                said.setdefault(_row(name, known[name], links)[1], []).append(api)
        assert said, f"{word} is no field"
        last = said[next(reversed(said))]
        last += _over_grpc(name)
        is_all = last == [*_REST, "gRPC"]
        rows += [
            (name, ("all" if apis is last and is_all else ", ".join(apis), *cells))
            for cells, apis in said.items()
        ]
    shown = [
        ([name for name, _ in some], cells) for cells, some in groupby(rows, key=lambda row: row[1])
    ]
    return _HEAD_BY_API + "".join(
        f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(cells)} |\n"
        for names, cells in shown
    )


def _over_grpc(name: str) -> list[str]:
    names = {name, f"{name}_json", _GRPC_NAMES.get(name, name)}
    if names.intersection(chat_pb2.GenerationOptions.DESCRIPTOR.fields_by_name.keys()):
        return ["gRPC"]
    own = [
        method
        for method, kind in _GRPC.items()
        if names.intersection(kind.DESCRIPTOR.fields_by_name.keys())
    ]
    return ["gRPC"] if len(own) == len(_GRPC) else [f"gRPC {method}" for method in own]


def _row(
    name: str, field: Mapping[str, Any], links: Mapping[str, str]
) -> tuple[str, tuple[str, str]]:
    more = f" ([more](#{links[name]}))" if name in links else ""
    return name, (field["description"] + more, field.get(DEFAULT_KEY, ""))


def _written_row(names: list[str], cells: tuple[str, str], under: str) -> str:
    listed = ", ".join(f"`{under}{name}`" for name in names)
    return f"| {listed} | {cells[0]} | {cells[1]} |\n"


def _described(kind: type[msgspec.Struct]) -> Iterator[str]:
    """The names of fields of which the Struct itself says something."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    for field in info.fields:
        if isinstance(field.type, msgspec.inspect.Metadata):
            said = field.type.extra_json_schema or {}
            if "description" in said:
                yield field.encode_name


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text(encoding="utf-8")), encoding="utf-8")

"""Chat templates: where a checkpoint keeps its own, and how it is rendered.

The Jinja environment has the names and settings that Hugging Face templates are written for
(transformers' `chat_template_utils`): sandboxed, immutable, blocks trimmed, `tojson` without HTML
escapes, `raise_exception`, `strftime_now`, the `generation` block.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from services.preprocess.prompt.time_limit import TimeIsUp, at_most
from shared.errors import InvalidRequest

ROLES = ("system", "user", "assistant", "tool", "developer")

_PROBE = "t3ss3ra probe"
_MOST_S = 5.0
_MOST_CHARACTERS = 32 << 20  # no more comes in with a request


class TemplateRefusal(Exception):
    """The template itself refused the conversation (`raise_exception`), or could not render it."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's own words for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(style: str) -> str:
    return datetime.now().strftime(style)


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > _MOST_CHARACTERS:
            raise TemplateRefusal(f"the chat template wrote over {_MOST_CHARACTERS} characters")
        yield piece


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= 500 else text[:497] + "..."


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One template with the variables of its tokenizer (`bos_token`, `eos_token`, ...).

    `takes_parts[role]` says whether a turn of that role is written as a list of parts ("openai"
    format in vLLM's words) or as one string; it is found by trying.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateRefusal(f"the chat template does not compile: {error}") from error
        self._variables = dict(variables)
        self._renders_media: dict[tuple[str, str], bool] = {}
        self.knows_developer = "developer" in source
        self.takes_parts = self._find_takes_parts()

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as one text. Raises TemplateRefusal with the template's message, also when it takes too
        long or writes too much.
        """
        given = {**self._variables, **(variables or {})}
        try:
            with at_most(_MOST_S):
                pieces = self._template.generate(
                    messages=messages,
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **given,
                )
                return "".join(_bounded(pieces))
        except TimeIsUp:
            raise TemplateRefusal(
                f"the chat template took over {_MOST_S:g} s to render: send less, or shorter lists in"
                " chat_template_kwargs"
            ) from None
        except TemplateRefusal:
            raise
        except RecursionError:
            raise TemplateRefusal(
                "the chat template fails on these messages: they are nested too deep"
            ) from None
        except jinja2.TemplateError as error:
            why = f"the chat template cannot be rendered: {_short(error)}"
            raise TemplateRefusal(why) from error
        except Exception as error:  # a template raises whatever its operations do
            why = f"the chat template fails on these messages: {_short(error)}"
            raise TemplateRefusal(why) from error

    def renders_media(self, kind: str, marker: str) -> bool:
        """Whether an "image" or "video" part of a user turn becomes exactly one `marker`."""
        if (kind, marker) not in self._renders_media:
            self._renders_media[kind, marker] = self._try_media(kind, marker)
        return self._renders_media[kind, marker]

    def _try_media(self, kind: str, marker: str) -> bool:
        if not self.takes_parts["user"]:
            return False
        parts = [{"type": kind}, {"type": "text", "text": _PROBE}]
        try:
            text = self.render([{"role": "user", "content": parts}], add_generation_prompt=True)
        except TemplateRefusal:
            return False
        return text.count(marker) == 1

    def _find_takes_parts(self) -> dict[str, bool]:
        # A template that takes strings for the user role takes them for every role.
        if not self._renders_parts("user", "?"):
            return dict.fromkeys(ROLES, False)
        question = [{"type": "text", "text": "?"}]
        others = {role: self._renders_parts(role, question) for role in ROLES if role != "user"}
        return {"user": True, **others}

    def _renders_parts(self, role: str, question: str | list[dict[str, str]]) -> bool:
        """Whether the text of a list of parts comes out as text, not as the list's Python form."""
        turn = {"role": role, "content": [{"type": "text", "text": _PROBE}]}
        user = {"role": "user", "content": question}
        before = [user] if role in ("assistant", "tool") else []
        after = [] if role == "user" else [user]
        try:
            text = self.render([*before, turn, *after], add_generation_prompt=False)
        except TemplateRefusal:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text


def read_template(folder: Path) -> str | None:
    """The checkpoint's own template, from the first of the places where Hugging Face has put it, or None."""
    raw = folder / "chat_template.jinja"
    if raw.is_file():
        return raw.read_text(encoding="utf-8")
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        found = _read_json(folder / name).get("chat_template")
        if isinstance(found, list):  # several named templates
            found = {entry["name"]: entry["template"] for entry in found}
        if isinstance(found, dict):
            found = found.get("default")
        if isinstance(found, str):
            return found
    return None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest("BAD_CHECKPOINT", f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def refused(error: TemplateRefusal) -> InvalidRequest:
    """What a refusal means to the client."""
    return InvalidRequest("CHAT_TEMPLATE", str(error), field="messages")

"""What chat templates are written for: a Jinja environment with the names and settings of transformers'
`chat_template_utils`: sandboxed, immutable, blocks trimmed, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, the `generation` block.
"""

import contextlib
import encodings
import importlib
import json
import pkgutil
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's own words for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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


def environment(
    raise_exception: Callable[[str], None],
) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """`raise_exception` is what templates call where they refuse a conversation."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = _strftime_now
    return made


def load_late() -> None:
    """Loads what templates load when they first need it, for a process that can open no files then."""
    for module in ("html", "jinja2.constants", "jinja2.debug", "pprint", "textwrap"):
        importlib.import_module(module)
    for encoding in pkgutil.iter_modules(encodings.__path__):
        with contextlib.suppress(ImportError):  # some belong to other systems
            importlib.import_module(f"encodings.{encoding.name}")
    _strftime_now("%c %Z")  # reads the time zone

"""OpenAI's custom tools, whose input is one text: how the model is told of them, and what grammar the text has."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from services.gateway.decoding.bounds import text, wrong, wrong_type
from services.gateway.decoding.list_limits import LONGEST_TOOL_NAME
from services.gateway.reading.constraint import LONGEST
from shared.output_format.custom_input import INPUT
from shared.output_format.table import Body, OutputFormat

CUSTOM = "custom"
_SYNTAXES: Mapping[str, str] = {
    "lark": "The input must follow this grammar, in Lark's form:",
    "regex": "The input must match this regular expression as a whole:",
}
_FIELDS = frozenset({"type", "name", "description", "format"})


class CustomTool(NamedTuple):
    """A tool by its grammar: `syntax` is "lark" or "regex", empty where its input may be any text. `field` is where the
    grammar stands in the body.
    """

    name: str
    about: str = ""
    syntax: str = ""
    definition: str = ""
    field: str = ""

    def form(self) -> dict[str, Any]:
        """What its input is held to (`structured/tool_inputs.py`)."""
        told = {"syntax": self.syntax, "definition": self.definition, "field": self.field}
        return {"type": "tool_input", **told}

    def is_quoted(self, row: OutputFormat | None) -> bool:
        """Whether its input is a JSON string where a model writes arguments as they are: a grammar of several terminals
        could not tell its own text from the marker behind it.
        """
        return self.syntax == "lark" and row is not None and row.body is Body.XML

    def schema(self, row: OutputFormat | None) -> dict[str, Any]:
        """Of the parameters of the function as which the model knows it."""
        text: dict[str, Any] = {"type": "string"}
        if self.is_quoted(row):
            text["description"] = "The input as a string of JSON, in quotes."
        return {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}

    def told(self, row: OutputFormat | None) -> dict[str, Any]:
        """The function as which the model knows it, in OpenAI's form: models without custom tools are told of none."""
        grammar = f"{_SYNTAXES[self.syntax]}\n{self.definition}" if self.syntax else ""
        about = "\n\n".join(filter(None, (self.about, grammar)))
        function: dict[str, Any] = {"name": self.name}
        if about:
            function["description"] = about
        return {"type": "function", "function": {**function, "parameters": self.schema(row)}}


def read_custom_tool(given: Any, path: str, *, is_nested: bool) -> CustomTool:
    """The tool that stands at `path`. `is_nested`: the grammar stands under `format.grammar`, as in chats. Raises
    InvalidRequest naming the field.
    """
    if not isinstance(given, dict):
        raise wrong_type(path, "an object with the name of the tool")
    name, about, form = map(given.get, ("name", "description", "format"))
    if not isinstance(name, str) or not name:
        raise wrong_type(f"{path}.name", "a string of at least one character")
    text(f"{path}.name", name, LONGEST_TOOL_NAME)
    if not isinstance(about, str | None):
        raise wrong_type(f"{path}.description", "a string")
    for field, value in given.items():
        if field not in _FIELDS and value not in (None, False):
            raise wrong(f"{path}.{field[:64]}", "is not a field of a custom tool: leave it out")
    tool = CustomTool(name, about or "")
    if form is None:
        return tool
    if not isinstance(form, dict):
        raise wrong_type(f"{path}.format", "an object with a type")
    match form.get("type"):
        case "text":
            return tool
        case "grammar":
            return _with_grammar(tool, form, f"{path}.format", is_nested=is_nested)
        case _:
            raise wrong(f"{path}.format.type", 'must be "text" or "grammar"')


def _with_grammar(
    tool: CustomTool, form: Mapping[str, Any], path: str, *, is_nested: bool
) -> CustomTool:
    grammar: Any = form
    if is_nested:
        grammar, path = form.get("grammar"), f"{path}.grammar"
        if not isinstance(grammar, dict):
            raise wrong_type(path, "an object with syntax and definition")
    syntax, definition = grammar.get("syntax"), grammar.get("definition")
    if not isinstance(syntax, str) or syntax not in _SYNTAXES:
        raise wrong(f"{path}.syntax", 'must be "lark" or "regex"')
    field = f"{path}.definition"
    if not isinstance(definition, str) or not definition:
        raise wrong_type(field, "a string of at least one character")
    text(field, definition, LONGEST)
    return tool._replace(syntax=syntax, definition=definition, field=field)


def as_arguments(given: str) -> str:
    """The input of an earlier call as the arguments of the function as which the model knows the tool."""
    return json.dumps({INPUT: given}, ensure_ascii=False)

"""The fields that hold an answer to a form, under OpenAI's names, vLLM's, and vLLM's older ones."""

from typing import Annotated

import msgspec

from services.gateway.decoding.about import about
from services.gateway.reading.calls.tools import ToolFields

_NONE = msgspec.Raw()
_WHITESPACE = "an expression for the white space between JSON values"


class JsonSchemaFormat(msgspec.Struct):
    """`response_format.json_schema`."""

    schema: Annotated[msgspec.Raw, about("the schema")] = _NONE
    strict: Annotated[
        bool | None,
        about("false leaves objects open, and leaves aside what cannot be held to", "true"),
    ] = None


class ResponseFormat(msgspec.Struct):
    """`response_format`; its `type` says which other field is read."""

    type: Annotated[
        str | None, about("text, json_object, json_schema, structural_tag, or TGI's json and regex")
    ] = None
    json_schema: Annotated[
        JsonSchemaFormat | None, about("of json_schema: an object with the schema")
    ] = None
    schema: Annotated[msgspec.Raw, about("of json_object: a schema, as some servers take one")] = (
        _NONE
    )
    value: Annotated[
        msgspec.Raw, about("of json and json_object a schema, of regex an expression, as in TGI")
    ] = _NONE
    format: Annotated[msgspec.Raw, about("of structural_tag: a tree of forms")] = _NONE
    structures: Annotated[msgspec.Raw, about("of structural_tag: parts that follow a schema")] = (
        _NONE
    )
    triggers: Annotated[
        msgspec.Raw, about("of structural_tag: texts with which such parts begin")
    ] = _NONE


class StructuredOutputs(msgspec.Struct):
    """`structured_outputs`: one form, and how JSON is written."""

    json: Annotated[msgspec.Raw, about("a JSON schema, as an object or as text")] = _NONE
    json_object: Annotated[bool | None, about("any JSON object", "false")] = None
    regex: Annotated[str | None, about("an expression that the whole answer matches")] = None
    choice: Annotated[list[str] | None, about("the answer is one of these texts")] = None
    grammar: Annotated[str | None, about("a grammar in Lark's form, or in llama.cpp's EBNF")] = None
    structural_tag: Annotated[
        msgspec.Raw, about("text in which parts between markers follow forms")
    ] = _NONE
    whitespace_pattern: Annotated[str | None, about(_WHITESPACE)] = None
    disable_any_whitespace: Annotated[
        bool | None, about("JSON without white space between values", "false")
    ] = None
    disable_additional_properties: Annotated[
        bool | None, about("false leaves objects open", "true")
    ] = None


class StructuredFields(ToolFields, kw_only=True):
    """The fields of a body, beside those of tools."""

    response_format: Annotated[
        ResponseFormat | None,
        about(
            '`{"type": "json_schema", "json_schema": {"schema": ..., "strict": ...}}`; `{"type": "json_object"}` for'
            ' any JSON object (with a `schema` or, as in TGI, a `value` beside it: that one); `{"type":'
            ' "structural_tag", ...}`; TGI\'s `{"type": "json", "value": ...}` and `{"type": "regex", "value": ...}`;'
            ' `{"type": "text"}` is none',
            "none",
        ),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        about(
            "vLLM's and gRPC's; one of `json` (a schema, as an object or as text), `json_object`, `regex`, `choice`,"
            " `grammar`, `structural_tag`; beside JSON `whitespace_pattern`, `disable_any_whitespace`,"
            " `disable_additional_properties`",
            "none",
        ),
    ] = None
    guided_json: Annotated[
        msgspec.Raw, about("as `structured_outputs.json`, as older clients write it")
    ] = _NONE
    guided_json_object: Annotated[bool | None, about("as `structured_outputs.json_object`")] = None
    guided_regex: Annotated[str | None, about("as `structured_outputs.regex`")] = None
    guided_choice: Annotated[list[str] | None, about("as `structured_outputs.choice`")] = None
    guided_grammar: Annotated[str | None, about("as `structured_outputs.grammar`")] = None
    guided_whitespace_pattern: Annotated[str | None, about(_WHITESPACE)] = None
    structural_tag: Annotated[msgspec.Raw, about("as `structured_outputs.structural_tag`")] = _NONE

"""The fields that hold an answer to a form, under OpenAI's names, vLLM's, and vLLM's older ones."""

import msgspec

from services.gateway.reading.calls.tools import ToolFields

_NONE = msgspec.Raw()


class JsonSchemaFormat(msgspec.Struct):
    """`response_format.json_schema`."""

    schema: msgspec.Raw = _NONE
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format`; its `type` says which other field is read."""

    type: str | None = None
    json_schema: JsonSchemaFormat | None = None
    # Some servers take a schema beside "json_object".
    schema: msgspec.Raw = _NONE
    # Of "structural_tag".
    format: msgspec.Raw = _NONE
    structures: msgspec.Raw = _NONE
    triggers: msgspec.Raw = _NONE


class StructuredOutputs(msgspec.Struct):
    """`structured_outputs`: one form, and how JSON is written."""

    json: msgspec.Raw = _NONE
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: msgspec.Raw = _NONE
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class StructuredFields(ToolFields, kw_only=True):
    """The fields of a body, beside those of tools."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = _NONE
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: msgspec.Raw = _NONE

"""The forms in which models write calls of tools and reasoning, as their chat templates show them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto


class Body(Enum):
    """What stands between the markers of a call."""

    JSON = auto()  # {"name": ..., "arguments": {...}}
    JSON_ARRAY = auto()  # [{"name": ..., "arguments": {...}}, ...]
    NAME_JSON = auto()  # the name, `name_end`, and the arguments as a JSON object
    XML = auto()  # the name and each argument between the markers of an `Xml`
    PYTHONIC = auto()  # [name(argument=value), ...]


@dataclass(frozen=True, slots=True)
class Xml:
    """The markers of a call whose arguments are written one by one. Empty ones are not written."""

    name_open: str
    name_close: str
    key_open: str
    key_close: str
    value_open: str
    value_close: str
    end: str
    # One line break on each side of a value belongs to the markers.
    breaks: bool = False


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How models of one kind write calls. A marker that is an added token counts as this token alone."""

    name: str
    body: Body
    # Before and behind a call (an array of calls for JSON_ARRAY and PYTHONIC); an empty `close` is not written.
    open: str = ""
    close: str = ""
    # Around all calls, without a meaning of their own.
    around: tuple[str, str] | None = None
    # A call may also begin the answer without `open`, where its name is one of the tools'.
    at_start: bool = False
    # Between calls beside white space.
    between: str = ""
    args_keys: tuple[str, ...] = ("arguments", "parameters")
    # Of NAME_JSON: before and behind the name, and behind the arguments.
    name_prefix: str = ""
    name_end: str = ""
    tail: str = ""
    # The name is followed by a colon and the number of the call.
    numbered: bool = False
    # White space as models write it: behind `open` and before `close`, between calls, and within `around`.
    space: tuple[str, str] = ("", "")
    join: str = "\n"
    around_space: str = ""
    xml: Xml | None = None
    # Texts of which a chat template for this form has one, and those that it must not have.
    told_by: tuple[str, ...] = ()
    told_against: tuple[str, ...] = ()

    def markers(self) -> tuple[str, ...]:
        """All texts of the form that may be tokens."""
        found = [self.open, self.close, self.name_prefix, self.name_end, self.tail]
        found += self.around or ()
        if self.xml is not None:
            x = self.xml
            found += [x.name_open, x.name_close, x.key_open, x.key_close]
            found += [x.value_open, x.value_close, x.end]
        return tuple(filter(None, found))


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around what a model thinks before it answers."""

    name: str
    open: str
    close: str


def _deepseek(words: str) -> str:
    """A marker of DeepSeek's, which are written with characters of their own."""
    return f"<\uff5ctool\u2581{words.replace('_', chr(0x2581))}\uff5c>"


_HERMES_MARKERS = ("<tool_call>", "</tool_call>")
# Those that say more of a template come first.
_FORMATS = (
    OutputFormat(
        "qwen3_coder",
        Body.XML,
        *_HERMES_MARKERS,
        xml=Xml("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", True),
        told_by=("<function=",),
    ),
    OutputFormat(
        "glm45",
        Body.XML,
        *_HERMES_MARKERS,
        xml=Xml("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", ""),
        told_by=("<arg_key>",),
    ),
    OutputFormat(
        "minimax_m2",
        Body.XML,
        around=("<minimax:tool_call>", "</minimax:tool_call>"),
        around_space="\n",
        open="<invoke",
        close="</invoke>",
        xml=Xml(' name="', '">', '<parameter name="', '">', "", "</parameter>", ""),
        told_by=("<minimax:tool_call>",),
    ),
    OutputFormat(
        "hermes", Body.JSON, *_HERMES_MARKERS, space=("\n", "\n"), told_by=("<tool_call>",)
    ),
    OutputFormat(
        "deepseek_v31",
        Body.NAME_JSON,
        around=(_deepseek("calls_begin"), _deepseek("calls_end")),
        open=_deepseek("call_begin"),
        close=_deepseek("call_end"),
        name_end=_deepseek("sep"),
        told_by=(_deepseek("call_begin"),),
        told_against=("```json",),
    ),
    OutputFormat(
        "deepseek_v3",
        Body.NAME_JSON,
        around=(_deepseek("calls_begin"), _deepseek("calls_end")),
        open=_deepseek("call_begin"),
        close=_deepseek("call_end"),
        name_prefix="function" + _deepseek("sep"),
        name_end="\n```json\n",
        tail="\n```",
        told_by=(_deepseek("call_begin"),),
    ),
    OutputFormat(
        "kimi_k2",
        Body.NAME_JSON,
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        open="<|tool_call_begin|>",
        close="<|tool_call_end|>",
        name_prefix="functions.",
        numbered=True,
        join="",
        name_end="<|tool_call_argument_begin|>",
        told_by=("<|tool_calls_section_begin|>",),
    ),
    OutputFormat(
        "mistral_args",
        Body.NAME_JSON,
        open="[TOOL_CALLS]",
        name_end="[ARGS]",
        join="",
        told_by=("[ARGS]",),
    ),
    OutputFormat(
        "mistral", Body.JSON_ARRAY, open="[TOOL_CALLS]", join=", ", told_by=("[TOOL_CALLS]",)
    ),
    OutputFormat(
        "internlm2",
        Body.JSON,
        open="<|action_start|><|plugin|>",
        close="<|action_end|>",
        space=("\n", ""),
        args_keys=("parameters", "arguments"),
        told_by=("<|action_start|>",),
    ),
    OutputFormat(
        "pythonic",
        Body.PYTHONIC,
        open="<|python_start|>",
        close="<|python_end|>",
        at_start=True,
        told_by=("<|python_start|>", "[func_name1("),
    ),
    OutputFormat(
        "llama3_json",
        Body.JSON,
        open="<|python_tag|>",
        at_start=True,
        between=";",
        join="; ",
        args_keys=("parameters", "arguments"),
        told_by=("<|python_tag|>", '"parameters": dictionary of argument name'),
    ),
)
_REASONING = (
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
)
FORMATS: Mapping[str, OutputFormat] = {row.name: row for row in _FORMATS}
REASONING: Mapping[str, ReasoningFormat] = {row.name: row for row in _REASONING}
# Names that vLLM has for the same.
CALL_ALIASES: Mapping[str, str] = {
    "qwen3_xml": "qwen3_coder",
    "glm47": "glm45",
    "internlm": "internlm2",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
}
REASONING_ALIASES: Mapping[str, str] = dict.fromkeys(
    ("deepseek_r1", "deepseek_v3", "glm45", "hunyuan_a13b", "kimi_k2", "minimax_m2", "qwen3"),
    "think",
)

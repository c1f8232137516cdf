"""Calls of tools as models write them, in each form of the table."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from shared.output_format.table import FORMATS

Call = tuple[str, dict[str, Any]]


class Plain(random.Random):
    """Draws what models usually write: names first, no escapes, no blanks."""

    def random(self) -> float:
        """The largest."""
        return 0.99

    def choice(self, seq: Any) -> Any:
        """The first."""
        return seq[0]


def _json(draw: random.Random, value: Any) -> str:
    return json.dumps(value, ensure_ascii=draw.random() < 0.3, indent=draw.choice([None, None, 2]))


def _member(draw: random.Random, call: Call, args: str) -> str:
    pairs = [("name", call[0]), (args, call[1])]
    if draw.random() < 0.3:
        pairs.reverse()
    return _json(draw, dict(pairs))


def _hermes(draw: random.Random, calls: Sequence[Call]) -> str:
    found = (_member(draw, call, "arguments") for call in calls)
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in found)


def _xml_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _qwen3_coder(draw: random.Random, calls: Sequence[Call]) -> str:
    text = ""
    for name, arguments in calls:
        text += f"<tool_call>\n<function={name}>\n"
        for key, value in arguments.items():
            text += f"<parameter={key}>\n{_xml_value(value)}\n</parameter>\n"
        text += "</function>\n</tool_call>\n"
    return text


def _glm45(draw: random.Random, calls: Sequence[Call]) -> str:
    text = ""
    for name, arguments in calls:
        text += f"<tool_call>{name}\n"
        for key, value in arguments.items():
            text += f"<arg_key>{key}</arg_key>\n<arg_value>{_xml_value(value)}</arg_value>\n"
        text += "</tool_call>\n"
    return text


def _minimax(draw: random.Random, calls: Sequence[Call]) -> str:
    text = "<minimax:tool_call>\n"
    for name, arguments in calls:
        text += f'<invoke name="{name}">\n'
        for key, value in arguments.items():
            text += f'<parameter name="{key}">{_xml_value(value)}</parameter>\n'
        text += "</invoke>\n"
    return text + "</minimax:tool_call>"


def _deepseek(before: str, name_end: str, behind: str) -> Callable[..., str]:
    def written(draw: random.Random, calls: Sequence[Call]) -> str:
        row = FORMATS["deepseek_v3"]
        assert row.around is not None
        found = "\n".join(
            f"{row.open}{before}{name}{name_end}{json.dumps(args, ensure_ascii=False)}{behind}{row.close}"
            for name, args in calls
        )
        return row.around[0] + found + row.around[1]

    return written


_SEP = FORMATS["deepseek_v31"].name_end


def _kimi(draw: random.Random, calls: Sequence[Call]) -> str:
    found = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(args, ensure_ascii=False)}"
        "<|tool_call_end|>"
        for index, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{found}<|tool_calls_section_end|>"


def _mistral(draw: random.Random, calls: Sequence[Call]) -> str:
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS]{draw.choice(['', ' '])}{_json(draw, listed)}"


def _mistral_args(draw: random.Random, calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(draw, args)}" for name, args in calls)


def _internlm2(draw: random.Random, calls: Sequence[Call]) -> str:
    return "".join(
        f"<|action_start|><|plugin|>\n{_member(draw, call, 'parameters')}<|action_end|>\n"
        for call in calls
    )


def _llama3(draw: random.Random, calls: Sequence[Call]) -> str:
    return "; ".join(_member(draw, call, "parameters") for call in calls)


def _pythonic(draw: random.Random, calls: Sequence[Call]) -> str:
    written = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(written)}]"


WRITTEN: dict[str, Callable[[random.Random, Sequence[Call]], str]] = {
    "hermes": _hermes,
    "qwen3_coder": _qwen3_coder,
    "glm45": _glm45,
    "minimax_m2": _minimax,
    "deepseek_v3": _deepseek("function" + _SEP, "\n```json\n", "\n```"),
    "deepseek_v31": _deepseek("", _SEP, ""),
    "kimi_k2": _kimi,
    "mistral": _mistral,
    "mistral_args": _mistral_args,
    "internlm2": _internlm2,
    "llama3_json": _llama3,
    "pythonic": _pythonic,
}

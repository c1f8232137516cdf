"""Every call of torch_npu in our sources fits the signatures that its releases register.

Neither torch_npu nor a device is needed: tests/ascend/schemas.py wrote the signatures down out of the wheels.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
RELEASES = json.loads((Path(__file__).parent / "torch_npu_schemas.json").read_text())
# What a release takes otherwise; the call is made where `supports(op, argument)` says so.
GUARDED = {("2.8.0", "npu_scatter_pa_kv_cache"): "cache_mode"}
# Modules and values of torch_npu, which are no ops.
NO_OPERATORS = {"npu", "__version__"}
_PLACES = ("torch_npu.", "torch.ops.npu.", "torch.ops.atb.")


@dataclass(frozen=True)
class Use:
    """`call` is None where an op is named without being called: then nobody can check its arguments."""

    operator: str
    where: str
    call: ast.Call | None


def uses(source: str, where: str) -> Iterator[Use]:
    """All ops of torch_npu that a source names."""
    tree = ast.parse(source)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] == "torch_npu"
        ):
            names = {alias.name for alias in node.names} - NO_OPERATORS
            yield from (Use(name, f"{where}:{node.lineno}", None) for name in names)
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            operator = _operator(ast.unparse(node))
            if operator and operator not in NO_OPERATORS:
                yield Use(operator, f"{where}:{node.lineno}", called.get(id(node)))


def _operator(written: str) -> str:
    place = next((place for place in _PLACES if written.startswith(place)), None)
    return "" if place is None else written.removeprefix(place).partition(".")[0]


def fits(schema: torch.FunctionSchema, call: ast.Call) -> bool:
    """Whether the arguments that are given exist, and those without a default are given."""
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    keywords = {keyword.arg for keyword in call.keywords}
    first = set(positional[: len(call.args)])
    known = {argument.name for argument in schema.arguments}
    needed = {argument.name for argument in schema.arguments if not argument.has_default_value()}
    return (
        len(call.args) <= len(positional)
        and keywords <= known - first
        and needed <= first | keywords
    )


def problem(use: Use, release: str) -> str:
    """What is wrong with a use in a release of torch_npu; "" for nothing."""
    call = use.call
    if call is None:
        return "named without a call, so its arguments cannot be checked"
    stars = any(isinstance(argument, ast.Starred) for argument in call.args)
    if stars or any(keyword.arg is None for keyword in call.keywords):
        return "called with * or **, so its arguments cannot be checked"
    texts = RELEASES[release].get(use.operator)
    if texts is None:
        return f"torch_npu {release} has no such op, or tests/ascend/schemas.py does not list it"
    schemas = [torch._C.parse_schema(text) for text in texts]
    if any(fits(schema, call) for schema in schemas):
        return ""
    given = [keyword.arg for keyword in call.keywords]
    if GUARDED.get((release, use.operator)) in given:
        return ""
    return f"{len(call.args)} arguments and {given} fit none of {texts}"


def sources() -> dict[str, str]:
    """Of services and what they share, by path."""
    found = (path for part in ("services", "shared") for path in (ROOT / part).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text() for path in found}


@pytest.mark.parametrize("release", RELEASES)
def test_every_call_fits(release: str) -> None:
    found = [
        use for where, text in sources().items() if "torch_npu" in text for use in uses(text, where)
    ]
    assert found, "no calls found"
    problems = [
        f"{use.where}: {use.operator}: {why}" for use in found if (why := problem(use, release))
    ]
    assert not problems, "\n".join(problems)


def test_what_a_release_takes_otherwise_is_asked_for() -> None:
    asked = {
        tuple(ast.literal_eval(argument) for argument in node.args)
        for text in sources().values()
        if "torch_npu" in text or "supports(" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "supports"
        and all(isinstance(argument, ast.Constant) for argument in node.args)
    }
    for (_, operator), argument in GUARDED.items():
        assert (operator, argument) in asked


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("npu_rms_norm(x, w, 1e-5)", ""),
        ("npu_rms_norm(x, gamma=w)", ""),
        ("npu_rms_norm(self=x, gamma=w)", "fit none"),
        ("npu_rms_norm(x)", "fit none"),
        ("npu_rms_norm(x, w, 1e-5, 2)", "fit none"),
        ("npu_swiglu(x, axis=1)", "fit none"),
        ("npu_swiglu(**options)", "cannot be checked"),
        ("npu_swiglu", "cannot be checked"),
        ("npu_rope_of_next_year(x)", "no such op"),
        ("_npu_reshape_and_cache(k, v, kc, vc, slots)", ""),
        ("_npu_reshape_and_cache(k, v, kc, vc, slots, mode=1)", "fit none"),
    ],
)
@pytest.mark.parametrize("place", _PLACES)
def test_a_wrong_call_is_found(place: str, call: str, message: str) -> None:
    [use] = uses(f"y = {place}{call}", "here")
    found = problem(use, "2.13.0")
    assert message in found and bool(message) == bool(found)

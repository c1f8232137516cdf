"""Right answers of the demo model with each quantization, through all services: `answers`.

Questions and judgement are those of `examples/demo_model/evaluate.py`, without tools. All schemes are asked the same.
"""

import argparse
from typing import Any

from examples.demo_model.evaluate import Case, cases, messages
from examples.demo_model.judge import right
from services.launcher.offline.llm import LLM
from services.launcher.offline.sampling_params import SamplingParams
from shared.settings import DEMO_MODEL
from shared.weights.scheme import NONE, SCHEMES


def main(arguments: list[str]) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-kind", type=int, default=5, help="questions per kind and language")
    parser.add_argument("--schemes", nargs="+", choices=(NONE, *SCHEMES), default=[NONE, *SCHEMES])
    parser.add_argument("--seed", type=int, default=2)
    told = parser.parse_args(arguments)
    asked = [case for source in ("ours", "other") for case in _cases(source, told)]
    print(f"{len(asked)} questions\n| | right | as {told.schemes[0]} says |\n|---|---|---|")
    first: list[str] = []
    for name in told.schemes:
        said = _answers(name, asked)
        first = first or said
        hits = sum(map(right, said, (case.turns[-1].answer for case in asked)))
        same = sum(one == other for one, other in zip(said, first, strict=True))
        print(f"| {name} | {hits / len(asked):.1%} | {same / len(asked):.1%} |", flush=True)


def _cases(source: str, told: argparse.Namespace) -> list[Case]:
    found = cases(source, told.per_kind, told.seed)
    return [case for case in found if not case.kind.startswith("tool")]


def _answers(quantization: str, asked: list[Case]) -> list[str]:
    greedy = SamplingParams(temperature=0, max_tokens=256)
    with LLM(DEMO_MODEL, quantization=quantization) as model:
        outputs = model.chat([_conversation(case) for case in asked], greedy)
    return [output.outputs[0].text.strip() for output in outputs]


def _conversation(case: Case) -> list[dict[str, Any]]:
    found = messages(case)
    for message in found:
        if isinstance(message["content"], list):
            message["content"] = [
                {"image": case.picture} if part["type"] == "image" else part
                for part in message["content"]
            ]
    return found

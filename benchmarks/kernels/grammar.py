"""What a JSON schema costs the decoder in a step: `make bench ARGS='grammar /path/to/checkpoint'`.

Equal sequences run without a schema, with one for a single sequence, and with one for all, round by round in turn.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from llguidance import LLMatcher

from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from services.decoder.worker.plans.plan import read_plan
from services.decoder.worker.worker import Worker
from shared.telemetry.logs import configure_logs
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1.decoder_pb2 import NewSequence, StepPlan, StepResult

# An answer to it: about as many tokens are text as belong to the form, and it is longer than any round.
_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 40},
        "price": {"type": "number"},
        "kind": {"enum": ["goods", "service", "fee"]},
        "paid": {"type": "boolean"},
    },
    "required": ["name", "price", "kind", "paid"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": _ITEM, "minItems": 200}
_QUICK = 10  # the percentile that is shown: other work on the machine only makes steps slower
_CASES = {"none": 0, "one": 1, "all": None}  # how many have a schema


def main(arguments: list[str]) -> int:
    """Prints milliseconds of a quick step for each case, and what they are above the first."""
    parser = argparse.ArgumentParser(prog="grammar")
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 0.8])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48, help="of each sequence in a round")
    told = parser.parse_args(arguments)
    configure_logs("bench", "warning", "console")
    worker = load(DecoderSettings(model=told.model, max_model_len=1024)).worker
    print(f"{'streams':>8}{'temperature':>13}" + "".join(f"{name:>18}" for name in _CASES))
    for streams in told.streams:
        for temperature in told.temperature:
            times: dict[str, list[float]] = {name: [] for name in _CASES}
            for _ in range(told.rounds):
                for name, with_schema in _CASES.items():
                    count = streams if with_schema is None else with_schema
                    times[name] += _round(worker, streams, count, temperature, told.tokens)
            quick = [1e3 * float(np.percentile(found, _QUICK)) for found in times.values()]
            row = "".join(f"{ms:9.2f} ({100 * (ms / quick[0] - 1):+5.1f} %)" for ms in quick)
            print(f"{streams:>8}{temperature:>13}{row}", flush=True)
    return 0


def _round(
    worker: Worker, streams: int, with_schema: int, temperature: float, tokens: int
) -> list[float]:
    """Seconds of each step but the first ones, in which prompts are computed and grammars are late."""
    grammar = LLMatcher.grammar_from_json_schema(
        SCHEMA, overrides={"whitespace_pattern": r"[\x20\x0A]{1,8}"}
    )
    prompt, size = 32, worker.limits.block_size
    blocks = -(-(prompt + tokens) // size)
    slots, order = list(range(streams)), list(range(streams))
    plan = StepPlan(
        new=[
            NewSequence(
                slot=slot,
                prompt_len=prompt,
                tokens=_ints([(7 * i + slot) % 200 + 2 for i in range(prompt)]),
                sampling=SamplingParams(
                    repetition_penalty=1,
                    top_p=1,
                    max_tokens=tokens,
                    temperature=temperature,
                    seed=slot,
                    grammar=grammar if slot < with_schema else "",
                ),
            )
            for slot in slots
        ],
        edit_slot=_ints(slots),
        edit_index=_ints([0] * streams),
        edit_len=_ints([blocks] * streams),
        edit_blocks=_ints(range(1, 1 + blocks * streams)),
    )
    found, results = [], list[StepResult]()
    for done in range(tokens):
        start, count = (0, prompt) if done == 0 else (prompt + done - 1, 1)
        plan.step = done + 1
        plan.row_slot, plan.sample_slot, plan.sample_row = map(_ints, (slots, slots, order))
        plan.row_start, plan.row_count = _ints([start] * streams), _ints([count] * streams)
        accepted = worker.accept(plan) if done == 0 else read_plan(plan, worker.limits)
        began = time.perf_counter()
        worker.step(accepted, results.append)
        found.append(time.perf_counter() - began)
        plan = StepPlan()
    for result in results:
        for failed in result.failed:
            raise RuntimeError(failed.failure.message)
    worker.reset()
    return found[3:]


def _ints(values: "list[int] | range") -> bytes:
    return np.asarray(values, "<i4").tobytes()

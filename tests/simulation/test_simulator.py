"""The real core and router against simulated decoders: everything ends, nothing is left, affinity pays."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulator.command import main
from benchmarks.simulator.costs import RequestCosts, StepCosts
from benchmarks.simulator.decoder import Timing
from benchmarks.simulator.fleet import simulate
from benchmarks.simulator.outcome import Outcome
from benchmarks.simulator.shard import ShardOptions
from benchmarks.simulator.trace import Arrival, Picture, TraceOptions, generated, read
from services.scheduler.core.budget import Capacity

SMALL = TraceOptions(
    requests=600, rate=240, prefixes=60, prefix_tokens=128, own_tokens=64, output_tokens=12
)


def run(
    trace: TraceOptions = SMALL, policy: str = "affinity", processes: int = 1, **changes: int
) -> Outcome:
    sizes = Capacity(513, 16, 32, 2048, 512)
    capacity = replace(sizes, **changes)  # type: ignore[arg-type]  # some fields are no numbers
    options = ShardOptions(decoders=12, capacity=capacity, policy=policy)
    return Outcome(simulate(generated(trace), options, processes), 1.0)


def changed(**changes: float) -> TraceOptions:
    return TraceOptions(**{**vars(SMALL), **changes})


def test_everything_ends_and_nothing_is_left() -> None:
    outcome = run()
    assert outcome.total("requests") == len(outcome.latency("ttft")) == 600
    assert outcome.leaks == [] and outcome.lost == 0
    asked = [arrival.output_tokens for arrival in generated(SMALL)]
    assert outcome.total("output_tokens") == sum(asked)
    assert outcome.total("prompt_tokens") == sum(a.prompt_tokens for a in generated(SMALL))
    assert (outcome.latency("ttft") > 0.010).all()  # a step takes at least that
    assert 0 < outcome.utilisations.min() <= outcome.utilisations.max() <= 1


def test_affinity_beats_the_others() -> None:
    outcomes = {name: run(policy=name) for name in ("affinity", "least-loaded", "round-robin")}
    rates = {name: outcome.hit_rate for name, outcome in outcomes.items()}
    # Six tenths of the prompt are shared, and each prefix must be computed once at least.
    assert 0.4 < rates["affinity"] < 0.67
    assert rates["affinity"] > 1.3 * rates["least-loaded"]
    assert rates["affinity"] > 1.3 * rates["round-robin"]
    mean = {name: outcome.latency("ttft").mean() for name, outcome in outcomes.items()}
    assert mean["affinity"] < mean["least-loaded"]
    assert mean["affinity"] < mean["round-robin"]


def test_one_hot_prefix_does_not_crowd_a_decoder() -> None:
    hot = changed(prefixes=1)
    affinity, least_loaded = run(hot), run(hot, "least-loaded")
    assert affinity.hit_rate > 0.5
    assert affinity.latency("ttft").mean() < 1.1 * least_loaded.latency("ttft").mean()
    assert affinity.latency("tpot").mean() < 1.1 * least_loaded.latency("tpot").mean()


def test_two_processes_do_the_same_work() -> None:
    one, two = run(), run(processes=2)
    for name in ("requests", "output_tokens", "prompt_tokens"):
        assert one.total(name) == two.total(name)
    assert two.leaks == []
    assert len(two.utilisations) == 12


def test_the_same_run_twice_is_the_same() -> None:
    first, second = run(), run()
    assert list(first.latency("ttft")) == list(second.latency("ttft"))
    assert list(run(changed(seed=1)).latency("ttft")) != list(first.latency("ttft"))


def test_too_little_room_preempts_and_still_ends() -> None:
    outcome = run(changed(rate=2000, output_tokens=60), num_blocks=65, max_model_len=1024)
    assert outcome.total("preemptions") > 0
    assert outcome.leaks == []
    assert len(outcome.latency("ttft")) + outcome.total("refused") == 600


def test_bursts_wait_longer() -> None:
    steady, bursty = run(changed(rate=600)), run(changed(rate=600, burstiness=0.02))
    assert bursty.latency("ttft").mean() > steady.latency("ttft").mean()
    assert bursty.leaks == []


def test_a_surge_waits_longer_and_the_mean_rate_stays() -> None:
    steady, surging = (list(generated(changed(requests=3000, surge=s))) for s in (1, 3))
    assert surging[-1].at == pytest.approx(steady[-1].at, rel=0.1)
    in_surge = sum(arrival.at % 1 < 0.2 for arrival in surging)
    assert in_surge == pytest.approx(0.6 * len(surging), rel=0.1)
    assert run(changed(surge=4)).latency("ttft").mean() > run().latency("ttft").mean()


def test_costs_are_taken_apart() -> None:
    steps = StepCosts()
    for number in range(400):
        generating, prompts, endings = number % 23, number % 3, number % 2
        seconds = 1e-6 * (9 + 1.5 * generating + 30 * prompts + 11 * endings)
        lost_its_core = number % 50 == 7
        steps.add(seconds + 0.004 * lost_its_core, generating, prompts, endings)
    assert list(steps.us().values()) == pytest.approx([9, 1.5, 30, 11])
    both = StepCosts()
    both.extend(steps)
    both.extend(steps)
    assert both.us_of_row() == pytest.approx(steps.us_of_row())
    assert steps.us_of_row() > 1.5
    requests = RequestCosts()
    for number in range(100):
        requests.add(20e-6 + 1e-7 * (number % 3 - 1), 8e-6 if number else 1.0, 3e-6)
    assert requests.us() == pytest.approx({"hashing": 20, "routing": 8, "adding": 3}, rel=0.01)
    assert RequestCosts().us()["routing"] == 0


def test_pictures_are_encoded_once_and_waited_for() -> None:
    outcome = run(changed(with_picture=0.5, pictures=40, picture_tokens=100, encode_s=0.2))
    assert outcome.leaks == []
    assert 0 < outcome.total("encodes") <= 40
    assert outcome.total("encoder_hits") > 0
    assert (outcome.latency("ttft") > 0.2).sum() >= outcome.total("encodes")


def test_a_trace_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    image = {"digest": "a", "tokens": 20, "encode_s": 0.1}
    lines = [
        {"at": 0, "prompt_tokens": 100, "output_tokens": 3, "prefix": "p", "prefix_tokens": 60},
        {"at": 1, "prompt_tokens": 100, "output_tokens": 3, "prefix": "p", "prefix_tokens": 60},
        {"at": 1.5, "prompt_tokens": 50, "output_tokens": 1, "images": [image]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    first, second, third = read(file)
    assert first == Arrival(0, 0.0, 0, 60, 40, 3)
    assert second.prefix == first.prefix != third.prefix
    assert third.pictures == (Picture(0, 20, 0.1),) and third.prompt_tokens == 50
    result = tmp_path / "result.json"
    flags = ["--trace", str(file), "--decoders", "2", "--processes", "1", "--output", str(result)]
    assert main(flags) == 0
    content = json.loads(result.read_text())["affinity"]
    assert content["requests"] == 3 and content["leaks"] == []
    assert content["hit_rate"] == pytest.approx(48 / 250)  # three whole blocks of the prefix
    file.write_text('{"at": 0, "prompt_tokens": 10, "output_tokens": 1, "prefix_tokens": 10}')
    with pytest.raises(ValueError, match="line 1"):
        list(read(file))


def test_a_step_takes_what_is_in_it() -> None:
    timing = Timing(step_s=0.01, token_s=0.001, row_s=0.1)
    assert timing.of(20, 2) == pytest.approx(0.23)
    assert timing.of(0, 0) < 0.001

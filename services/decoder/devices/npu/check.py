"""`python -m services.decoder.devices.npu.check`: tries the NPU, and prints a JSON object for everything it tries.

    {"name": ..., "ok": true, "error": the largest difference, "us": microseconds a call, "gb_s": ..., "detail": ...}

All but `name` and `ok` may be null. It ends with status 1 if something is not right.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from services.decoder.devices.npu.checks import ranks_check
from services.decoder.devices.npu.checks.check_cases import Cases
from services.decoder.devices.npu.checks.check_steps import StepCases
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.errors import explain
from services.decoder.devices.npu.forms import (
    Asked,
    Coded,
    CodedHeads,
    Grouping,
    Heads,
    Routing,
    Trial,
    Weights,
    Writing,
)
from services.decoder.devices.npu.trials import trials
from shared.hardware.ascend import is_310p, npu_name
from shared.hardware.operation_check import Result, print_results, seconds_of, try_case

# Heads of queries, of keys, and the size of each, as models have them.
_HEADS = ((14, 2, 64), (28, 4, 128), (32, 8, 128), (16, 16, 128), (7, 1, 128), (8, 4, 256))
# Of Qwen2: elements of keys with large biases have two digits.
_LARGE_HEADS = (28, 4, 128, 160, 4)
_HEADS_WITH_SINKS = (64, 8, 64)
_WRITTEN = ((2, 64), (8, 128), (1, 128))
# Experts of Qwen3-30B-A3B, DeepSeek-V2-Lite and, with biases, of small ones.
_EXPERTS = ((128, 2048, 1536, 768), (64, 2048, 2816, 1408), (32, 256, 256, 128, True))
_CHOICES = ((128, 8), (64, 6))
_WEIGHTS = ((1152, 896), (896, 4864), (6144, 4096))
# Outputs and inputs, bits and inputs that share a scale, and whether there are zero points: of `--quantization`'s
# int8, int8g128 and int4, of AWQ and GPTQ, and the last with activations of 8 bits.
_CODED = (
    (8, 0, False),
    (8, 128, False),
    (4, 64, True),
    (4, 128, True),
    (4, 128, False),
    (4, 0, False),
)
_CODED_SIZES = ((1152, 896), (896, 4864))
# Of the buffers by which bandwidths are measured: at most, and of the device's memory.
_MOST_BYTES = 256 << 20
_PART = 128


def results(dtypes: tuple[torch.dtype, ...]) -> Iterator[Result]:
    """Everything, in every element type."""
    for dtype in dtypes:
        device = NpuDevice(dtype)
        kind = str(dtype).removeprefix("torch.")
        yield from by_forms(device, kind)
        for case in (*Cases(device), *StepCases(device)):
            yield try_case(case, kind, device.synchronize, explain)
    yield from ranks_check.results()
    yield from _bandwidths(device, min(_MOST_BYTES, device.memory().total // _PART))


def by_forms(device: NpuDevice, kind: str) -> Iterator[Result]:
    """What has several forms, tried in other processes, so that a kernel that fails leaves this one the device."""
    asked: list[Asked] = [Writing(num_kv, size) for num_kv, size in _WRITTEN]
    for window in (False, True):
        asked += [Heads(*heads, window=window) for heads in _HEADS]
        asked.append(Heads(*_HEADS_WITH_SINKS, window=window, sinks=True))
    asked += [Grouping(*sizes) for sizes in _EXPERTS]
    asked += [Routing(*sizes) for sizes in _CHOICES]
    if not is_310p():  # which has no other layout, and no attention to codes
        asked += [Writing(num_kv, size, coded=True) for num_kv, size in _WRITTEN]
        asked += [CodedHeads(*heads, heads[-1]) for heads in _HEADS]
        asked.append(CodedHeads(*_LARGE_HEADS))
        asked += [Weights(*sizes, faster=True) for sizes in _WEIGHTS]
    for out, inputs in _CODED_SIZES:
        asked += [Coded(out, inputs, *how) for how in _CODED]
        asked.append(Coded(out, inputs, 8, 0, activations=8))
        asked.append(Coded(out, inputs, 8, 0, activations=8, fixed=True))
    forms = {each: device.ops.known_forms(each) for each in asked}
    attempts = [(each, form) for each in asked for form in forms[each]]
    tried = trials.apart_or_here(device.ops, attempts)
    for each in asked:
        yield result_of_forms(device, each, [next(tried) for _ in forms[each]], kind)


def result_of_forms(device: NpuDevice, asked: Asked, tried: Sequence[Trial], kind: str) -> Result:
    """Right if one form of the kernel is; where there is none it says what is done instead."""
    name = f"{_name_of(asked)}, {kind}"
    said = "; ".join(f"{t.form.name}: {t.refusal or f'{t.error:.3g}'}" for t in tried)
    best = next((trial for trial in tried if trial.agrees), None)
    if not tried:
        instead = {Heads: device.ops.without_form, Coded: "codes become numbers"}
        return Result(name, True, detail=instead.get(type(asked), "by plain operations"))
    if best is None and isinstance(asked, Weights):  # they are in rows unless told otherwise
        return Result(name, True, detail=f"does not pay: {said}")
    if best is None:
        return Result(
            name, False, detail=f"no form of the kernel agrees with the reference: {said}"
        )
    return Result(
        name,
        True,
        best.error,
        detail=best.form.name if len(tried) == 1 else f"{best.form.name} ({said})",
    )


def _name_of(asked: Asked) -> str:
    match asked:
        case Writing():
            return (
                f"writing {asked.num_kv} heads of {asked.size}{' in 8 bits' if asked.coded else ''}"
            )
        case CodedHeads():
            large = f", {asked.upper} of them large" if asked.upper else ""
            heads = f"{asked.num_q}/{asked.num_kv} heads of {asked.size} elements"
            return f"attention to keys and values of 8 bits, {heads}{large}"
        case Grouping():
            return f"{asked.count} experts of {asked.inner} units over {asked.hidden}"
        case Routing():
            return f"choosing {asked.k} of {asked.count} experts"
        case Weights():
            return f"a weight {asked.out} x {asked.inputs} in tiles"
        case Coded():
            scales = f"groups of {asked.group}" if asked.group else "one scale an output"
            zeros = " and zero points" if asked.has_zeros else ""
            met = ", activations of 8 bits" if asked.activations == 8 else ""
            met += " with one step" if asked.fixed else ""
            size = f"{asked.out} x {asked.inputs}"
            return f"a weight {size} of {asked.bits} bits, {scales}{zeros}{met}"
        case Heads():
            wanted = {"a window": asked.window, "sinks": asked.sinks}
            extra = " and ".join(name for name, is_wanted in wanted.items() if is_wanted)
            extra = f" with {extra}" if extra else ""
            return f"attention, {asked.num_q}/{asked.num_kv} heads of {asked.size}{extra}"


def _bandwidths(device: NpuDevice, nbytes: int) -> Iterator[Result]:
    ops = device.ops
    here = torch.zeros(nbytes, dtype=torch.uint8, device=ops.device)
    there = torch.empty_like(here)
    host = device.pin(nbytes)
    copies: dict[str, tuple[Callable[[], object], int]] = {
        "copy on the device": (partial(there.copy_, here), 2 * nbytes),
        "copy to the device": (partial(here.copy_, host, non_blocking=True), nbytes),
        "copy to the host": (partial(host.copy_, here, non_blocking=True), nbytes),
    }
    for name, (copy, moved) in copies.items():
        seconds = seconds_of(copy, device.synchronize)
        yield Result(name, True, us=1e6 * seconds, gb_s=moved / seconds / 1e9)
    size = int((nbytes / 8) ** 0.5) // 16 * 16
    x = torch.zeros((size, size), dtype=torch.float16, device=ops.device)
    seconds = seconds_of(partial(torch.matmul, x, x), device.synchronize)
    speed = f"{2 * size**3 / seconds / 1e12:.1f} TFLOPS"
    yield Result(f"product of {size} x {size}, float16", True, us=1e6 * seconds, detail=speed)


def main() -> int:
    """Prints a line for each result as it comes."""
    print(Result("device", True, detail=f"{npu_name()}, torch {torch.__version__}").to_json())
    dtypes = (torch.float16,) if is_310p() else (torch.float16, torch.bfloat16)
    with torch.inference_mode():
        return print_results(results(dtypes))


if __name__ == "__main__":
    sys.exit(main())

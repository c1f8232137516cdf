"""What CANN's errors mean: its codes and sentences, each with the cause and what helps."""

import re
from dataclasses import dataclass

from shared.errors import Internal, Overloaded, ServingError, Unavailable
from shared.hardware.ascend import NNAL, TOOLKIT

_SMALLER = (
    "lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs, limit the pixels of an image, or"
    " raise --npu-reserved-memory"
)


@dataclass(frozen=True)
class Cause:
    """`pattern`: in the error's text. `kind`: what a service raises for it."""

    pattern: re.Pattern[str]
    reason: str
    remedy: str
    kind: type[ServingError] = Internal


def _cause(pattern: str, reason: str, remedy: str, kind: type[ServingError] = Internal) -> Cause:
    return Cause(re.compile(pattern, re.IGNORECASE), reason, remedy, kind)


# The first that fits counts: what is special stands before what is general.
CAUSES = (
    _cause(
        r"libatb|nnal|_ZN3atb|atb.*undefined symbol",
        "NPU_LIBRARIES_MISSING",
        f"NNAL is missing or older than torch_npu: install the one that fits CANN, and source {NNAL}",
    ),
    _cause(
        r"lib(hccl|ascendcl|ge_runner|graph|acl_op_compiler)\.so|Failed to find function",
        "NPU_LIBRARIES_MISSING",
        f"CANN is missing or older than torch_npu: source {TOOLKIT}, and install versions that fit",
    ),
    _cause(
        r"EC0010|TeFusion|InitTbeFunc|\b500001\b",
        "NPU_LIBRARIES_MISSING",
        "CANN's compiler of operators cannot start: tessera doctor --device npu names the modules of Python that it"
        " lacks (pip install -e '.[npu]'); CANN before 9.0 wants numpy 1, with which this does not run",
    ),
    _cause(
        r"207008|207005|EL0009|stream resource",
        "NPU_STREAMS_EXHAUSTED",
        "too many graphs or streams: capture fewer sizes or run without graphs, and end other processes there",
    ),
    _cause(
        r"EI0006|HCCL.*(time ?out|timed out)|socket.*timeout",
        "NPU_RANKS_NOT_CONNECTED",
        "a rank was late or is gone: see the logs of the other ranks, and raise HCCL_CONNECT_TIMEOUT",
        Unavailable,
    ),
    _cause(
        r"EJ0001|EI0004|EI0015",
        "NPU_RANKS_NOT_CONNECTED",
        "what an ended run held is not free yet: wait ten seconds and start again",
        Unavailable,
    ),
    _cause(
        r"out of memory|207001|EL0004|Failed to allocate|rtMalloc",
        "NPU_OUT_OF_MEMORY",
        _SMALLER,
        Overloaded,
    ),
    _cause(
        r"507010|507899|heartbeat.*lost|107010|device.*(lost|offline)|107002|context is null",
        "NPU_LOST",
        "the device does not answer: see npu-smi info and dmesg; the service starts again by itself",
        Unavailable,
    ),
    _cause(
        r"DT_BFLOAT16|bfloat16.*not (implemented|support)",
        "UNSUPPORTED_DTYPE",
        "this NPU has no bfloat16: give --dtype float16",
    ),
    _cause(
        r"561002|561103|tiling",
        "NPU_KERNEL_REFUSED",
        "an operator does not take these shapes: run tessera doctor --npu, and report the model with its output",
    ),
    _cause(
        r"507015|507046|507011|507014|aicore|aivec|AI ?CPU|vector core exception",
        "NPU_KERNEL_FAILED",
        "an operator failed on the device, perhaps an earlier one than named here: run again with"
        " ASCEND_LAUNCH_BLOCKING=1 to see which, and tessera doctor --npu",
    ),
    _cause(
        r"not supported.*(310P|Ascend)|E[ZE]1\d{3}|EZ9999|EZ3003",
        "NPU_OPERATOR_MISSING",
        "this CANN has no such operator for this NPU: run tessera doctor --npu, and update CANN's kernels package",
    ),
)


def find_cause(error: BaseException) -> Cause | None:
    """What an error of torch_npu or CANN means, where that is known."""
    text = f"{type(error).__name__}: {error}"
    return next((cause for cause in CAUSES if cause.pattern.search(text)), None)


def explain(error: BaseException) -> str:
    """The error's first line, and what helps."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    cause = find_cause(error)
    return lines[0] if cause is None else f"{lines[0]}: {cause.remedy}"


def translate(error: Exception) -> ServingError | None:
    """An error that says what helps; None for one that is not known."""
    cause = find_cause(error)
    return None if cause is None else cause.kind(cause.reason, explain(error))

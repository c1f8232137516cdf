"""The compiled kernels, called through ctypes."""

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_uint8, c_void_p

import structlog

from shared.cpu_kernels import choice, compiling, trial
from shared.cpu_kernels.instruction_sets import InstructionSet
from shared.errors import InvalidRequest
from shared.settings import cpu_arithmetic_is_portable, cpu_instructions, cpu_trial_folder

log = structlog.get_logger(__name__)

# Of each library the process and the threads of its pool.
_pools: dict[str, tuple[int, int]] = {}
_starting = threading.Lock()

PLAIN, SWIGLU, GELU, GELU_TANH, QUICK_GELU = range(5)
SAME, WIDE, LARGEST = 0, 1, 2


class Sizes(Structure):
    """See `kernels.cpp`."""

    _fields_ = (("lanes", c_int32), ("panel", c_int32), ("page", c_int32), ("step", c_int32))


class Linear(Structure):
    """See `linear.h`."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("epilogue", c_int32),
        ("result", c_int32),
        ("quantized", c_void_p),
    )


class Quantized(Structure):
    """See `quantized_linear.h`."""

    _fields_ = (
        ("scales", c_void_p),
        ("minima", c_void_p),
        ("factors", c_void_p),
        ("minimum_factors", c_void_p),
        ("zeros", c_void_p),
        ("order", c_void_p),
        ("group", c_int64),
        ("format", c_int32),
        ("scale_type", c_int32),
        ("digits", c_int32),
        ("zero", c_int32),
        ("run_shift", c_int32),
        ("table", c_uint8 * 16),
    )


class Shortlist(Structure):
    """See `shortlist.h`."""

    _fields_ = (
        ("sketch", c_void_p),
        ("columns", c_void_p),
        ("inputs", c_int64),
        ("largest_norm", c_float),
        ("rest", c_int32),
        ("pause", c_int32),
    )


class Cache(Structure):
    """See `pages.h`."""

    _fields_ = (
        ("base", c_void_p),
        ("pages", c_int64),
        ("heads", c_int64),
        ("size", c_int64),
        ("real", c_int64),
        ("kept", c_void_p),
        ("kept_count", c_int64),
        ("coded", c_int64),
    )


class Attention(Structure):
    """See `attention.h`."""

    _fields_ = (
        ("q", c_void_p),
        ("out", c_void_p),
        ("q_stride", c_int64),
        ("out_stride", c_int64),
        ("table", c_void_p),
        ("table_stride", c_int64),
        ("tasks", c_void_p),
        ("num_tasks", c_int64),
        ("q_heads", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int64),
        ("sinks", c_void_p),
    )


class RopeWrite(Structure):
    """See `rows.h`."""

    _fields_ = (
        ("qkv", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("slots", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("tokens", c_int64),
        ("q_heads", c_int64),
        ("eps", c_float),
        ("wide", c_int32),
    )


class Segments(Structure):
    """See `segments.h`."""

    _fields_ = (
        ("rows", c_int64),
        ("count", c_int64),
        ("starts", c_void_p),
        ("members", c_void_p),
    )


class Adapter(Structure):
    """See `segments.h`: for each product its additions and how many."""

    _fields_ = tuple(
        field
        for product in ("qkv", "output", "gate_up", "down")
        for field in ((product, c_void_p), (f"{product}_count", c_int64))
    )


class Layer(Structure):
    """See `layer.h`."""

    _fields_ = (
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("post_norm", c_void_p),
        ("after_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("window", c_int64),
        ("eps", c_float),
    )


class LayerStep(Structure):
    """See `layer.h`."""

    _fields_ = (
        ("rope", RopeWrite),
        ("attention", Attention),
        ("normed", c_void_p),
        ("residual", c_void_p),
        ("gated", c_void_p),
        ("rows", c_int64),
    )


class Kernels:
    """The functions of `kernels.cpp`, with a pool of `threads`; one object for each process.

    lanes: float32 in a vector; panel: columns of a packed weight that lie together; page: tokens of
    the cache that lie together, a block being one page or several; step: inputs of a packed bfloat16
    weight are a multiple of it. The library says them: they follow from its instruction set.
    """

    def __init__(self, library: ctypes.CDLL, known: InstructionSet, threads: int) -> None:
        self.name = known.name  # of the instruction set
        self.portable = known.portable
        self.arithmetic = known.arithmetic  # what its bits depend on
        self.why = ""  # it was chosen
        self.threads = threads
        library.tessera_sizes.restype = Sizes
        sizes = library.tessera_sizes()
        self.lanes: int = sizes.lanes
        self.panel: int = sizes.panel
        self.page: int = sizes.page
        self.step: int = sizes.step
        self.pack = _declare(
            library.tessera_pack, c_int, c_void_p, c_int64, c_int64, c_int, c_void_p
        )
        self.pack_codes = _declare(
            library.tessera_pack_codes,
            c_void_p, c_int64, c_int64, c_int, c_int64, c_int, c_void_p,
        )  # fmt: skip
        self.linear = _declare(
            library.tessera_linear,
            c_int, POINTER(Linear), c_void_p, c_void_p, c_int64, c_int64, c_int64,
        )  # fmt: skip
        self.adapted_linear = _declare(
            library.tessera_adapted_linear,
            c_int, POINTER(Linear), POINTER(Segments), c_void_p, c_void_p, c_void_p,
            c_int64, c_int64, c_int64,
        )  # fmt: skip
        self.sketch = _declare(
            library.tessera_sketch, c_int, c_void_p, c_int64, c_int64, POINTER(Shortlist)
        )
        self.largest = _declare(
            library.tessera_largest,
            c_int, POINTER(Linear), POINTER(Shortlist), c_void_p, c_void_p, c_int64, c_int64,
        )  # fmt: skip
        self.rms_norm = _declare(
            library.tessera_rms_norm,
            c_int, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p,
        )  # fmt: skip
        self.add_rms_norm = _declare(
            library.tessera_add_rms_norm,
            c_int, c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p,
        )  # fmt: skip
        self.add_layer_norm = _declare(
            library.tessera_add_layer_norm,
            c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p,
        )  # fmt: skip
        self.rope_write = _declare(
            library.tessera_rope_write, c_int, POINTER(RopeWrite), POINTER(Cache)
        )
        self.attention = _declare(
            library.tessera_attention, c_int, POINTER(Attention), POINTER(Cache)
        )
        self.layer = _declare(
            library.tessera_layer,
            c_int, POINTER(Layer), POINTER(LayerStep), POINTER(Cache), POINTER(Segments), c_void_p,
        )  # fmt: skip
        library.tessera_coded_page_bytes.argtypes = c_int, c_int64, c_int64
        library.tessera_coded_page_bytes.restype = c_int64
        self.coded_page_bytes: Callable[[int, int, int], int] = library.tessera_coded_page_bytes
        copies = (c_int, c_void_p, c_void_p, c_void_p, c_int64, POINTER(Cache))
        self.kv_write = _declare(library.tessera_kv_write, *copies)
        self.kv_read = _declare(library.tessera_kv_read, *copies)
        with (
            _starting
        ):  # a pool that another thread computes with is not to be replaced by its like
            if _pools.get(library._name) != (os.getpid(), threads):
                _declare(library.tessera_start, c_int)(threads)
                _pools[library._name] = os.getpid(), threads


@functools.lru_cache(maxsize=1)  # one pool of threads for each process
def load_kernels(threads: int) -> Kernels | None:
    """The best kernels for this machine, compiled and tried if need be; None, with a line in the log, if not.

    Raises InvalidRequest if TESSERA_CPU_INSTRUCTIONS names what this machine does not have, and where there are none
    for portable arithmetic (TESSERA_CPU_ARITHMETIC).
    """
    asked, portable = cpu_instructions(), cpu_arithmetic_is_portable()
    if compiling.compiler() and (missing := choice.uncompiled(asked, portable=portable)):
        log.info("compiling CPU kernels, once", instructions=missing)
    try:
        chosen = choice.choose(asked, cpu_trial_folder(), portable=portable)
    except ValueError as error:
        raise InvalidRequest("UNSUPPORTED_INSTRUCTIONS", str(error)) from None
    for warning in chosen.warnings:
        log.warning("CPU kernels", problem=warning)
    for known in chosen.sets:
        try:
            kernels = open_kernels(known, threads)
        except OSError as error:
            if asked:
                problem = f"CPU instructions {asked!r}: {error}"
                raise InvalidRequest("UNSUPPORTED_INSTRUCTIONS", problem) from None
            log.warning("CPU kernels", problem=f"{known.name} is passed over: {error}")
            continue
        kernels.why = chosen.why if known is chosen.sets[0] else "what is better cannot be opened"
        return kernels
    if portable:
        raise InvalidRequest(
            "UNSUPPORTED_ARITHMETIC",
            f"portable arithmetic needs the CPU kernels, and there are none ({chosen.why}); leave --cpu-arithmetic away"
            " or install a C++ compiler",
        )
    tell = log.info if asked == "none" else log.warning
    tell("no CPU kernels: torch does their work", why=chosen.why)
    return None


def open_kernels(known: InstructionSet, threads: int) -> Kernels:
    """Those of one instruction set, compiled if need be; the library's pool has `threads` from now on.

    Raises CalledProcessError where they cannot be compiled, OSError where they cannot be loaded or this process may not
    use them.
    """
    path = compiling.find(known)
    if path is None:
        path = compiling.compile_library(known)
    library = ctypes.CDLL(str(path))
    if problem := trial.refusal(library.tessera_admit()):
        raise PermissionError(problem)
    return Kernels(library, known, threads)


def _declare(function: "ctypes._NamedFuncPointer", *arguments: type) -> "ctypes._NamedFuncPointer":
    function.argtypes = arguments
    function.restype = None
    return function

"""What the bits of a process's results depend on beyond model, weights and element type, as a short text.

Two processes with equal numerics, of the same model and weights, compute equal bits where these do not vary with the
batch. Whether they do, a decoder says in `Hello.row_invariant`; of encoders the text itself says it, by its end.
"""

import re

from shared.cpu_kernels.arithmetic import ARITHMETIC_VERSION

_VARIES = "~"  # at the end of those of an encoder
_JOINT = "+"  # between those of a decoder and those of the encoders whose embeddings it takes


def of_cpu(arithmetic: str, torchs: str) -> str:
    """Of a CPU. arithmetic: of the kernels that compute (`InstructionSet.arithmetic`), "" where they do not; torchs:
    which torch computes, "" where none of the work is its own (`shared.hardware.torch_device.torch_arithmetic`)."""
    kernels = f"{arithmetic}-{ARITHMETIC_VERSION}" if arithmetic else ""
    return "/".join(_word(part) for part in (kernels, torchs) if part)


def of_accelerator(device: str, kind: str) -> str:
    """Of a device that computes with its libraries, such as "cuda" of the kind "NVIDIA H100 80GB HBM3"."""
    return _word(f"{device}-{kind}")


def varying(numerics: str) -> str:
    """The same of an encoder whose rows depend on what else is in the batch."""
    return numerics + _VARIES


def vary(numerics: str) -> bool:
    """Whether that is said of an encoder, or nothing is known of it."""
    return not numerics or numerics.endswith(_VARIES)


def joined(decoder: str, encoder: str | None) -> str:
    """Those of a request. encoder: of its embeddings; None where it has none."""
    return decoder if encoder is None else f"{decoder}{_JOINT}{encoder}"


def of_decoder(numerics: str) -> str:
    """The decoder's part of a request's."""
    return numerics.partition(_JOINT)[0]


def of_encoder(numerics: str) -> str:
    """The encoder's part of a request's; empty where there is none."""
    return numerics.partition(_JOINT)[2]


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-")

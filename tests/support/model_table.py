"""`python -m tests.support.model_table`: writes docs/models.md from the records of the families."""

from pathlib import Path

from transformers.models.auto import modeling_auto

import services.families
from services.families import registry
from services.families.family import GENERIC_ENCODER, GENERIC_PROMPT, Family, load_part
from services.families.generic import GENERIC
from services.families.report import code_of
from tessera.common.v1.media_pb2 import Modality

_ROOT = Path(__file__).parents[2]
FILE = _ROOT / "docs/models.md"
REASONS = _ROOT / "tests/decoder/models/generic_types.txt"  # lines "reason: types"
_CLASSES = Path(modeling_auto.__file__).read_text(encoding="utf-8")
_MODALITIES = {Modality.MODALITY_IMAGE: "images", Modality.MODALITY_VIDEO: "videos"}
_HEAD = """# Models

Written by `python -m tests.support.model_table` from the records of `services/families`; a test compares it with them.
`tessera check FOLDER` says the same of one checkpoint, and why one is refused.

A checkpoint's prompt and encoder are those of its architecture, its decoder is that of its text model: each encoder
goes with every decoder, and where a decoder is missing in a row it is another row's. *native* is code of this project,
*transformers* the model's own class or processor there. *off* is what a decoder does without. The oracle is what
outputs are compared with in the tests, on small models with random weights: the class of `transformers`, or *ours*, an
implementation in `tests/reference_models` that was written from the model's description alone.

"""
_SERVED = "served"
_TYPES = """
## Text models by the code of transformers

Every type that `transformers` 5.23 registers as a causal language model, tried in tiny with random weights by
`tests/decoder/models/test_generic_types.py`: served ones give the logits of the class's own forward, alone, together
and in pieces. Only layers of attention were tried: a checkpoint of these types with others, such as the convolutions of
`lfm2`, is refused by the names in its `layer_types`. Sparse attention to the most relevant tokens is refused although
short prompts, of which it takes all, look right.

"""


def table() -> str:
    """The file's text."""
    rows = [_row(name, family) for name, family in zip(_folders(), registry.in_tree(), strict=True)]
    generic = Family(("",), prompt=GENERIC_PROMPT, encoder=GENERIC_ENCODER)
    rows.append(
        [
            "any other with images",
            "of `transformers`",
            "",
            *_codes(generic),
            "images",
            "",
            "transformers",
        ]
    )
    head = "family | architectures | text models | prompt | encoder | decoder | media | off | oracle | released weights"
    rows.append(
        [
            "any other of text alone",
            "of `transformers`",
            "any",
            *_codes(GENERIC),
            "none",
            "measured at start",
            "transformers",
        ]
    )
    lines = [head.split(" | "), ["---"] * 10, *([*row, "never loaded"] for row in rows)]
    return _HEAD + _written(lines) + _TYPES + _written(_types())


def _written(lines: list[list[str]]) -> str:
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _types() -> list[list[str]]:
    """Reasons with the types that have them; first those that are served."""
    lines = REASONS.read_text(encoding="utf-8").splitlines()
    reasons = [line.partition(": ") for line in lines]
    reasons.sort(key=lambda line: line[0] != _SERVED)
    rows = [
        [reason, str(len(types.split())), types.replace(" ", ", ")] for reason, _, types in reasons
    ]
    return [["", "number", "model types"], ["---"] * 3, *rows]


def _folders() -> list[str]:
    base = Path(services.families.__path__[0])
    return sorted(file.parent.name for file in base.glob("*/__init__.py"))


def _row(name: str, family: Family) -> list[str]:
    media = ", ".join(_MODALITIES[modality] for modality in family.modalities)
    off = ", ".join(load_part(family.decoder).needs.off) if family.decoder else ""
    has_class = any(f'"{architecture}"' in _CLASSES for architecture in family.architectures)
    return [
        name,
        ", ".join(family.architectures),
        ", ".join(family.text_types),
        *_codes(family),
        media or "none",
        off,
        "transformers" if has_class else "ours",
    ]


def _codes(family: Family) -> list[str]:
    """Of prompt, encoder and decoder; empty where another family's is taken, or none."""
    prompt = code_of(family.prompt) if family.prompt or family.decoder else ""
    return [prompt, *(code_of(name) if name else "" for name in (family.encoder, family.decoder))]


if __name__ == "__main__":
    FILE.write_text(table(), encoding="utf-8")

"""Which forms of an NPU's operators are tried, and which are taken: without an NPU."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.devices.npu.forms import Asked, Choice, Form, Forms, Heads, Trial
from shared.errors import InvalidRequest

HEADS = Heads(4, 2, 64, window=True)
KNOWN = (Form("TND"), Form("TND", 0), Form("BSND"))


def find(text: str, *agreeing: str) -> tuple[str | None, list[str]]:
    """Twice the form by `--npu-forms text`, where only some agree, and which were tried."""
    tried: list[str] = []

    def trials(asked: Asked, forms: Sequence[Form]) -> Iterator[Trial]:
        assert asked == HEADS
        for form in forms:
            tried.append(form.name)
            yield Trial(form, 0.0, form.name in agreeing)

    forms = Forms(lambda asked: KNOWN, trials, Choice.read(text))
    first, second = forms.form(HEADS), forms.form(HEADS)
    assert first == second
    return None if first is None else first.name, tried


@pytest.mark.parametrize(
    ("text", "agreeing", "found", "tried"),
    [
        ("", ["TND+1", "BSND"], "TND+1", ["TND", "TND+1"]),
        ("", [], None, ["TND", "TND+1", "BSND"]),
        ("-TND, -TND+1", ["TND", "BSND"], "BSND", ["BSND"]),
        ("BSND", ["TND"], "BSND", []),
        ("NZ-host", ["TND"], "TND", ["TND"]),  # of another chip
        ("reference", ["TND"], None, []),
    ],
)
def test_the_first_form_that_agrees_is_taken(
    text: str, agreeing: list[str], found: str | None, tried: list[str]
) -> None:
    assert find(text, *agreeing) == (found, tried)


@pytest.mark.parametrize("text", ["BNSD", "TND,-tnd", "--TND"])
def test_a_name_that_no_form_has_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="there is no form"):
        Choice.read(text)


def test_other_devices_have_no_forms() -> None:
    with pytest.raises(InvalidRequest, match="--npu-forms TND: cpu has no forms"):
        CpuDevice(torch.float32, threads=1, forms="TND")

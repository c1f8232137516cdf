"""`python -m services.decoder.devices.npu.trials.trial_program REQUEST`: tries forms for `trials.py`, and prints a JSON
object for each. It ends behind one that leaves the device useless for this process."""

import json
import sys
from typing import Any

import torch

from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.forms import KINDS, Form
from services.decoder.devices.npu.trials.trials import to_json


def main(text: str) -> None:
    """text: element type, and of each attempt for what kind of thing, for which one, and the form."""
    request = json.loads(text)
    ops = NpuDevice(getattr(torch, request["dtype"])).ops
    _say({"ready": True})
    for kind, sizes, form in request["attempts"]:
        trial = ops.try_form(KINDS[kind](**sizes), Form(**form))
        _say(to_json(trial))
        if trial.refusal and not _computes(ops.device):
            _say({"spent": True})
            return


def _computes(device: torch.device) -> bool:
    """Whether this process can still use the device."""
    try:
        return float((torch.ones(16, device=device) + 1).sum()) == 32
    except RuntimeError:
        return False


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1])

"""The optimiser: bfloat16 weights to compute with, float32 masters to step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MUON_FACTOR = 3.0  # a step along orthogonal directions may be that much longer than Adam's


class Optimiser:
    """Muon for the matrices inside the layers, AdamW for all else.

    The network itself holds bfloat16 (which is shipped, and multiplied fastest by the processor);
    small steps would be lost in it, so they are taken on float32 masters and copied back.
    """

    def __init__(self, modules: dict[str, nn.Module], rate: float, muon: bool = True) -> None:
        self.rate = rate
        matrices: list[tuple[nn.Parameter, Tensor]] = []
        others: list[tuple[nn.Parameter, Tensor]] = []
        self._names: dict[str, tuple[nn.Parameter, Tensor]] = {}
        for part, module in modules.items():
            for name, p in module.named_parameters():
                inner = ".layers." in name or "projector" in name
                chosen = matrices if muon and inner and p.ndim == 2 else others
                pair = (p, p.detach().float().clone())
                chosen.append(pair)
                self._names[f"{part}.{name}"] = pair
        self._pairs = matrices + others
        decayed = [m for p, m in others if p.ndim >= 2]
        plain = [m for p, m in others if p.ndim < 2]
        self._steppers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [{"params": decayed, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}],
                lr=rate,
                betas=(0.9, 0.98),
                eps=1e-8,
                fused=True,
            )
        ]
        if matrices:
            self._steppers.append(
                torch.optim.Muon(
                    [m for _, m in matrices],
                    lr=rate,
                    weight_decay=0.02,
                    momentum=0.95,
                    adjust_lr_fn="match_rms_adamw",
                )
            )

    def step(self, scale: float, clip: float = 1.0) -> None:
        """One step at `scale` of the full rate, with the gradient's norm at most `clip`."""
        for p, master in self._pairs:
            master.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        nn.utils.clip_grad_norm_([m for _, m in self._pairs], clip)
        for stepper, factor in zip(self._steppers, (1.0, MUON_FACTOR), strict=False):
            for group in stepper.param_groups:
                group["lr"] = self.rate * scale * factor
            stepper.step()
        with torch.no_grad():
            torch._foreach_copy_([p for p, _ in self._pairs], [m for _, m in self._pairs])

    def state(self) -> dict[str, Any]:
        return {
            "weights": {name: master for name, (_, master) in self._names.items()},
            "steppers": [s.state_dict() for s in self._steppers],
        }

    def restore(self, state: dict[str, Any], steppers: bool = True) -> None:
        """Takes the weights over, and the optimisers' state too unless it is another stage's."""
        same = steppers and state["weights"].keys() == self._names.keys()
        with torch.no_grad():
            for name, saved in state["weights"].items():
                if name in self._names:
                    p, master = self._names[name]
                    master.copy_(saved)
                    p.copy_(saved)
        if same:
            for stepper, saved in zip(self._steppers, state["steppers"], strict=True):
                stepper.load_state_dict(saved)

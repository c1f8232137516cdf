"""One training run: what a step is, and how it is saved."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from examples.demo_model.model import normalise, read, see
from examples.demo_model.training.data import Pictures, Talk, row_mask
from examples.demo_model.training.heads import Heads, dense_loss
from examples.demo_model.training.optim import Optimiser
from examples.demo_model.training.team import Helper


class Average:
    """Running means by name; with few values the decay is faster, so that they start unbiased."""

    def __init__(self, memory: int = 100) -> None:
        self._memory = memory
        self._seen: dict[str, int] = defaultdict(int)
        self.values: dict[str, float] = {}

    def add(self, name: str, value: float) -> None:
        self._seen[name] += 1
        share = max(1 / self._memory, 1 / self._seen[name])
        self.values[name] = self.values.get(name, 0.0) * (1 - share) + value * share


class Run:
    """One training run: the network, its optimiser and how far it is."""

    def __init__(
        self,
        model: Any,
        heads: Heads,
        tokenizer: Any,
        stage: str,
        rate: float,
        device: str = "cpu",
        compiled: bool = False,
    ) -> None:
        self.model, self.heads = _in_bfloat16(model, device), _in_bfloat16(heads, device)
        self.tokenizer, self.stage, self.device = tokenizer, stage, device
        self.optimiser = Optimiser({"model": self.model, "heads": self.heads}, rate)
        self.step, self.seconds = 0, 0.0
        self.helped = 0  # batches that helpers have added
        self.means = Average()
        self._told: list[tuple[list[str], torch.Tensor]] = []  # for `means`, still on the device
        self.follows = False  # whether the tower is another run's
        self._see, self._read = see, read
        if compiled:  # minutes to begin with, then a quarter faster
            self._see, self._read = torch.compile(see), torch.compile(read)

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [self.model, self.heads]

    def gradients(self, batch: Pictures | Talk) -> None:
        """Works out the gradient of one batch."""
        self._told.clear()
        loss = self._seeing(batch)[0] if isinstance(batch, Pictures) else self._talking(batch)
        torch.autograd.backward(loss)
        self._told.append((["loss"], loss.detach()[None]))

    def learn(self, batch: Pictures | Talk, scale: float, helpers: Sequence[Helper] = ()) -> None:
        """One step on one batch at `scale` of the full rate; `means` has its loss then."""
        self.gradients(batch)
        self.helped += sum(helper.join() for helper in helpers)
        self.optimiser.step(scale)
        for helper in helpers:
            helper.publish()
        self._settle()
        self.step += 1

    def learn_heads(self, pictures: Pictures, scale: float) -> None:
        """A step of the heads alone, with the tower as it is."""
        self._told.clear()
        torch.autograd.backward(self._seeing(pictures, tower_learns=False)[0])
        self.optimiser.step(scale)
        self._settle()

    def _settle(self) -> None:
        """Reads the batch's numbers from the device, at the end of a step: it waits for them once."""
        for names, values in self._told:
            by_name: dict[str, list[float]] = defaultdict(list)
            for name, value in zip(names, values.tolist(), strict=True):
                by_name[name].append(value)
            for name, found in by_name.items():
                self.means.add(name, sum(found) / len(found))
        self._told.clear()

    def follow(self, folder: Path) -> None:
        """Takes the tower from another run and freezes it."""
        state = torch.load(folder / "state.pt", map_location=self.device, weights_only=True)
        self.optimiser.restore(
            {
                "weights": {
                    name: w
                    for name, w in state["optimiser"]["weights"].items()
                    if name.startswith(("model.model.vision_tower.", "heads."))
                }
            },
            steppers=False,
        )
        self.follows = True

    def _seeing(
        self, pictures: Pictures, tower_learns: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = normalise(pictures.pixels.to(self.device)).bfloat16()
        with torch.set_grad_enabled(tower_learns and not self.follows):
            features, early = self._see(self.model, pixels)
        if self.follows:
            return pixels.new_zeros(()), features
        loss, right = dense_loss(
            self.heads,
            features,
            early,
            pictures.targets.to(self.device),
            pictures.ink.to(self.device),
        )
        self._told.append(([f"patch {name}" for name in right], torch.stack([*right.values()])))
        return loss, features

    def _talking(self, talk: Talk) -> torch.Tensor:
        dense: torch.Tensor | float = 0.0
        features = None
        if talk.pictures is not None:
            dense, features = self._seeing(talk.pictures)
            features = features[: len(talk.ids)]
        hidden = self._read(
            self.model,
            talk.prefix.to(self.device),
            features,
            talk.ids.to(self.device),
            talk.positions.to(self.device),
            row_mask(talk.group.to(self.device)),
        )
        # Where labels are is found out here: the host need not wait for the device.
        told = (talk.labels >= 0).flatten().nonzero()[:, 0]
        labels = talk.labels.flatten()[told].to(self.device)
        owner = talk.answer.flatten()[told].to(self.device)
        chosen = hidden.flatten(0, 2).index_select(0, told.to(self.device))
        logits = self.model.lm_head(chosen).float()
        loss = F.cross_entropy(logits, labels)
        with torch.no_grad():
            wrong = (logits.argmax(-1) != labels).float()
            missed = torch.zeros(len(talk.kinds), device=self.device)
            hits = (missed.index_add_(0, owner, wrong) == 0).float()
            self._told.append((talk.kinds, hits))
            self._told.append((["all", "words"], torch.stack([hits.mean(), loss])))
        return loss + 0.5 * dense

    def save(self, folder: Path) -> None:
        """Writes the state to a temporary file and renames it, so that the file is always complete."""
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / "state.pt.new"
        torch.save(
            {
                "optimiser": self.optimiser.state(),
                "step": self.step,
                "seconds": self.seconds,
                "stage": self.stage,
                "means": self.means.values,
            },
            fresh,
        )
        os.replace(fresh, folder / "state.pt")

    def load(self, folder: Path) -> bool:
        """Goes on from a saved state of the same stage; False where there is none."""
        path = folder / "state.pt"
        if not path.exists():
            return False
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        same = state["stage"] == self.stage
        self.optimiser.restore(state["optimiser"], steppers=same)
        if same:
            self.step, self.seconds = state["step"], state["seconds"]
            for name, value in state["means"].items():
                self.means.add(name, value)
        return True


def _in_bfloat16(module: Any, device: str) -> Any:
    """Parameters alone: rotary frequencies stay float32, as they are wherever the model is served."""
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    return module.to(device)


def scale_at(step: int, share: float, decay: float, warmup: int = 40) -> float:
    """Learning rate schedule: up in `warmup` steps, level, and down over the last `decay` of it all.

    share: how much of the budget is spent, 0..1.
    """
    up = min(1.0, (step + 1) / warmup)
    if share <= 1 - decay:
        return up
    return up * max(0.01, (1 - share) / decay)

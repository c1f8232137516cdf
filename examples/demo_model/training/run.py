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
        self.model = model.to(device, torch.bfloat16)
        self.heads = heads.to(device, torch.bfloat16)
        self.tokenizer, self.stage, self.device = tokenizer, stage, device
        self.optimiser = Optimiser({"model": self.model, "heads": self.heads}, rate)
        self.step, self.seconds = 0, 0.0
        self.helped = 0  # batches that helpers have added
        self.means = Average()
        self.follows = False  # whether the tower is another run's
        self._see, self._read = see, read
        if compiled:  # minutes to begin with, then a quarter faster
            self._see, self._read = torch.compile(see), torch.compile(read)

    @property
    def modules(self) -> list[torch.nn.Module]:
        return [self.model, self.heads]

    def gradients(self, batch: Pictures | Talk) -> float:
        """Works out the gradient of one batch; returns its loss."""
        loss = self._seeing(batch)[0] if isinstance(batch, Pictures) else self._talking(batch)
        torch.autograd.backward(loss)
        value = loss.item()
        self.means.add("loss", value)
        return value

    def learn(self, batch: Pictures | Talk, scale: float, helpers: Sequence[Helper] = ()) -> float:
        """One step on one batch at `scale` of the full rate; returns the loss."""
        value = self.gradients(batch)
        self.helped += sum(helper.join() for helper in helpers)
        self.optimiser.step(scale)
        for helper in helpers:
            helper.publish()
        self.step += 1
        return value

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

    def _seeing(self, pictures: Pictures) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = normalise(pictures.pixels.to(self.device)).bfloat16()
        if self.follows:
            with torch.no_grad():
                return pixels.new_zeros(()), self._see(self.model, pixels)[0]
        features, early = self._see(self.model, pixels)
        loss, right = dense_loss(
            self.heads,
            features,
            early,
            pictures.targets.to(self.device),
            pictures.ink.to(self.device),
        )
        for name, share in right.items():
            self.means.add(f"patch {name}", share)
        return loss, features

    def _talking(self, talk: Talk) -> torch.Tensor:
        dense: torch.Tensor | float = 0.0
        features = None
        if talk.pictures is not None:
            dense, features = self._seeing(talk.pictures)
            features = features[: len(talk.ids)]
        labels, owner = talk.labels.to(self.device), talk.answer.to(self.device)
        hidden = self._read(
            self.model,
            talk.prefix.to(self.device),
            features,
            talk.ids.to(self.device),
            talk.positions.to(self.device),
            row_mask(talk.group).to(self.device),
        )
        told = labels >= 0
        logits = self.model.lm_head(hidden[told]).float()
        loss = F.cross_entropy(logits, labels[told])
        with torch.no_grad():
            wrong = (logits.argmax(-1) != labels[told]).float()
            missed = torch.zeros(len(talk.kinds), device=self.device)
            missed.index_add_(0, owner[told], wrong)
            by_kind: dict[str, list[float]] = defaultdict(list)
            for kind, count in zip(talk.kinds, missed.tolist(), strict=True):
                by_kind[kind].append(float(count == 0))
            for kind, hits in by_kind.items():
                self.means.add(kind, sum(hits) / len(hits))
            self.means.add("all", float((missed == 0).float().mean()))
            self.means.add("words", loss.item())
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


def scale_at(step: int, share: float, decay: float, warmup: int = 40) -> float:
    """Learning rate schedule: up in `warmup` steps, level, and down over the last `decay` of it all.

    share: how much of the budget is spent, 0..1.
    """
    up = min(1.0, (step + 1) / warmup)
    if share <= 1 - decay:
        return up
    return up * max(0.01, (1 - share) / decay)

"""Trains the demo model: `python -m shared.demo_model.train --help`.

Two stages. In `see` the tower alone learns what each patch shows, which is quick to learn since
every patch is told. In `talk` all of it learns to answer, a dozen questions to a picture at once,
while the patches go on being told. The run is saved every other minute and goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from shared.demo_model.data import (
    Background,
    Pictures,
    Talk,
    picture_batches,
    row_mask,
    talk_batches,
)
from shared.demo_model.export import CHECKPOINT, export
from shared.demo_model.model import Heads, build_model, dense_loss, normalise, read, see
from shared.demo_model.optim import Optimiser
from shared.demo_model.questions import WEIGHTS
from shared.demo_model.team import Helper
from shared.demo_model.tokenizer import corpus, load_tokenizer, train_tokenizer


class Average:
    """Running means by name; young ones forget faster, so that they start unbiased."""

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
        self, model: LlavaForConditionalGeneration, heads: Heads,
        tokenizer: PreTrainedTokenizerFast | None, stage: str, rate: float, device: str = "cpu",
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
        loss.backward()
        value = loss.item()
        self.means.add("loss", value)
        return value

    def learn(
        self, batch: Pictures | Talk, scale: float, helpers: Sequence[Helper] = ()
    ) -> float:
        """One step on one batch at `scale` of the full rate; returns the loss."""
        value = self.gradients(batch)
        self.helped += sum(helper.join() for helper in helpers)
        self.optimiser.step(scale)
        for helper in helpers:
            helper.publish()
        self.step += 1
        return value

    def follow(self, folder: Path) -> None:
        """Takes the tower from another run and leaves it as it is: two runs, one picture of it."""
        state = torch.load(folder / "state.pt", map_location=self.device, weights_only=True)
        self.optimiser.restore({"weights": {
            name: w for name, w in state["optimiser"]["weights"].items()
            if name.startswith(("model.model.vision_tower.", "heads."))}}, steppers=False)
        self.follows = True

    def _seeing(self, pictures: Pictures) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = normalise(pictures.pixels.to(self.device)).bfloat16()
        if self.follows:
            with torch.no_grad():
                return pixels.new_zeros(()), self._see(self.model, pixels)[0]
        features, early = self._see(self.model, pixels)
        loss, right = dense_loss(self.heads, features, early, pictures.targets.to(self.device),
                                 pictures.ink.to(self.device))
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
            self.model, talk.prefix.to(self.device), features, talk.ids.to(self.device),
            talk.positions.to(self.device), row_mask(talk.group).to(self.device))
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
        """Writes the state beside the old one, then swaps: never half a file."""
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / "state.pt.new"
        torch.save({
            "optimiser": self.optimiser.state(), "step": self.step, "seconds": self.seconds,
            "stage": self.stage, "means": self.means.values,
        }, fresh)
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
    """The rate's course: up in `warmup` steps, level, and down over the last `decay` of it all.

    share: how much of the budget is spent, 0..1.
    """
    up = min(1.0, (step + 1) / warmup)
    if share <= 1 - decay:
        return up
    return up * max(0.01, (1 - share) / decay)


def start(args: argparse.Namespace) -> Run:
    """A run: fresh, from shipped weights, or where it was left."""
    run_folder = Path(args.run)
    source = Path(args.source) if args.source else None
    if source is not None:
        tokenizer = load_tokenizer(source)
        model = LlavaForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
    else:
        if (run_folder / "tokenizer.json").exists():
            tokenizer = load_tokenizer(run_folder)
        else:
            tokenizer = train_tokenizer(corpus())
            tokenizer.save_pretrained(run_folder)
        model = build_model(len(tokenizer), args.seed)
    heads = Heads()
    if (run_folder / "heads.pt").exists():
        heads.load_state_dict(
            torch.load(run_folder / "heads.pt", weights_only=True), strict=False)
    run = Run(model, heads, tokenizer, args.stage, args.rate, args.device, args.compile)
    run.load(run_folder)
    return run


def main(argv: list[str] | None = None) -> Run:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=("see", "talk"), default="talk")
    parser.add_argument("--minutes", type=float, default=60, help="budget of this stage in all")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps (0: by time)")
    parser.add_argument("--batch", type=int, default=32, help="pictures in a step")
    parser.add_argument("--more", type=int, default=0,
                        help="further pictures in a step of `talk` that are only seen")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.3, help="last part of the budget")
    parser.add_argument("--from", dest="source", help="checkpoint folder to begin with")
    parser.add_argument("--run", default=str(Path.home() / ".cache/tessera/demo_model"),
                        help="folder of the run's own state; a run found there goes on")
    parser.add_argument("--export", default="", help=f"folder to refresh, such as {CHECKPOINT}")
    parser.add_argument("--export-minutes", type=float, default=15, help="between two exports")
    parser.add_argument("--weights", default="", help='of kinds, as JSON: {"count": 0.2}')
    parser.add_argument("--easy", type=float, default=0.0, help="part of `see` with easy pictures")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--follow", help="another run's folder, to take the tower from meanwhile")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--helpers", type=int, default=0, help="further processes of one thread")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    run = start(args)
    seed = args.seed * 1_000_003 + run.step  # fresh pictures after every restart
    if args.stage == "see":
        source = Background(picture_batches, seed, args.batch, args.easy)
    else:
        weights = {**WEIGHTS, **(json.loads(args.weights) if args.weights else {})}
        source = Background(talk_batches, seed, args.batch, args.more,
                            run.tokenizer.backend_tokenizer.to_str(), weights)
    helpers = [Helper(run.modules, source, helper_run, args.stage, len(run.tokenizer))
               for _ in range(args.helpers)]
    try:
        _loop(run, source, args, helpers)
    finally:
        for helper in helpers:
            helper.close()
        source.close()
    return run


def helper_run(stage: str, vocab_size: int) -> Run:
    """What a helper computes with: weights come from the main process."""
    return Run(build_model(vocab_size), Heads(), None, stage, 0.0)


def _loop(
    run: Run, source: Background, args: argparse.Namespace, helpers: Sequence[Helper]
) -> None:
    folder, budget = Path(args.run), args.minutes * 60
    last = exported = saved = time.monotonic()
    if args.follow:
        run.follow(Path(args.follow))
    begun = run.step
    with tqdm(total=round(args.minutes, 1), initial=round(run.seconds / 60, 2), unit="min",
              mininterval=5, bar_format="{l_bar}{bar}| {n:.1f}/{total} min{postfix}") as bar:
        while run.seconds < budget and (not args.steps or run.step - begun < args.steps):
            batch = source.next()
            share = run.seconds / budget
            if args.steps:
                share = max(share, (run.step - begun) / args.steps)
            run.learn(batch, scale_at(run.step, share, args.decay), helpers)
            now = time.monotonic()
            run.seconds, last = run.seconds + now - last, now
            bar.update((run.seconds / 60) - bar.n)
            if run.step % 10 == 0:
                speed = args.batch * (run.step + run.helped) / max(run.seconds, 1e-9)
                values = run.means.values
                bar.set_postfix_str(
                    f"loss {values['loss']:.3f}, right {values.get('all', 0):.1%}, "
                    f"{speed:.0f} pictures/s, {max(0.0, budget - run.seconds) / 60:.1f} min to go",
                    refresh=False)
            if run.step % 50 == 0:
                _log(run, folder)
            if now - saved > 90:
                run.save(folder)
                saved = now
                if args.follow:
                    run.follow(Path(args.follow))
            if args.export and now - exported > args.export_minutes * 60:
                export(run.model, run.tokenizer, Path(args.export))
                exported = now
    run.save(folder)
    torch.save(run.heads.float().state_dict(), folder / "heads.pt")
    if args.export:
        size = export(run.model, run.tokenizer, Path(args.export))
        print(f"exported {size / 1e6:.1f} MB to {args.export}")


def _log(run: Run, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {name: round(value, 3) for name, value in run.means.values.items()}
    with (folder / "log.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": run.step, "seconds": round(run.seconds), **rounded}) + "\n")


if __name__ == "__main__":
    main()

"""Trains the text model: `python -m benchmarks.quality.text_model.train PACKAGES --run RUN --export FOLDER`.

PACKAGES is a folder with the Debian packages that `corpus.py` names. The run is saved every two minutes and goes on
where it was. Weights are a function of the packages, `--steps`, `--seed` and the libraries alone: which examples a step
has depends on its number, and until the rate falls (the last quarter) a step does not depend on `--steps`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from benchmarks.quality.text_model.corpus import unpack
from benchmarks.quality.text_model.export import export, export_pages
from benchmarks.quality.text_model.model import (
    CONTEXT,
    END,
    build_model,
    load_tokenizer,
    train_tokenizer,
)

_RATE, _WARM_UP, _FALL = 2e-3, 100, 0.25
_SAVED = 120  # seconds between two saves


def prepare(packages: Path, run: Path) -> None:
    """Writes tokenizer, tokens and the held-out text into the run's folder, unless they are there."""
    if (run / "held_out.json").exists():
        return
    run.mkdir(parents=True, exist_ok=True)
    documents = list(unpack(packages))
    learned = [document for document in documents if not document.is_held_out]
    tokenizer = train_tokenizer(document.text for document in learned)
    tokenizer.save_pretrained(run)
    core = tokenizer.backend_tokenizer
    end = core.token_to_id(END)
    encoded = core.encode_batch([document.text for document in learned])
    tokens = [np.array([end, *one.ids], np.uint16) for one in encoded]
    np.save(run / "tokens.npy", np.concatenate(tokens))
    held_out = {document.name: document.text for document in documents if document.is_held_out}
    (run / "held_out.json").write_text(json.dumps(held_out))


def rate_at(step: int, steps: int) -> float:
    """Share of the full rate: up in `_WARM_UP` steps, level, and down to a hundredth over the last quarter."""
    up = min(1.0, (step + 1) / _WARM_UP)
    left = (steps - step) / (steps * _FALL)
    return up * min(1.0, max(0.01, left))


class Run:
    """Model, optimiser, and how far it is."""

    def __init__(self, seed: int, device: str) -> None:
        self.device = torch.device(device)
        self.model = build_model(seed).train().to(self.device)
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        # AdamW for all: with Muon, layers have fewer of the outliers that make a model hard to quantize.
        self.optimiser = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=_RATE,
            betas=(0.9, 0.98),
            fused=True,
        )
        self.step, self.seconds = 0, 0.0

    def learn(self, tokens: torch.Tensor, scale: float) -> torch.Tensor:
        """One step on [batch, CONTEXT + 1] tokens; returns the mean loss in nats, a number on the device."""
        tokens = tokens.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            hidden = self.model.model(tokens[:, :-1]).last_hidden_state
            logits = self.model.lm_head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimiser.param_groups:
            group["lr"] = _RATE * scale
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step += 1
        return loss.detach()

    def save(self, folder: Path) -> None:
        """Writes the state to a temporary file and renames it, so that the file is always complete."""
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(state, folder / "state.pt.new")
        os.replace(folder / "state.pt.new", folder / "state.pt")

    def load(self, folder: Path) -> None:
        """Goes on from a saved state, if there is one."""
        if not (folder / "state.pt").exists():
            return
        state: dict[str, Any] = torch.load(
            folder / "state.pt", map_location=self.device, weights_only=True
        )
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]


def batch_of(tokens: np.ndarray[Any, Any], step: int, batch: int, seed: int) -> torch.Tensor:
    """[batch, CONTEXT + 1] of a step: passes over all tokens, each in an order and from an offset of its own."""
    each = len(tokens) // CONTEXT - 1
    found = []
    for number in range(step * batch, (step + 1) * batch):
        order = np.random.default_rng((seed, number // each))
        offset = int(order.integers(CONTEXT))
        start = offset + CONTEXT * int(order.permutation(each)[number % each])
        found.append(tokens[start : start + CONTEXT + 1])
    return torch.from_numpy(np.stack(found).astype(np.int64))


def held_out_loss(run: Run, tokenizer: PreTrainedTokenizerFast, folder: Path) -> float:
    """Mean nats a token of the held-out pages, each in pieces of CONTEXT, in bfloat16 as in training."""
    texts = json.loads((folder / "held_out.json").read_text()).values()
    core = tokenizer.backend_tokenizer
    ids = [i for one in core.encode_batch(list(texts)) for i in (core.token_to_id(END), *one.ids)]
    pieces = torch.tensor(ids[: len(ids) // CONTEXT * CONTEXT]).view(-1, CONTEXT).to(run.device)
    run.model.eval()
    with torch.no_grad(), torch.autocast(run.device.type, torch.bfloat16):
        losses = [
            F.cross_entropy(run.model(piece[None, :-1]).logits[0].float(), piece[1:]).item()
            for piece in pieces
        ]
    run.model.train()
    return sum(losses) / len(losses)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", type=Path)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run's own state")
    parser.add_argument("--export", type=Path, help="folder of the checkpoint, written at the end")
    parser.add_argument("--steps", type=int, default=2000, help="in all")
    parser.add_argument("--stop", type=int, help="do no more than so many of them now")
    parser.add_argument("--batch", type=int, default=2, help=f"examples of {CONTEXT} tokens a step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args(argv)
    torch.set_num_threads(told.threads)
    prepare(told.packages, told.run)
    tokens = np.load(told.run / "tokens.npy")
    tokenizer = load_tokenizer(told.run)
    run = Run(told.seed, told.device)
    run.load(told.run)
    began = saved = time.monotonic() - run.seconds
    last = min(told.steps, told.stop or told.steps)
    with tqdm(total=told.steps, initial=run.step, mininterval=10) as bar:
        while run.step < last:
            batch = batch_of(tokens, run.step, told.batch, told.seed)
            loss = run.learn(batch, rate_at(run.step, told.steps))
            run.seconds = time.monotonic() - began
            bar.update()
            if run.step % 50 == 0:
                bar.set_postfix_str(f"loss {loss.item():.3f}", refresh=False)
                _log(told.run, run, loss.item())
            if time.monotonic() - saved > _SAVED:
                run.save(told.run)
                saved = time.monotonic()
    run.save(told.run)
    nats = held_out_loss(run, tokenizer, told.run)
    print(f"{run.step} steps in {run.seconds / 60:.0f} minutes, {nats:.3f} nats a held-out token")
    if told.export:
        export(run.model, tokenizer, told.export)
        export_pages(json.loads((told.run / "held_out.json").read_text()))


def _log(folder: Path, run: Run, loss: float) -> None:
    with (folder / "log.jsonl").open("a") as lines:
        line = {"step": run.step, "seconds": round(run.seconds), "loss": round(loss, 3)}
        lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

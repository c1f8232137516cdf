"""Trains the demo model: `python -m examples.demo_model.train --help`.

Two stages. In `see` the tower alone learns what each patch shows, which is quick to learn since
every patch has a target. In `talk` the whole model learns to answer, a dozen questions to a picture
at once, while the patches keep their targets. The run is saved every two minutes and can be resumed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import LlavaForConditionalGeneration

from examples.demo_model.export import CHECKPOINT, export
from examples.demo_model.model import build_model
from examples.demo_model.questions import WEIGHTS
from examples.demo_model.tokenizer import corpus, load_tokenizer, train_tokenizer
from examples.demo_model.training.data import (
    SMALL_TALK,
    Background,
    Foreground,
    Talk,
    picture_batches,
    talk_batches,
)
from examples.demo_model.training.heads import Heads
from examples.demo_model.training.run import Run, scale_at
from examples.demo_model.training.team import Helper

HEADS_SCALE = 3.0  # of the full rate, where the heads alone learn


def start(args: argparse.Namespace) -> Run:
    """A run: new, from shipped weights, or resumed."""
    run_folder = Path(args.run)
    source = Path(args.source) if args.source else None
    if source is not None:
        tokenizer = load_tokenizer(source)
        tokenizer.save_pretrained(run_folder)
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
        heads.load_state_dict(torch.load(run_folder / "heads.pt", weights_only=True), strict=False)
    run = Run(model, heads, tokenizer, args.stage, args.rate, args.device, args.compile)
    run.load(run_folder)
    return run


def main(argv: list[str] | None = None) -> Run:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=("see", "talk"), default="talk")
    parser.add_argument("--minutes", type=float, default=60, help="budget of this stage in all")
    parser.add_argument(
        "--steps", type=int, default=0, help="stop after so many steps (0: by time)"
    )
    parser.add_argument("--batch", type=int, default=32, help="pictures in a step")
    parser.add_argument(
        "--more",
        type=int,
        default=0,
        help="further pictures in a step of `talk` that are only seen",
    )
    parser.add_argument(
        "--heads-first",
        type=int,
        default=0,
        help="steps before, in which the training's own heads alone learn: shipped weights have none",
    )
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--decay", type=float, default=0.3, help="last part of the budget")
    parser.add_argument("--from", dest="source", help="checkpoint folder to begin with")
    parser.add_argument(
        "--run",
        default=str(Path.home() / ".cache/tessera/demo_model"),
        help="folder of the run's own state; a run found there goes on",
    )
    parser.add_argument("--export", default="", help=f"folder to refresh, such as {CHECKPOINT}")
    parser.add_argument("--export-minutes", type=float, default=15, help="between two exports")
    parser.add_argument("--weights", default="", help='of kinds, as JSON: {"count": 0.2}')
    parser.add_argument(
        "--small-talk",
        type=float,
        default=SMALL_TALK,
        help="part of the turns about a picture that are small talk",
    )
    parser.add_argument("--easy", type=float, default=0.0, help="part of `see` with easy pictures")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--follow", help="another run's folder, to take the tower from meanwhile")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--drawers", type=int, default=1, help="processes that draw pictures")
    parser.add_argument("--helpers", type=int, default=0, help="further processes of one thread")
    parser.add_argument("--foreground", action="store_true", help="draw in this process too")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    run = start(args)
    seed = args.seed * 1_000_003 + run.step  # fresh pictures after every restart
    make: Any = Foreground if args.foreground else partial(Background, drawers=args.drawers)
    if args.stage == "see":
        source = make(picture_batches, seed, args.batch, args.easy)
    else:
        weights = {**WEIGHTS, **(json.loads(args.weights) if args.weights else {})}
        source = make(
            talk_batches,
            seed,
            args.batch,
            args.more,
            run.tokenizer.backend_tokenizer.to_str(),
            weights,
            args.small_talk,
        )
    helpers = [
        Helper(run.modules, source, helper_run, args.stage, len(run.tokenizer))
        for _ in range(0 if args.foreground else args.helpers)
    ]
    try:
        _learn_heads(run, source, args.heads_first)
        _loop(run, source, args, helpers)
    finally:
        for helper in helpers:
            helper.close()
        source.close()
    return run


def helper_run(stage: str, vocab_size: int) -> Run:
    """What a helper computes with: weights come from the main process."""
    return Run(build_model(vocab_size), Heads(), None, stage, 0.0)


def _learn_heads(run: Run, source: Any, steps: int) -> None:
    """Else their first gradients, which mean nothing, would spoil a tower that has learnt."""
    for _ in tqdm(range(steps), desc="heads", disable=not steps, mininterval=5):
        batch = source.next()
        pictures = batch.pictures if isinstance(batch, Talk) else batch
        if pictures is not None:
            run.learn_heads(pictures, HEADS_SCALE)


def _loop(run: Run, source: Any, args: argparse.Namespace, helpers: Sequence[Helper]) -> None:
    folder, budget = Path(args.run), args.minutes * 60
    last = exported = saved = time.monotonic()
    if args.follow:
        run.follow(Path(args.follow))
    begun = run.step
    with tqdm(
        total=round(args.minutes, 1),
        initial=round(run.seconds / 60, 2),
        unit="min",
        mininterval=5,
        bar_format="{l_bar}{bar}| {n:.1f}/{total} min{postfix}",
    ) as bar:
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
                    refresh=False,
                )
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

"""Measures the shipped model through plain `transformers`: `python -m examples.demo_model.evaluate`.

Two sets of pictures, both of seeds that training never sees: `ours`, drawn as in training, and
`other`, drawn by `pictures/other_renderer.py`. Answers are greedy and judged by their facts.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tqdm import tqdm
from transformers import AutoProcessor, LlavaForConditionalGeneration

from examples.demo_model import chat
from examples.demo_model.calling import call_message, pick_tools, with_calls
from examples.demo_model.export import CHECKPOINT
from examples.demo_model.judge import right
from examples.demo_model.pictures.drawing import draw
from examples.demo_model.pictures.other_renderer import draw_other
from examples.demo_model.questions import WEIGHTS, Questions, Turn, ask
from examples.demo_model.words import LANGUAGES

# Those with pictures, and those that have nothing to do with one. Kinds that came later stand last in
# either, so that the same seed still asks the same questions of the others.
OF_PICTURES = (*WEIGHTS, "follow")
OF_NONE = ("chat", "off topic", "no picture")
LATER = ("json", "tool call", "tool answer")
KINDS = (*OF_PICTURES, *OF_NONE, *LATER)


@dataclass(slots=True)
class Case:
    """One question put to the model, with what was said before it."""

    source: str  # "ours" or "other"
    kind: str
    language: str
    picture: Image.Image | None
    turns: list[Turn]  # the last one is to be answered
    system: str
    order: bool  # picture before the words
    tools: list[dict[str, Any]]


def cases(source: str, per_kind: int, seed: int) -> list[Case]:
    """`per_kind` questions of each kind and language."""
    rng = random.Random(seed)
    found: list[Case] = []
    kinds = KINDS if source == "ours" else (*OF_PICTURES, *LATER)
    for kind in kinds:
        for language in LANGUAGES:
            wanted = per_kind
            while wanted:
                odd = 2 * rng.getrandbits(48) + 1  # training draws even seeds only
                picture, scene = draw(odd) if source == "ours" else draw_other(odd)
                turns = _turns(kind, language, scene, rng)
                if turns is None:
                    continue
                for turn in turns:
                    if turn.role == "tool":
                        continue
                    turn.question = chat.dress(turn.question, language, rng)
                    if rng.random() < 0.5:
                        turn.question = turn.question[:1].upper() + turn.question[1:]
                shown = None if kind == "no picture" or (kind == "chat" and wanted % 2) else picture
                system = rng.choice(chat.SYSTEM_PROMPTS) if rng.random() < 0.2 else ""
                order = rng.random() < 0.7
                tools = pick_tools(rng, True) if kind.startswith("tool") else []
                found.append(Case(source, kind, language, shown, turns, system, order, tools))
                wanted -= 1
    return found


def _turns(kind: str, language: str, scene: Any, rng: random.Random) -> list[Turn] | None:
    if kind == "chat":
        return [chat.small_talk(language, rng)]
    if kind == "off topic":
        return [chat.off_topic(language, rng)]
    if kind == "no picture":
        turn = ask(scene, rng.choice(("what", "colour", "count", "where", "size")), language, rng)
        return [chat.no_picture(turn.question, language)] if turn else None
    if kind == "follow":
        first = ask(scene, rng.choice(list(WEIGHTS)), language, rng)
        second = Questions(scene, language, rng).follow(first) if first else None
        return [first, second] if first and second else None
    if kind.startswith("tool"):
        turn = ask(scene, "count", language, rng)
        called = with_calls([turn], scene, rng) if turn and turn.counted else None
        return called[:1] if called and kind == "tool call" else called
    turn = ask(scene, kind, language, rng)
    return [turn] if turn else None


def messages(case: Case) -> list[dict[str, Any]]:
    """The case as a chat."""
    told: list[dict[str, Any]] = []
    if case.system:
        told.append({"role": "system", "content": case.system})
    for number, turn in enumerate(case.turns):
        if turn.role == "tool":
            told.append({"role": "tool", "content": turn.question})
            continue
        text = {"type": "text", "text": turn.question}
        parts = [text]
        if number == 0 and case.picture is not None:
            parts = [{"type": "image"}, text] if case.order else [text, {"type": "image"}]
        told.append({"role": "user", "content": parts})
        if turn.kind == "tool call" and turn.counted and number < len(case.turns) - 1:
            told.append(call_message(turn.counted))
        elif number < len(case.turns) - 1:
            told.append({"role": "assistant", "content": turn.answer})
    return told


def answer(model: Any, processor: Any, batch: list[Case]) -> list[str]:
    """Greedy answers to a batch of cases that all have a picture, or all have none."""
    texts = [
        processor.apply_chat_template(
            messages(c), tools=c.tools or None, add_generation_prompt=True
        )
        for c in batch
    ]
    pictures = [c.picture for c in batch if c.picture is not None]
    inputs = processor(images=pictures or None, text=texts, padding=True, return_tensors="pt")
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    with torch.inference_mode():
        out = model.generate(**inputs.to(model.device))
    fresh = out[:, inputs["input_ids"].shape[1] :]
    said: list[str] = processor.batch_decode(fresh, skip_special_tokens=True)
    return [s.strip() for s in said]


def evaluate(
    folder: Path,
    per_kind: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    sources: tuple[str, ...] = ("ours", "other"),
    show: int = 0,
    device: str = "cpu",
    batch_size: int = 32,
) -> dict[tuple[str, str, str], tuple[int, int]]:
    """(right, asked) by source, kind and language."""
    load_processor: Any = AutoProcessor.from_pretrained
    processor = load_processor(folder)
    model: Any = LlavaForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    model.to(device).eval()
    table: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    asked = [case for source in sources for case in cases(source, per_kind, seed)]
    asked.sort(key=lambda c: c.picture is None)
    split = next((i for i, c in enumerate(asked) if c.picture is None), len(asked))
    batches = [
        part[i : i + batch_size]
        for part in (asked[:split], asked[split:])
        for i in range(0, len(part), batch_size)
    ]
    wrong: list[str] = []
    for batch in tqdm(batches, desc="batches"):
        for case, said in zip(batch, answer(model, processor, batch), strict=True):
            truth = case.turns[-1].answer
            hit = right(said, truth)
            cell = table[case.source, case.kind, case.language]
            cell[0] += hit
            cell[1] += 1
            if not hit:
                wrong.append(
                    f"[{case.source} {case.kind}] {case.turns[-1].question}\n"
                    f"    said  {said}\n    truth {truth}"
                )
    random.Random(0).shuffle(wrong)
    print("\n".join(wrong[:show]))
    return {key: (cell[0], cell[1]) for key, cell in table.items()}


def report(table: dict[tuple[str, str, str], tuple[int, int]]) -> str:
    """The table in Markdown: kind by language, per cent right and number asked."""
    lines = []
    for source in dict.fromkeys(key[0] for key in table):
        lines += [f"| {source}: kind | en % | zh % | both % | n |", "|---|---|---|---|---|"]
        kinds = [k for k in KINDS if any(key[:2] == (source, k) for key in table)]
        rows = [(k, [table.get((source, k, la), (0, 0)) for la in LANGUAGES]) for k in kinds]
        sums = [(sum(r[1][i][0] for r in rows), sum(r[1][i][1] for r in rows)) for i in range(2)]
        for kind, cells in [*rows, ("**all**", sums)]:
            both = (cells[0][0] + cells[1][0], cells[0][1] + cells[1][1])
            shares = [f"{100 * hit / max(n, 1):.1f}" for hit, n in (*cells, both)]
            lines.append(f"| {kind} | " + " | ".join(shares) + f" | {both[1]} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--per-kind", type=int, default=60, help="questions per kind and language")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--show", type=int, default=0, help="print so many wrong answers")
    parser.add_argument("--source", choices=("ours", "other"), action="append")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32, help="questions that are answered at once")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    begun = time.monotonic()
    table = evaluate(
        args.checkpoint,
        args.per_kind,
        args.seed,
        getattr(torch, args.dtype),
        tuple(args.source or ("ours", "other")),
        args.show,
        args.device,
        args.batch,
    )
    print(report(table))
    print(f"{sum(n for _, n in table.values())} answers in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()

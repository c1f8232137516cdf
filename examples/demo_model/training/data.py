"""Batches, drawn in processes of their own while the network learns."""

from __future__ import annotations

import os
import queue
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from PIL import Image
from torch import Tensor

from examples.demo_model import chat
from examples.demo_model.calling import pick_tools, tool_turn, tools_line, with_calls
from examples.demo_model.model import (
    ASSISTANT,
    BOS,
    END,
    GRID,
    IMAGE,
    IMAGE_SIZE,
    PAD,
    PATCHES,
    SYSTEM,
    USER,
)
from examples.demo_model.pictures.drawing import INK_SIDE, draw_with_ink
from examples.demo_model.pictures.scenes import Scene, pick_scene
from examples.demo_model.questions import KINDS, Questions, Turn, ask
from examples.demo_model.training.heads import dense_targets
from examples.demo_model.words import LANGUAGES


@dataclass(slots=True)
class Pictures:
    """A batch of pictures and what each patch of them shows."""

    pixels: Tensor  # (batch, 144, 144, 3) uint8
    targets: Tensor  # (batch, 81, 10) float32
    ink: Tensor  # (batch, 81, 64) float32 in 0..1: where in each patch something was drawn


def to_pixels(picture: Image.Image) -> np.ndarray:
    """Resized as the shipped processor does it: (144, 144, 3) uint8."""
    small = picture.convert("RGB").resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
    return np.array(small)


def draw_pictures(seeds: list[int], easy: float = 0.0) -> tuple[Pictures, list[Scene]]:
    """One batch, the first `easy` part of it easy ones.

    A few pictures are drawn large, as cameras and screens make them.
    """
    pixels, targets, inks, scenes = [], [], [], []
    for number, seed in enumerate(seeds):
        picture, scene, ink = draw_with_ink(
            seed, 1200 if seed % 40 == 0 else 420, number < easy * len(seeds)
        )
        pixels.append(to_pixels(picture))
        targets.append(dense_targets(scene))
        inks.append(np.asarray(ink))
        scenes.append(scene)
    fine = torch.from_numpy(np.stack(inks)).float().div_(255)
    cells = fine.view(len(seeds), GRID, INK_SIDE // GRID, GRID, -1).permute(0, 1, 3, 2, 4)
    batch = Pictures(
        torch.from_numpy(np.stack(pixels)),
        torch.tensor(targets),
        cells.reshape(len(seeds), PATCHES, -1).contiguous(),
    )
    return batch, scenes


def picture_batches(seed: int, size: int, easy: float) -> Iterator[Pictures]:
    """Endless batches of fresh pictures. Seeds of training are even; tests use odd ones."""
    rng = random.Random(seed)
    while True:
        yield draw_pictures([2 * rng.getrandbits(48) for _ in range(size)], easy)[0]


# --- conversations --------------------------------------------------------------------------------

ROWS, LENGTH = 2, 224  # tokens of questions and answers per picture: two rows, packed
REPORTED = (*KINDS, "follow", "chat", "off topic", "no picture", "tool call", "tool answer")
SMALL_TALK = 0.025  # part of the turns about a picture that are small talk
OFF_TOPIC = 0.045  # and the part that asks what the model cannot know
JSON = 0.5  # part of the pictures that are described as JSON
TOOLS = 0.5  # part of the batches that name tools
WITH_COUNT = 0.8  # part of those that name `count` among them
COUNTS = 0.4  # the weight of counting where `count` is
BETWEEN_DRAWERS = 1 << 40  # seeds: more than a run has steps


@dataclass(slots=True)
class Talk:
    """A batch of pictures and of what is said about the first of them; some have none at all."""

    pictures: Pictures | None  # at least as many as there are rows
    prefix: Tensor  # (batch, p) ids before the first question
    ids: Tensor  # (batch, ROWS, LENGTH)
    labels: Tensor  # same shape: the next token where it belongs to an answer, else -100
    group: Tensor  # same shape: the conversation in its row, 0 for padding
    positions: Tensor  # same shape
    answer: Tensor  # same shape: index into `kinds` where labels are set, else -1
    kinds: list[str]  # of each answer in the batch


class Speaker:
    """Turns scenes into token rows; `small_talk` is the part of it where there is a picture."""

    def __init__(
        self, tokenizer: Any, weights: dict[str, float], small_talk: float = SMALL_TALK
    ) -> None:
        core = tokenizer.backend_tokenizer if hasattr(tokenizer, "backend_tokenizer") else tokenizer
        self._core, self._weights, self._small_talk = core, weights, small_talk
        self._counts = False  # whether the batch's prefix has the tool `count`

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        return ids

    def prefix(self, rng: random.Random) -> list[int]:
        """What comes before the first question of a batch, without the picture; it says which tools there are."""
        ids = [BOS]
        self._counts = False
        if rng.random() < TOOLS:
            self._counts = rng.random() < WITH_COUNT
            ids += [SYSTEM, *self.encode(tools_line(pick_tools(rng, self._counts))), END]
        if rng.random() < 0.2:
            ids += [SYSTEM, *self.encode(rng.choice(chat.SYSTEM_PROMPTS).lower()), END]
        return ids

    def conversation(self, scene: Scene | None, rng: random.Random) -> list[Turn]:
        """One to three turns in one language."""
        language = rng.choice(LANGUAGES)
        turns: list[Turn] = []
        while not turns:
            turn = self._turn(scene, language, rng)
            if turn is not None:
                turns.append(turn)
        if scene is None:
            return turns
        roll = rng.random()
        if roll < 0.34:
            follow = Questions(scene, language, rng).follow(turns[-1])
            if follow is not None:
                turns.append(follow)
                if rng.random() < 0.2 and follow.focus is not None:
                    again = Questions(scene, language, rng).follow(follow)
                    if again is not None:
                        turns.append(again)
        elif roll < 0.42:
            other = self._turn(scene, rng.choice(LANGUAGES), rng)
            if other is not None:
                turns.append(other)
        return with_calls(turns, scene, rng) if self._counts else turns

    def described(self, scene: Scene, rng: random.Random) -> list[Turn]:
        """The scene as JSON, and now and then a question about it."""
        turn = Questions(scene, rng.choice(LANGUAGES), rng).as_json()
        follow = Questions(scene, rng.choice(LANGUAGES), rng).follow(turn)
        return [turn, follow] if follow is not None and rng.random() < 0.2 else [turn]

    def _turn(self, scene: Scene | None, language: str, rng: random.Random) -> Turn | None:
        roll = rng.random()
        if scene is None:
            if roll < 0.3:
                return chat.small_talk(language, rng)
            if roll < 0.5:
                return chat.off_topic(language, rng)
            kind = rng.choice([k for k in KINDS if k != "describe"])
            asked = ask(pick_scene(rng), kind, language, rng)
            return asked and chat.no_picture(asked.question, language)
        if roll < self._small_talk:
            return chat.small_talk(language, rng)
        if roll < self._small_talk + OFF_TOPIC:
            return chat.off_topic(language, rng)
        weights = {**self._weights, "count": COUNTS} if self._counts else self._weights
        kind = rng.choices(list(weights), list(weights.values()))[0]
        return ask(scene, kind, language, rng)

    def tokens(
        self, turns: list[Turn], with_picture: bool, rng: random.Random
    ) -> tuple[list[int], list[int], list[int]]:
        """Ids, labels and which turn each label belongs to (-1 for none)."""
        ids: list[int] = []
        labels: list[int] = []
        owner: list[int] = []
        for number, turn in enumerate(turns):
            zh = any(c >= "\u4e00" for c in turn.question)
            if turn.role == "tool":
                question = tool_turn(turn.question)
            else:
                question = chat.dress(turn.question, "zh" if zh else "en", rng).strip().lower()
            start = [] if with_picture and number == 0 else [USER]
            asked = [*start, *self.encode(question), END, ASSISTANT]
            said = [*self.encode(turn.answer), END]
            ids += asked + said
            labels += [-100] * (len(asked) - 1) + said + [-100]
            owner += [-1] * (len(asked) - 1) + [number] * len(said) + [-1]
        return ids, labels, owner

    def fill(
        self, scene: Scene | None, start: int, kinds: list[str], rng: random.Random
    ) -> np.ndarray:
        """(5, ROWS, LENGTH): ids, labels, group, positions, answer; adds to `kinds`."""
        out = np.zeros((5, ROWS, LENGTH), np.int64)
        out[0], out[1], out[4] = PAD, -100, -1
        used, groups, misses = [0] * ROWS, [0] * ROWS, 0
        # The longest answer of all comes first, while the rows are empty.
        first = self.described(scene, rng) if scene and rng.random() < JSON else None
        while misses < 3:
            turns, first = first or self.conversation(scene, rng), None
            ids, labels, owner = self.tokens(turns, scene is not None, rng)
            row = next((r for r in range(ROWS) if used[r] + len(ids) <= LENGTH), None)
            if row is None:
                misses += 1
                continue
            at = slice(used[row], used[row] + len(ids))
            groups[row] += 1
            out[0, row, at], out[1, row, at], out[2, row, at] = ids, labels, groups[row]
            out[3, row, at] = np.arange(start, start + len(ids))
            base = len(kinds)
            out[4, row, at] = [base + n if n >= 0 else -1 for n in owner]
            kinds.extend(turn.kind if turn.kind in REPORTED else "what" for turn in turns)
            used[row] += len(ids)
        return out


def talk_batches(
    seed: int,
    size: int,
    more: int,
    tokenizer_json: str,
    weights: dict[str, float],
    small_talk: float = SMALL_TALK,
) -> Iterator[Talk]:
    """Endless batches of `size` pictures with conversations, and `more` that are only seen."""
    from tokenizers import Tokenizer

    rng = random.Random(seed)
    speaker = Speaker(Tokenizer.from_str(tokenizer_json), weights, small_talk)
    while True:
        prefix = speaker.prefix(rng)
        pictures: Pictures | None = None
        scenes: list[Scene | None] = [None] * (size // 2)
        if rng.random() >= 0.05:
            pictures, drawn = draw_pictures([2 * rng.getrandbits(48) for _ in range(size + more)])
            scenes = [*drawn[:size]]
            prefix += [USER] + [IMAGE] * PATCHES
        kinds: list[str] = []
        rows = torch.from_numpy(
            np.stack([speaker.fill(scene, len(prefix), kinds, rng) for scene in scenes], axis=1)
        )
        ids, labels, group, positions, answer = rows
        yield Talk(
            pictures,
            torch.tensor([prefix] * len(scenes)),
            ids,
            labels,
            group,
            positions,
            answer,
            kinds,
        )


def row_mask(group: Tensor) -> Tensor:
    """(batch, rows, length, length) additive: backwards, and inside one conversation only."""
    same = group[..., :, None] == group[..., None, :]
    mask = torch.zeros(same.shape, dtype=torch.bfloat16, device=group.device)
    return mask.masked_fill_(~same.tril(), float("-inf"))


def _work(make: Callable[..., Iterator[Any]], args: tuple[Any, ...], out: Any) -> None:
    torch.set_num_threads(1)
    parent = os.getppid()
    for batch in make(*args):
        while True:
            try:
                out.put(batch, timeout=5)
                break
            except queue.Full:
                if os.getppid() != parent:  # nobody is left to draw for
                    return


class Background:
    """Runs generators of batches in `drawers` other processes, a few batches ahead.

    make(seed, *args) is the generator; every process begins with a seed of its own, and batches come
    in the order in which they are ready.
    """

    def __init__(
        self,
        make: Callable[..., Iterator[Any]],
        seed: int,
        *args: Any,
        drawers: int = 1,
        ahead: int = 6,
    ) -> None:
        context = mp.get_context("spawn")
        self.queue: Any = context.Queue(maxsize=max(ahead, drawers))
        self._processes = [
            context.Process(
                target=_work,
                args=(make, (seed + number * BETWEEN_DRAWERS, *args), self.queue),
                daemon=True,
            )
            for number in range(drawers)
        ]
        for process in self._processes:
            process.start()

    def next(self) -> Any:
        """The next batch; an error where a process has died."""
        while True:
            try:
                return self.queue.get(timeout=5)
            except queue.Empty:
                if not all(process.is_alive() for process in self._processes):
                    raise RuntimeError("a drawing process has ended") from None

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


class Foreground:
    """The same in this process, for a step or two: nothing to start, nothing ahead."""

    def __init__(self, make: Callable[..., Iterator[Any]], *args: Any) -> None:
        self._batches = make(*args)

    def next(self) -> Any:
        return next(self._batches)

    def close(self) -> None:
        pass

"""A decoder against its class's own forward, on the loaded weights: prompts each by itself, then together in pieces."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.models.generic.experts import has_experts
from services.decoder.models.generic.head import in_vocabulary
from services.decoder.models.generic.linears.taken_linear import has_codes
from services.decoder.models.generic.loading import language_layers
from services.decoder.models.generic.trial_run import Pieces, TrialRun

_LENGTHS = (23, 9, 31)
_IN_PIECES: Pieces = ((10, 9, 1, 1, 1, 1), (0, 7, 1, 1), (4, 20, 5, 1, 1))
_WHOLE: Pieces = ((20, 1, 1, 1), (0, 7, 1, 1), (28, 1, 1, 1))
# Windows, chunks and the steps of a scale by position are cut to these meanwhile: the prompts are longer, so one that
# is ignored is seen. Chunks are whole blocks of the cache, as they are for longer texts.
_REACHES = {"sliding_window": 8, "window_size": 8, "attention_chunk_size": 16, "floor_scale": 8}
_TOLERANCE = 1e-3  # in standard deviations, in float32
_LEAST_LOGIT = -1e30
# Of a token's logits in shorter types. There rounding may choose another expert: a fifth of the tokens may differ.
# Right models have 0.996 and more of the other four fifths, those whose windows are ignored 0.75 and less.
_LEAST_COSINE = 0.99
# Sets of prompts for models with experts in shorter types, of which one has to agree: of random weights up to 5 in 100
# choose others for more than a fifth of one set. What is ignored is ignored in every set.
_SETS = 3
_ROWS = 4  # that are compared at a time


@dataclass(frozen=True)
class Expected:
    """What the class computes: `logits` [n, vocabulary] of each prompt, and what each layer gives of the first.

    `dtype`: in which what is compared with it computes.
    """

    prompts: list[list[int]]
    logits: list[Tensor]
    layers: list[Tensor]
    dtype: torch.dtype


@dataclass(frozen=True)
class Verdict:
    """`difference`: the largest of any logit, in standard deviations of all; `layer`: the first that differs, None if
    none does. `whole_prompt`: only prompts that are not split come out right. `equal_rows`: a token's bits depend
    neither on the batch nor on the pieces."""

    accepted: bool
    difference: float
    layer: int | None
    whole_prompt: bool = False
    equal_rows: bool = False


def run_eagerly(model: Any, vocab_size: int, dtype: torch.dtype) -> list[Expected]:
    """By the class's own attention, each prompt by itself; one set of prompts or several. Raises whatever the class
    raises."""
    # With codes activations are rounded to 14 bits, or to 8.
    dtype = torch.bfloat16 if has_codes(model) else dtype
    sets = _SETS if has_experts(model) and dtype != torch.float32 else 1
    return [_run_eagerly(model, vocab_size, seed, dtype) for seed in range(sets)]


def _run_eagerly(model: Any, vocab_size: int, seed: int, dtype: torch.dtype) -> Expected:
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(min(3, vocab_size - 1), vocab_size, (length,), generator=generator).tolist()
        for length in _LENGTHS
    ]
    device = next(model.parameters()).device
    with short_reaches(model), _layer_outputs(language_layers(model)) as outputs:
        logits = [
            model(input_ids=torch.tensor([prompt], device=device), use_cache=False).logits[0]
            for prompt in prompts
        ]
    known = len(model.get_input_embeddings().weight)
    logits = [in_vocabulary(found, known) for found in logits]
    return Expected(prompts, logits, [found[0] for found in outputs], dtype)


def compare(
    decoder: DecoderModel, layers: nn.Module, ops: BaseOps, expected: Sequence[Expected]
) -> Verdict:
    """layers: the class's own, which the decoder runs."""
    verdicts = []
    with short_reaches(layers):
        for whole_prompt in (False, True):
            for one in expected:
                verdict = _compare(decoder, layers, ops, one, whole_prompt)
                if verdict.accepted:
                    return verdict
                verdicts.append(verdict)
    return verdicts[0]


def _compare(
    decoder: DecoderModel, layers: nn.Module, ops: BaseOps, expected: Expected, whole_prompt: bool
) -> Verdict:
    run = TrialRun(decoder, ops, expected.prompts)
    with _layer_outputs(layers) as outputs:
        found = run.logits(_WHOLE if whole_prompt else _IN_PIECES)
    measured = _measure(found, expected.logits)
    accepted = measured.agrees(expected.dtype)
    equal = accepted and ops.row_invariant and _same_alone(decoder, ops, expected, found[0])
    first = None
    if not accepted:
        first = _first_different(run, outputs, expected, expected.dtype)
    return Verdict(accepted, measured.difference, first, whole_prompt, equal)


def _same_alone(decoder: DecoderModel, ops: BaseOps, expected: Expected, found: Tensor) -> bool:
    """Whether the first prompt's logits are bit-equal to those that it has by itself and in one piece."""
    prompt = expected.prompts[0]
    [alone] = TrialRun(decoder, ops, [prompt]).logits([[len(prompt)]])
    return torch.equal(alone, found)


def _first_different(
    run: TrialRun, outputs: list[list[Tensor]], expected: Expected, dtype: torch.dtype
) -> int | None:
    for layer, (steps, theirs) in enumerate(zip(outputs, expected.layers, strict=False)):
        if steps[0].ndim != theirs.ndim or theirs.ndim != 2:
            continue  # its blocks give something else than rows [T, H]
        ours = torch.cat([x[own] for x, own in zip(steps, run.first, strict=True)])
        if not agree(ours, theirs, dtype):
            return layer
    return None


def agree(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Whether rows computed in `dtype` are the same but for rounding. NaN agrees with nothing."""
    return _measure([ours], [theirs]).agrees(dtype)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest of any logit [n, vocabulary], in standard deviations of all; infinite where other tokens are
    excluded."""
    measured = _measure([ours], [theirs])
    return measured.difference if measured.same_excluded else math.inf


@dataclass(frozen=True)
class _Measure:
    """`difference`: the largest, in standard deviations of all; `cosines` [n]: of each row with its own."""

    difference: float
    cosines: Tensor
    same_excluded: bool

    def agrees(self, dtype: torch.dtype) -> bool:
        if not self.same_excluded or not math.isfinite(self.difference):
            return False
        if dtype == torch.float32:
            return self.difference <= _TOLERANCE
        fifth = self.cosines.sort().values[len(self.cosines) // 5]
        return bool(fifth >= _LEAST_COSINE)


def _measure(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> _Measure:
    """Of tensors [n, size], a few rows at a time: logits of a large vocabulary fill more memory than a layer."""
    count, total, squares, largest, cosines, same = 0, 0.0, 0.0, [], [], True
    for some, other in zip(ours, theirs, strict=True):
        for x, y in zip(some.split(_ROWS), other.split(_ROWS), strict=True):
            x, y = x.float(), y.to(x.device).float()
            same = same and torch.equal(x < _LEAST_LOGIT, y < _LEAST_LOGIT)
            # Tokens that a class excludes have logits so low that they exceed every scale.
            x, y = (z.masked_fill(z < _LEAST_LOGIT, 0) for z in (x, y))
            largest.append((x - y).abs().max())
            cosines.append(torch.cosine_similarity(x, y, -1))
            count, total = count + y.numel(), total + float(y.sum(dtype=torch.float64))
            squares += float(y.double().square().sum())
    deviation = math.sqrt(max(0.0, (squares - total * total / count) / (count - 1)))
    most = float(torch.stack(largest).max())
    return _Measure(most / max(deviation, 1e-30), torch.cat(cosines), same)


@contextmanager
def short_reaches(model: nn.Module) -> Iterator[None]:
    """Windows and the like of all modules and configurations are at most as long as `_REACHES` says meanwhile."""
    owners: dict[int, Any] = {id(module): module for module in model.modules()}
    for module in model.modules():
        config = getattr(module, "config", None)
        owners[id(config)] = config
    before = []
    for owner in owners.values():
        for name, reach in _REACHES.items():
            value = getattr(owner, "__dict__", {}).get(name)
            if type(value) is int and value > reach:
                before.append((owner, name, value))
                setattr(owner, name, reach)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def _layer_outputs(layers: nn.Module) -> Iterator[list[list[Tensor]]]:
    """Of each block of a model what its calls give, [T, H]; nothing where it has no list of blocks."""
    lists = [child for child in layers.children() if isinstance(child, nn.ModuleList)]
    blocks = max(lists, key=len, default=nn.ModuleList())
    outputs: list[list[Tensor]] = [[] for _ in blocks]

    def keep(place: int, output: Any) -> None:
        rows = output[0] if isinstance(output, tuple | list) else output
        if isinstance(rows, Tensor):
            outputs[place].append(rows.detach()[0].clone())

    handles = [
        block.register_forward_hook(
            lambda _module, _inputs, output, place=place: keep(place, output)
        )
        for place, block in enumerate(blocks)
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()

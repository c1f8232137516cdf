"""The tokens of a step's samples: what is submitted with the step, and what the host does once that has arrived."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.decoder.devices.base.device import Device
from services.decoder.devices.base.staging import Array
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.sampling.choices import Choices
from services.decoder.sampling.device_sampler import draw, largest
from services.decoder.sampling.sampler import Floats, Sampler
from services.decoder.sampling.split import Split
from services.decoder.worker.inputs.rows import Longs, Rows
from services.decoder.worker.launched_step import LaunchedStep
from services.decoder.worker.slots.slots import SlotTable


class SampleArrays(NamedTuple):
    """What arrives of a step's samples; None where none of them is chosen so."""

    tokens: Array | None  # int32 [samples], chosen on the device: -1 where it could not
    values: Array | None  # float32 [samples], their rows' largest logits
    logits: Any  # float32 [samples whose logits come to the host, vocabulary]

    @classmethod
    def of(cls, split: Split, arrived: Sequence[Array]) -> "SampleArrays":
        """arrived: as `TokenChoice.submit` gives them, on the host."""
        arrays = iter(arrived)
        tokens = values = None
        if split.on_device.any():
            tokens, values = next(arrays), next(arrays)
        return cls(tokens, values, next(arrays) if split.needs_logits else None)


class TokenChoice:
    """Chooses each sample where its own settings let it be chosen. A sample is a slot, a row of the hidden states, and
    the number of tokens that its sequence has generated before: a slot may have several at consecutive positions."""

    def __init__(
        self, model: DecoderModel, device: Device, slots: SlotTable, sampler: Sampler
    ) -> None:
        """Of several ranks all have to call it: they agree on what they guess."""
        self._model, self._device = model, device
        self._slots, self._sampler = slots, sampler
        ranks, rows = device.ops.ranks, model.sketched_rows
        self._guessed_rows = rows if ranks is None else ranks.least(rows)[0]
        # By slot the token that was chosen last, where steps are launched before the host knows it.
        self.last_tokens: Tensor | None = None
        if device.asynchronous:
            count = len(slots.known)
            self.last_tokens = torch.zeros(count, dtype=torch.int32, device=device.ops.device)

    def begin(self, step: LaunchedStep, rows: Rows, ends: Longs) -> list[Array]:
        """Finds the samples of the rows that run, in a batch where these end at `ends`, and who chooses for each; what
        the device needs for it."""
        plan, slots = step.plan, self._slots
        token_of = np.empty(len(plan.row_slot), np.int64)
        token_of.fill(-1)
        token_of[rows.place] = ends - 1
        owner = plan.sample_slot.astype(np.int64)
        token = token_of[plan.sample_row]
        usable = (token >= 0) & slots.known[owner] & ~slots.failed[owner]
        if plan.drafts is not None:
            token = token - plan.drafts.behind
        step.samples = usable.nonzero()[0]
        step.owners = owners = owner[step.samples]
        if not len(owners):
            return []
        step.split = split = self._sampler.split(
            owners, device_draws=self._device.asynchronous, guessed_rows=self._guessed_rows
        )
        if not split.is_plain or len(owners) < len(owner):
            # A later plan may give a slot to another sequence before this step is collected.
            step.wanted_logprobs = self._sampler.wanted_logprobs(owner)
        places = token[step.samples]
        step.takes_all = places.tobytes() == _places_of(int(ends[-1]))
        sent: list[Array] = [places]
        if self._device.asynchronous:
            sent.append(owners)
        if split.is_plain:
            return sent
        step.late = self._sampler.begin(owners)
        step.positions = (slots.length[owners] - slots.prompt_len[owners]).astype(np.int64)
        if plan.drafts is not None:
            step.positions += plan.drafts.order[step.samples]
        if self._device.asynchronous:
            draws = self._sampler.draws(owners, step.positions)
            if (draws.settings.temperature[split.on_device] > 0).any():
                step.draws = draws
                sent.append(draws.packed())
            if split.needs_logits:
                sent.append(split.whole_rows)
        return sent

    def submit(self, step: LaunchedStep, hidden: Tensor, sent: Sequence[Tensor]) -> list[Tensor]:
        """What the host needs of the samples, in the order of `SampleArrays`; sent: what `begin` gave."""
        split, last = step.split, hidden
        if not step.takes_all or len(last) != len(sent[0]):  # a graph's has padding
            last = hidden.index_select(0, sent[0])
        if not split.is_plain and split.guessed.any():
            step.last = last
        if split.is_plain or not (split.needs_logits or step.draws is not None):
            tokens, values = self._model.largest(last)
            tokens = tokens.to(torch.int32)
            self._keep(tokens, sent)
            return [tokens, values]
        logits = self._model.logits(last)
        wanted: list[Tensor] = []
        if split.on_device.any():
            if step.draws is None:
                tokens, values = largest(logits)
            else:
                step.logits = logits
                tokens, values = draw(logits, sent[2])
            self._keep(tokens, sent)
            wanted += [tokens, values]
        if split.needs_logits:
            wanted.append(logits if split.whole.all() else logits.index_select(0, sent[-1]))
        return wanted

    def _keep(self, tokens: Tensor, sent: Sequence[Tensor]) -> None:
        """For the next step, which may run before anyone knows that there is no token: a row that is not finite has any
        index, and the host may have to choose."""
        if self.last_tokens is not None:
            valid = tokens.clamp(0, self._model.config.vocab_size - 1)
            self.last_tokens.index_copy_(0, sent[1], valid)

    def finish(
        self,
        step: LaunchedStep,
        arrived: Sequence[Array],
        kept: Longs,
        later: Sequence[LaunchedStep],
    ) -> Choices:
        """What was chosen for some samples of a step, by what has arrived of them; later: the steps that have been
        launched since."""
        split = step.split
        if split.is_plain:
            tokens, values = arrived
            return self._sampler.take(tokens[kept], values[kept])
        found = SampleArrays.of(split, arrived)
        result = Choices(np.full(len(kept), -1, np.int32))
        here = np.flatnonzero(split.on_device[kept])
        if len(here):
            assert found.tokens is not None and found.values is not None
            tokens, samples = found.tokens, kept[here]
            if step.draws is not None:
                tokens = self._choose_the_rest(step, tokens, found.values, later)
            chosen = self._sampler.take(tokens[samples], found.values[samples])
            if len(here) == len(kept):
                result = chosen
            else:
                result.put(here, chosen)
            self._choose_otherwise(step, kept, found.values, result)
        if found.logits is not None:
            self._choose_by_logits(step, kept, found.logits, result)
        return result

    def _choose_by_logits(
        self, step: LaunchedStep, kept: Longs, logits: Floats, result: Choices
    ) -> None:
        split = step.split
        there = np.flatnonzero(~split.on_device[kept])
        if len(there):
            samples = kept[there]
            every = len(samples) == len(logits)
            own = logits if every else logits[split.logits_of(samples)]
            chosen = self._sampler.sample(own, step.owners[samples], step.positions[samples])
            result.put(there, chosen)
        scored = np.flatnonzero((split.on_device & split.whole)[kept])
        if len(scored):
            samples = kept[scored]
            own = logits[split.logits_of(samples)]
            result.score(scored, step.wanted_logprobs[step.samples[samples]], own)

    def _choose_otherwise(
        self, step: LaunchedStep, kept: Longs, values: Array, result: Choices
    ) -> None:
        """Chooses by all of their logits for the samples whose largest logit was guessed to decide, and does not."""
        guessed = np.flatnonzero(step.split.guessed[kept])
        if not len(guessed):
            return
        samples = kept[guessed]
        right = self._sampler.confirm(
            step.owners[samples], step.positions[samples], result.tokens[guessed], values[samples]
        )
        wrong, samples = guessed[~right], samples[~right]
        if not len(wrong):
            return
        assert step.last is not None
        with torch.inference_mode():
            index = torch.from_numpy(samples).to(step.last.device)
            logits = self._model.logits(step.last.index_select(0, index)).cpu().numpy()
        for sample in wrong.tolist():
            result.failed.pop(sample, None)
        result.put(
            wrong, self._sampler.sample(logits, step.owners[samples], step.positions[samples])
        )

    def _choose_the_rest(
        self,
        step: LaunchedStep,
        tokens: Array,
        values: Array,
        later: Sequence[LaunchedStep],
    ) -> Array:
        """Tokens of the device with those that it could not choose. Later steps have run on something else in the place
        of these: they compute the rows again."""
        rows = np.flatnonzero((tokens < 0) & np.isfinite(values) & step.split.on_device)
        if not len(rows):
            return tokens
        assert step.draws is not None and step.logits is not None
        with torch.inference_mode():
            index = torch.from_numpy(rows).to(step.logits.device)
            logits = step.logits.index_select(0, index).cpu().numpy()
        result = np.array(tokens)
        result[rows] = step.draws.choose(logits, rows)
        owners = step.owners[rows]
        owners = owners[~step.are_dropped(owners)]
        for after in later:
            after.redo.update(np.flatnonzero(np.isin(after.plan.row_slot, owners)).tolist())
        return result


@lru_cache(maxsize=1024)
def _places_of(count: int) -> bytes:
    """The places 0, 1, ... of a batch, as int64."""
    return np.arange(count).tobytes()

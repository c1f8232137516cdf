"""What steps take, seen before the first one: memory, for the size of the cache, and time, which the scheduler plans
with until it has seen steps itself. Together it costs less than one step of the largest size."""

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.decoder.devices.base.device import Device
from services.decoder.devices.base.staging import Array
from services.decoder.models.cache_spec import CacheSpec, cache_spec
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.sampling.device_sampler import Draws, draw
from services.decoder.sampling.truncation import Truncation
from services.decoder.steps.encoder_keys import AttendingTokens, NewRows, SeenRows
from services.decoder.steps.step import Step
from services.decoder.worker.slots.slot_states import SlotStates

_TIMED_TOKENS = 48  # where the whole is not run: enough for the products to be what takes the time
_LOGIT_BYTES = 4


@dataclass(frozen=True)
class Profile:
    """`step_bytes`: what the largest step takes beside weights and cache. Any step takes `step_us` microseconds, and
    `token_us` for each token in it; attention to a long past comes on top."""

    step_bytes: int
    step_us: float
    token_us: float


def profile(
    model: DecoderModel, device: Device, max_tokens: int, max_slots: int, max_model_len: int
) -> Profile:
    """Of steps of up to `max_tokens` tokens and `max_slots` samples."""
    spec = cache_spec(model.layers)
    # Of layers of several kinds the first does not tell the rest.
    in_full = device.profile_in_full or not spec.is_paged_alone
    # Its sequences have no more tokens than the step, and layers use the same memory one after the other.
    longest = max((device.attention_bytes(each, max_model_len) for each in spec.paged), default=0)
    with torch.inference_mode():
        if in_full:
            largest = _Trial(model, device, max_tokens, max_model_len, spec)
            step_bytes = device.peak_bytes(
                lambda: largest.run(max_slots, draws=device.asynchronous)
            )
            if device.asynchronous and model.generates:
                # The step before has not been collected yet, and keeps its logits.
                step_bytes += max_slots * model.config.vocab_size * _LOGIT_BYTES
        else:
            step_bytes = _scaled_bytes(model, device, max_tokens, max_slots, max_model_len, spec)
        # Below, kernels are chosen and memory is touched for the first time: the first run of a size is not timed,
        # but for the larger one where one layer was measured: that has been done above.
        timed = max_tokens if in_full else min(_TIMED_TOKENS, max_tokens)
        one = _Trial(model, device, 1, max_model_len, spec)
        several = _Trial(model, device, timed, max_model_len, spec)
        one.run(1)
        least, more = _seconds(one), _seconds(several)
    token_s = max(0.0, more - least) / max(1, timed - 1)
    return Profile(step_bytes + longest, 1e6 * max(0.0, least - token_s), 1e6 * token_s)


def _scaled_bytes(
    model: DecoderModel,
    device: Device,
    max_tokens: int,
    max_slots: int,
    max_model_len: int,
    spec: CacheSpec,
) -> int:
    """One layer and one sample tell the rest: layers use the same memory one after the other, and each sample more is a
    row of logits more."""
    first = replace(spec, paged=spec.paged[:1])
    trial = _Trial(model, device, max_tokens, max_model_len, first)
    seen = device.peak_bytes(lambda: trial.run(1))
    return seen + (max_slots - 1) * model.config.vocab_size * _LOGIT_BYTES


def _seconds(trial: "_Trial") -> float:
    began = time.perf_counter()
    trial.run(1)
    return time.perf_counter() - began


def _settings(samples: int) -> Array:
    """Of samples that are drawn among some of their tokens, as the device has them."""
    settings = Truncation(
        np.full(samples, 1.0, np.float32),
        np.full(samples, 50, np.int32),
        np.full(samples, 0.9),
        np.zeros(samples),
    )
    return Draws(settings, np.full(samples, 0.5)).packed()


class _Trial:
    """A step of some tokens in as few rows as that takes, every token an embedding of media, by the layers of a model
    that `spec` has, which may be the first ones. The caches it writes are its own."""

    def __init__(
        self,
        model: DecoderModel,
        device: Device,
        tokens: int,
        max_model_len: int,
        spec: CacheSpec,
    ) -> None:
        self._model, self._device = model, device
        size = device.block_size
        longest = min(tokens, max_model_len)
        counts = [longest] * (tokens // longest)
        if tokens % longest:
            counts.append(tokens % longest)
        width = -(-longest // size)
        blocks = np.arange(1, len(counts) * width + 1, dtype=np.int32).reshape(len(counts), width)
        places = np.concatenate([np.arange(count) for count in counts])
        rows = np.repeat(np.arange(len(counts)), counts)
        slots = blocks[rows, places // size].astype(np.int64) * size
        self._kv = [device.ops.alloc_kv(layer, blocks.size + 1) for layer in spec.paged]
        states = SlotStates(spec.states, device.ops, len(counts))
        begin = np.zeros(len(counts), np.int64)
        self._states = states.advance(np.arange(len(counts)), begin, np.array(counts))
        self._item_rows = spec.item_rows
        item_blocks = -(-spec.item_rows // size)
        self._keys = [device.ops.alloc_kv(layer, item_blocks + 1) for layer in spec.encoder]
        self._counts, self._blocks = counts, blocks
        self._slots = slots + places % size
        self._places = np.tile(places, (max(1, model.rotary_axes), 1))

    def run(self, samples: int, *, draws: bool = False) -> None:
        """Computes all tokens and so many rows of logits, and waits for them. draws: tokens too, by every setting that
        the device takes."""
        model, ops, tokens = self._model, self._device.ops, len(self._slots)
        states = self._states
        where = () if states is None else (states.read, states.write)
        sent = self._device.upload(self._places, self._blocks, self._slots, *where)
        step = Step(
            ids=torch.zeros(tokens, dtype=torch.int64, device=ops.device),
            positions=sent[0],
            meta=ops.make_meta(self._counts, self._counts, sent[1], sent[2]),
            slots=range(len(self._counts)),
            media=torch.arange(tokens, device=ops.device),
            states=() if states is None else states.on_device(sent[3], sent[4]),
            attending=self._attending(),
        )
        media = torch.zeros((tokens, model.config.hidden_size)).to(ops.device, ops.dtype)
        hidden = model.embed(step.ids, [media], [(0, tokens)])
        hidden = model.forward(hidden, step, self._kv)
        if model.generates:
            chosen = hidden[torch.arange(samples, device=ops.device) % tokens]
            logits = model.logits(chosen.contiguous())
            if draws:
                draw(logits, self._device.upload(_settings(samples))[0])
        self._device.synchronize()

    def _attending(self) -> AttendingTokens | None:
        """One item of media is written, and all tokens see all of it."""
        if not self._keys:
            return None
        ops, tokens, rows = self._device.ops, len(self._slots), self._item_rows
        blocks = np.arange(1, -(-rows // ops.block_size) + 1, dtype=np.int32)
        all_tokens = np.arange(tokens)
        index, table, places = self._device.upload(
            all_tokens, np.tile(blocks, (tokens, 1)), np.arange(rows) + ops.block_size
        )
        values = torch.zeros((rows, self._model.config.hidden_size)).to(ops.device, ops.dtype)
        return AttendingTokens(
            self._keys,
            [NewRows(values, ops.make_meta([rows], [rows], table[:1], places))],
            index,
            torch.zeros_like(index),
            [SeenRows(None, ops.make_meta([1] * tokens, [rows] * tokens, table, index), None)],
        )

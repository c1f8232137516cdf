"""A step plan as numpy arrays, checked for form: what does not depend on the decoder's state."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from services.decoder.worker.plans.drafts import Drafts
from shared.block_hash import HASH_BYTES
from shared.errors import InvalidRequest
from shared.step_columns import (
    PLAN_COLUMNS,
    Holds,
    PlanColumns,
    columns_that_hold,
    parallel_columns,
)
from tessera.artifact.v1.artifact_pb2 import ArtifactRef
from tessera.decoder.v1.decoder_pb2 import LoadAdapter, NewSequence, StepPlan

# By what keeps something of a new sequence (`KeptBySlot`) what is being prepared for it.
Prepared: TypeAlias = "Mapping[Hashable, Future[object]]"
Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True)
class Limits:
    """What this decoder said of itself in its Hello."""

    num_blocks: int
    num_host_blocks: int
    max_slots: int
    max_model_len: int
    max_batched_tokens: int
    max_step_tokens: int  # with a row that must not be split
    block_size: int
    num_encoder_blocks: int = 0  # beside block 0, which is padding


@dataclass(slots=True)
class Plan(PlanColumns[Ints]):
    """One step, with the fields of `StepPlan`."""

    lease: int
    step: int
    new: Sequence[NewSequence]
    fetch: Sequence[ArtifactRef]
    release: Sequence[bytes]
    sealed_hashes: bytes
    # Of each of `new`, where something is being prepared.
    prepared: "Sequence[Prepared]" = field(default=(), init=False)
    load_adapters: Sequence[LoadAdapter] = ()
    unload_adapters: Sequence[str] = ()
    # Of each of `load_adapters`: adds it to the model, once it is read.
    reading: "Sequence[Future[Callable[[], None]]]" = field(default=(), init=False)
    drafts: Drafts | None = None  # None in a plan without
    # Rows and their drafts [drafts, 2] where row_drafts asks for some, once they are known (`Drafting.complete`).
    proposed: "np.ndarray[tuple[int, int], np.dtype[np.int32]] | None" = field(
        default=None, init=False
    )


_GROUP_OF = {name: group for group in parallel_columns() for name in group}
_HELD_BY = {name: holds for holds in Holds for name in columns_that_hold(holds)}

_largest = np.maximum.reduce  # the method `max` of arrays takes twice as long for few elements

# Most arrays of most plans: a step that only generates has rows and samples.
_EMPTY: Ints = np.zeros(0, np.int32)
_NOTHING = dict.fromkeys(PLAN_COLUMNS, _EMPTY)


def read_plan(message: StepPlan, limits: Limits) -> Plan:
    """Raises InvalidRequest (INVALID_PLAN) naming the field that no state could make right."""
    given = {name: _array(name, data) for name in PLAN_COLUMNS if (data := getattr(message, name))}
    arrays = _NOTHING | given
    for name, values in given.items():
        for other in _GROUP_OF.get(name, ()):
            if len(arrays[other]) != len(values):
                raise bad_plan(f"{', '.join(_GROUP_OF[name])} differ in length")
        _check_held(name, values, limits)
    for sequence in message.new:
        if not 0 <= sequence.slot < limits.max_slots:
            raise bad_plan(f"new: slot {sequence.slot} is not in [0, {limits.max_slots})")
    _check_rows(arrays, limits)
    drafts = _read_drafts(arrays, limits) if "draft_slot" in given else None
    if "row_drafts" in given or "row_slack" in given:
        _check_lookahead(arrays, limits)
    _check_edits(arrays, limits)
    if len(message.sealed_hashes) != HASH_BYTES * len(arrays["sealed_blocks"]):
        raise bad_plan("sealed_hashes does not hold 16 bytes for each of sealed_blocks")
    return Plan(
        lease=message.lease,
        step=message.step,
        new=message.new,
        fetch=message.fetch,
        release=message.release,
        sealed_hashes=message.sealed_hashes,
        drafts=drafts,
        load_adapters=message.load_adapters,
        unload_adapters=message.unload_adapters,
        **arrays,
    )


def bad_plan(what: str) -> InvalidRequest:
    """The error that ends a stream whose scheduler does not keep to the contract."""
    return InvalidRequest("INVALID_PLAN", f"step plan: {what}")


def _array(name: str, data: bytes) -> Ints:
    if len(data) % 4:
        raise bad_plan(f"{name} holds {len(data)} bytes, not whole int32")
    return np.frombuffer(data, "<i4")


def _check_held(name: str, values: Ints, limits: Limits) -> None:
    holds = _HELD_BY[name]
    if holds is Holds.SLOT:
        _check_range(name, values, 0, limits.max_slots)
    elif holds is Holds.DEVICE_BLOCK:
        _check_range(name, values, 1, limits.num_blocks)
    elif holds is Holds.HOST_BLOCK:
        _check_range(name, values, 0, limits.num_host_blocks)


def _check_range(name: str, values: Ints, low: int, high: int) -> None:
    # One reduction instead of two: what is below the range is far above it without a sign.
    shifted = values - low if low else values
    if len(values) and _largest(shifted.view(np.uint32)) >= high - low:
        wrong = values[(values < low) | (values >= high)][0]
        raise bad_plan(f"{name}: {wrong} is not in [{low}, {high})")


def _has_twice(slots: Ints) -> bool:
    return len(set(slots.tolist())) < len(slots)


def _check_rows(arrays: dict[str, Ints], limits: Limits) -> None:
    slots = arrays["row_slot"]
    if len(slots) == 0:
        for name in ("sample_row", "pool_row"):
            if len(arrays[name]):
                raise bad_plan(f"{name} without rows")
        return
    _check_range("sample_row", arrays["sample_row"], 0, len(slots))
    if len(arrays["pool_row"]):
        _check_pools(arrays)
    if _has_twice(slots):
        raise bad_plan("row_slot names a slot twice")
    if not len(arrays["draft_slot"]) and _has_twice(arrays["sample_slot"]):
        raise bad_plan("sample_slot names a slot twice")
    _check_range("row_start", arrays["row_start"], 0, limits.max_model_len)
    _check_range("row_count", arrays["row_count"], 1, limits.max_model_len + 1)
    tokens = int(np.add.reduce(arrays["row_count"]))
    if tokens > limits.max_step_tokens:
        raise bad_plan(f"{tokens} tokens are more than {limits.max_step_tokens} a step")


def _check_pools(arrays: dict[str, Ints]) -> None:
    rows, pooled = arrays["row_slot"], arrays["pool_row"]
    _check_range("pool_row", pooled, 0, len(rows))
    if (rows[pooled] != arrays["pool_slot"]).any():
        raise bad_plan("pool_slot: a row is pooled for its own slot alone")
    if _has_twice(pooled) or np.isin(pooled, arrays["sample_row"]).any():
        raise bad_plan("pool_row names a row twice, or one with a sample")


def _read_drafts(arrays: dict[str, Ints], limits: Limits) -> Drafts:
    rows, sample_row = arrays["row_slot"], arrays["sample_row"]
    drafted, sampled = arrays["draft_slot"], arrays["sample_slot"]
    if not len(rows) or not np.isin(drafted, rows).all():
        raise bad_plan("draft_slot names a slot without a row")
    count = np.bincount(drafted, minlength=limits.max_slots)[rows]
    has_drafts = count > 0
    if (count >= arrays["row_count"]).any():
        raise bad_plan("draft_slot: a row has no token before its drafts")
    ends = arrays["row_start"].astype(np.int64) + arrays["row_count"]
    if (ends[has_drafts] > limits.max_model_len).any():
        raise bad_plan(f"draft_slot: drafts beyond {limits.max_model_len} tokens of a sequence")
    samples = np.bincount(sample_row, minlength=len(rows))
    if (samples[has_drafts] != count[has_drafts] + 1).any():
        raise bad_plan("draft_slot: a row with n drafts has n + 1 samples")
    behind = has_drafts[sample_row]
    if (sampled != rows[sample_row])[behind].any():
        raise bad_plan("draft_slot: another slot samples from a row with drafts")
    if _has_twice(np.concatenate([sampled[~behind], rows[has_drafts]])):
        raise bad_plan("sample_slot names a slot twice for one position")
    return Drafts.of(drafted, arrays["draft_token"], rows, count, sample_row)


def _check_lookahead(arrays: dict[str, Ints], limits: Limits) -> None:
    rows, most, slack = arrays["row_slot"], arrays["row_drafts"], arrays["row_slack"]
    if len(most) != len(rows):
        raise bad_plan("row_drafts has not one entry for each row")
    if len(arrays["draft_slot"]):
        raise bad_plan("row_drafts and draft_slot in one plan")
    _check_range("row_drafts", most, 0, limits.max_step_tokens)
    _check_range("row_slack", slack, 0, limits.max_model_len)
    if int(arrays["row_count"].sum()) + int(most.sum()) > limits.max_step_tokens:
        raise bad_plan(f"row_drafts: more than {limits.max_step_tokens} tokens a step")
    asked = np.flatnonzero((most > 0) | (slack > 0))
    if (arrays["row_count"][asked] != 1).any():
        raise bad_plan("row_drafts: a row with drafts or slack has one token")
    sampled, owners = arrays["sample_row"], arrays["sample_slot"]
    theirs = np.isin(sampled, asked)
    if len(asked) != theirs.sum() or (rows[sampled] != owners)[theirs].any():
        raise bad_plan("row_drafts: a row with drafts or slack has one sample, of its own slot")


def _check_edits(arrays: dict[str, Ints], limits: Limits) -> None:
    if not len(arrays["edit_slot"]):
        if len(arrays["edit_blocks"]):
            raise bad_plan("edit_blocks without edits")
        return
    width = -(-limits.max_model_len // limits.block_size)
    _check_range("edit_index", arrays["edit_index"], 0, width + 1)
    _check_range("edit_len", arrays["edit_len"], 0, width + 1)
    if int((arrays["edit_index"] + arrays["edit_len"]).max()) > width:
        raise bad_plan(f"an edit makes a table longer than {width} blocks")
    if int(arrays["edit_len"].sum()) != len(arrays["edit_blocks"]):
        raise bad_plan("edit_blocks does not hold the sum of edit_len")

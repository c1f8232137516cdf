"""The columns of step plans and results, for the scheduler, which fills lists, and the decoder, which reads arrays.

The names are those of the fields of `StepPlan` and `StepResult` in `decoder.proto`, where each is explained.
"""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Generic, TypeVar

Column = TypeVar("Column")


class Holds(Enum):
    """What the entries of a column are."""

    SLOT = "slot"
    DEVICE_BLOCK = "device block"
    HOST_BLOCK = "host block"
    NUMBER = "number"


_empty: Any = list  # whatever type the columns have


def _of(group: str, holds: Holds = Holds.NUMBER) -> dict[str, object]:
    return {"group": group, "holds": holds}


@dataclass(slots=True, kw_only=True)
class PlanColumns(Generic[Column]):
    """The int32 columns of a step plan, in the order in which they are applied. Columns of one group are parallel."""

    drop: Column = field(default_factory=_empty, metadata=_of("drop", Holds.SLOT))
    fork_child: Column = field(default_factory=_empty, metadata=_of("fork", Holds.SLOT))
    fork_parent: Column = field(default_factory=_empty, metadata=_of("fork", Holds.SLOT))
    fork_choice: Column = field(default_factory=_empty, metadata=_of("fork"))
    set_token_slot: Column = field(default_factory=_empty, metadata=_of("set_token", Holds.SLOT))
    set_token: Column = field(default_factory=_empty, metadata=_of("set_token"))
    edit_slot: Column = field(default_factory=_empty, metadata=_of("edit", Holds.SLOT))
    edit_index: Column = field(default_factory=_empty, metadata=_of("edit"))
    edit_len: Column = field(default_factory=_empty, metadata=_of("edit"))
    edit_blocks: Column = field(
        default_factory=_empty, metadata=_of("edit_blocks", Holds.DEVICE_BLOCK)
    )
    swap_out_device: Column = field(
        default_factory=_empty, metadata=_of("swap_out", Holds.DEVICE_BLOCK)
    )
    swap_out_host: Column = field(
        default_factory=_empty, metadata=_of("swap_out", Holds.HOST_BLOCK)
    )
    copy_src: Column = field(default_factory=_empty, metadata=_of("copy", Holds.DEVICE_BLOCK))
    copy_dst: Column = field(default_factory=_empty, metadata=_of("copy", Holds.DEVICE_BLOCK))
    swap_in_host: Column = field(default_factory=_empty, metadata=_of("swap_in", Holds.HOST_BLOCK))
    swap_in_device: Column = field(
        default_factory=_empty, metadata=_of("swap_in", Holds.DEVICE_BLOCK)
    )
    row_slot: Column = field(default_factory=_empty, metadata=_of("row", Holds.SLOT))
    row_start: Column = field(default_factory=_empty, metadata=_of("row"))
    row_count: Column = field(default_factory=_empty, metadata=_of("row"))
    sample_row: Column = field(default_factory=_empty, metadata=_of("sample"))
    sample_slot: Column = field(default_factory=_empty, metadata=_of("sample", Holds.SLOT))
    pool_row: Column = field(default_factory=_empty, metadata=_of("pool"))
    pool_slot: Column = field(default_factory=_empty, metadata=_of("pool", Holds.SLOT))
    draft_slot: Column = field(default_factory=_empty, metadata=_of("draft", Holds.SLOT))
    draft_token: Column = field(default_factory=_empty, metadata=_of("draft"))
    row_drafts: Column = field(default_factory=_empty, metadata=_of("row_drafts"))
    row_slack: Column = field(default_factory=_empty, metadata=_of("row_drafts"))
    sealed_blocks: Column = field(
        default_factory=_empty, metadata=_of("sealed_blocks", Holds.DEVICE_BLOCK)
    )


PLAN_COLUMNS = tuple(column.name for column in fields(PlanColumns))
RESULT_COLUMNS = {
    "tokens": "<i4",
    "logprobs": "<f4",
    "top_ids": "<i4",
    "top_logprobs": "<f4",
    "accepted": "<i4",
    "drafted": "<i4",
}
"""NumPy types of the columns of a step result. `PromptLogprobs` has those of the same name."""


def columns_that_hold(holds: Holds) -> tuple[str, ...]:
    """Names of the plan's columns with such entries."""
    return tuple(c.name for c in fields(PlanColumns) if c.metadata["holds"] is holds)


def parallel_columns() -> tuple[tuple[str, ...], ...]:
    """Names of the plan's columns that have equal lengths, group by group."""
    groups: dict[str, list[str]] = {}
    for column in fields(PlanColumns):
        groups.setdefault(column.metadata["group"], []).append(column.name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)

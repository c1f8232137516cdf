"""The columns of steps are those of the contract."""

from google.protobuf.descriptor import FieldDescriptor

from services.decoder.worker.plans.plan import Plan
from services.scheduler.core.plan import StepPlan
from shared.step_columns import (
    PLAN_COLUMNS,
    RESULT_COLUMNS,
    Holds,
    PlanColumns,
    columns_that_hold,
    parallel_columns,
)
from tessera.decoder.v1 import decoder_pb2

_HASHES = "sealed_hashes"  # 16 bytes each, not a column of numbers


def packed(message: type) -> set[str]:
    """Fields of a message that are one run of bytes."""
    return {
        f.name
        for f in message.DESCRIPTOR.fields  # type: ignore[attr-defined]
        if f.type == FieldDescriptor.TYPE_BYTES and not f.is_repeated
    }


def test_plan_columns_are_the_fields_of_the_message() -> None:
    assert packed(decoder_pb2.StepPlan) == {*PLAN_COLUMNS, _HASHES}


def test_result_columns_are_the_fields_of_the_messages() -> None:
    assert packed(decoder_pb2.StepResult) == set(RESULT_COLUMNS)
    assert packed(decoder_pb2.PromptLogprobs) < set(RESULT_COLUMNS)


def test_both_sides_of_a_step_have_these_columns() -> None:
    assert issubclass(StepPlan, PlanColumns) and issubclass(Plan, PlanColumns)
    plan = StepPlan(1)
    assert all(getattr(plan, name) == [] for name in PLAN_COLUMNS)


def test_every_number_of_a_slot_or_block_is_known_as_such() -> None:
    for name in PLAN_COLUMNS:
        is_slot = name.endswith(("slot", "child", "parent")) or name == "drop"
        assert (name in columns_that_hold(Holds.SLOT)) == is_slot
    assert columns_that_hold(Holds.HOST_BLOCK) == ("swap_out_host", "swap_in_host")
    assert parallel_columns()[0] == ("fork_child", "fork_parent", "fork_choice")

"""What a batch begins with: its lines are counted, and those that cannot be read have their results."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from services.gateway.api.batches.lines import RawLine, custom_id_of, read_line
from services.gateway.api.batches.results import problem_of, unanswered
from services.gateway.api.batches.schema import Problem
from shared.errors import InvalidRequest
from shared.queue.batch_store import FAILED, BatchStore, StoredBatch

MOST_LINES = 50_000
_MOST_PROBLEMS = 100


@dataclass(slots=True)
class Checked:
    """What was found: the number of lines, and what is wrong with some; without `is_served` no line can be sent."""

    total: int = 0
    problems: list[Problem] = field(default_factory=list)
    is_served: bool = False


async def check_lines(
    store: BatchStore, batch: StoredBatch, lines: AsyncIterator[RawLine], most_bytes: int
) -> Checked:
    """Reads all lines. Those that are no requests get their results, unless none is one."""
    checked = Checked()
    names: set[str] = set()
    refused: list[tuple[int, str | None, InvalidRequest]] = []
    async for raw in lines:
        checked.total += 1
        try:
            if checked.total > MOST_LINES:
                raise InvalidRequest(
                    "TOO_MANY_LINES", f"a batch has at most {MOST_LINES} lines: send it as several"
                )
            asked = await read_line(raw, batch.endpoint, most_bytes)
            if asked.custom_id in names:
                raise InvalidRequest(
                    "DUPLICATE_CUSTOM_ID",
                    f"custom_id {asked.custom_id[:64]!r} is that of an earlier line",
                    field="custom_id",
                )
            names.add(asked.custom_id)
        except InvalidRequest as error:
            if error.reason == "TOO_MANY_LINES":
                return Checked(checked.total, [problem_of(error)])
            refused.append((raw.number, await custom_id_of(raw), error))
    checked.problems = [problem_of(why, number) for number, _, why in refused[:_MOST_PROBLEMS]]
    checked.is_served = len(refused) < checked.total
    if not checked.total:
        empty = InvalidRequest("EMPTY_FILE", "the file has no lines", field="input_file_id")
        checked.problems.append(problem_of(empty))
    for number, name, why in refused if checked.is_served else ():
        said = f"line {number}: {why.message}"
        result = unanswered(batch.id, number, name, why.reason.lower(), said)
        await store.keep_result(batch.id, number, FAILED, result)
    return checked

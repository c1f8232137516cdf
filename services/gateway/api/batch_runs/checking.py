"""What a batch begins with: its lines are counted, and those that cannot be read have their results."""

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from services.gateway.api.batch_forms import BatchForm, LineName
from services.gateway.api.batch_runs.lines import RawLine, custom_id_of, read_line
from services.gateway.api.batch_runs.problems import Problem, problem_of
from shared.errors import InvalidRequest
from shared.queue.stores.batch_store import FAILED, BatchStore, StoredBatch

_MOST_PROBLEMS = 100


@dataclass(slots=True)
class Checked:
    """What was found: the number of lines, and what is wrong with some; without `is_served` no line can be sent."""

    total: int = 0
    problems: list[Problem] = field(default_factory=list)
    is_served: bool = False


async def check_lines(
    store: BatchStore,
    batch: StoredBatch,
    form: BatchForm,
    lines: AsyncIterator[RawLine],
    most_bytes: int,
) -> Checked:
    """Reads all lines. Those that are no requests get their results, unless none is one. Raises InvalidRequest where
    there are too many.
    """
    checked = Checked()
    names: set[bytes] = set()
    # Not the errors: their frames, many thousands, would keep the garbage collector busy for long.
    refused: list[tuple[int, bytes]] = []
    async for raw in lines:
        checked.total += 1
        try:
            asked = await read_line(raw, form, batch, most_bytes)
            name = _digest(asked.custom_id)
            if name in names:
                raise InvalidRequest(
                    "DUPLICATE_CUSTOM_ID",
                    f"custom_id {asked.custom_id[:64]!r} is that of an earlier line",
                    field="custom_id",
                )
            names.add(name)
        except InvalidRequest as error:
            if len(refused) < _MOST_PROBLEMS:
                checked.problems.append(problem_of(error, raw.number))
            is_named = error.reason != "INVALID_JSON"
            custom_id = await custom_id_of(raw) if is_named else None
            named = LineName(batch.id, raw.number, custom_id)
            told = InvalidRequest(error.reason, f"line {raw.number}: {error.message}")
            refused.append((raw.number, form.unanswered(named, told)))
    checked.is_served = len(refused) < checked.total
    if not checked.total:
        empty = InvalidRequest("EMPTY_FILE", "the file has no lines", field="input_file_id")
        checked.problems.append(problem_of(empty))
    for number, result in refused if checked.is_served else ():
        await store.keep_result(batch.id, number, FAILED, result)
    return checked


def _digest(custom_id: str) -> bytes:
    """Names may be long, and there may be many."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()

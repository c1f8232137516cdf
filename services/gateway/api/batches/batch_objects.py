"""Batches as OpenAI's clients read them."""

import msgspec

from services.gateway.api.batch_runs.problems import Problems
from services.gateway.api.batches.schema import BatchObject, Counts
from services.gateway.decoding.typed import decoder_of
from shared.queue.stores.batch_store import StoredBatch

_ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


def batch_object(batch: StoredBatch) -> BatchObject:
    """What is told of a batch. Its files are named once they are whole."""

    def at(status: str) -> int | None:
        found = batch.times.get(status)
        return None if found is None else found // 1000

    is_ended = batch.status in _ENDED
    problems = decoder_of(Problems).decode(batch.problems) if batch.problems else None
    return BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        errors=problems,
        input_file_id=batch.input,
        completion_window=batch.window,
        status=batch.status,
        output_file_id=batch.output if is_ended and batch.output_pieces else None,
        error_file_id=batch.errors if is_ended and batch.error_pieces else None,
        created_at=batch.created_ms // 1000,
        in_progress_at=at("in_progress"),
        expires_at=batch.expires_ms // 1000,
        finalizing_at=at("finalizing"),
        completed_at=at("completed"),
        failed_at=at("failed"),
        expired_at=at("expired"),
        cancelling_at=at("cancelling"),
        cancelled_at=at("cancelled"),
        request_counts=Counts(
            total=batch.total or 0, completed=batch.completed, failed=batch.failed + batch.unsent
        ),
        metadata=msgspec.json.decode(batch.metadata) if batch.metadata else None,
    )

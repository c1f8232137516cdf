"""Batches as Anthropic's clients read them."""

from datetime import UTC, datetime

from services.gateway.api.anthropic.batches.schema import MessageBatch, RequestCounts
from shared.queue.stores.batch_store import StoredBatch

PATH = "/v1/messages/batches"
_ENDED = ("completed", "failed", "expired", "cancelled")


def message_batch(batch: StoredBatch) -> MessageBatch:
    """What is told of a batch. Its results have a path, not a URL: clients put it behind the address that they know,
    which proxies may have changed on the way here.
    """
    return MessageBatch(
        id=batch.id,
        processing_status=_status(batch),
        request_counts=_counts(batch),
        ended_at=_time(batch.times[batch.status]) if has_ended(batch) else None,
        created_at=_time(batch.created_ms),
        expires_at=_time(batch.expires_ms),
        cancel_initiated_at=_time(batch.times["cancelling"])
        if "cancelling" in batch.times
        else None,
        results_url=f"{PATH}/{batch.id}/results" if has_ended(batch) else None,
    )


def has_ended(batch: StoredBatch) -> bool:
    """Whether all its requests have results."""
    return batch.status in _ENDED


def _status(batch: StoredBatch) -> str:
    if has_ended(batch):
        return "ended"
    return "canceling" if batch.status == "cancelling" else "in_progress"


def _counts(batch: StoredBatch) -> RequestCounts:
    total = batch.total or 0
    if not has_ended(batch):
        return RequestCounts(processing=total)
    is_cancelled = batch.status == "cancelled"
    return RequestCounts(
        succeeded=batch.completed,
        errored=total - batch.completed - batch.unsent,
        canceled=batch.unsent if is_cancelled else 0,
        expired=0 if is_cancelled else batch.unsent,
    )


def _time(ms: int) -> str:
    found = datetime.fromtimestamp(ms / 1000, UTC)
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")

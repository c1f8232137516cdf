"""The bodies of /v1/messages/batches."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from services.gateway.decoding.about import about

_NONE = msgspec.Raw()


class BatchItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One request of a batch."""

    custom_id: Annotated[
        str | None,
        about("1 to 64 letters, digits, _ and -; no other request has it", example="first"),
    ] = None
    params: Annotated[
        msgspec.Raw, about("the body of a request to /v1/messages; without `stream: true`")
    ] = _NONE


class MessageBatchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/batches."""

    requests: Annotated[
        list[BatchItem] | None,
        about(
            "1 to 50,000 of them: each a `custom_id` (1 to 64 letters, digits, `_` and `-`; no two have the same) and"
            " its `params`, the body that `/v1/messages` would get"
        ),
    ] = None


class Params(msgspec.Struct):
    """What must not be asked for in a batch."""

    stream: bool | None = None


class RequestCounts(msgspec.Struct, kw_only=True):
    """Requests of a batch: all are `processing` until it has ended."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, kw_only=True):
    """One batch. Times are as in RFC 3339."""

    id: str
    type: str = "message_batch"
    processing_status: Annotated[str, about("in_progress, canceling or ended")]
    request_counts: RequestCounts
    ended_at: str | None
    created_at: str
    expires_at: str
    archived_at: str | None = None
    cancel_initiated_at: str | None
    results_url: Annotated[str | None, about("a path, once the batch has ended")]


class MessageBatchPage(msgspec.Struct, kw_only=True):
    """GET /v1/messages/batches."""

    data: Sequence[MessageBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedMessageBatch(msgspec.Struct, kw_only=True):
    """DELETE /v1/messages/batches/{id}."""

    id: str
    type: str = "message_batch_deleted"

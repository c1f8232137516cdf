"""The bodies of /v1/files and /v1/batches."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from services.gateway.api.batch_runs.problems import Problems
from services.gateway.decoding.about import about
from services.gateway.decoding.decode import Whole

_NONE = msgspec.Raw()


class FileObject(msgspec.Struct, kw_only=True):
    """One file. Times are in seconds since 1970."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"
    # As Anthropic's clients know a file.
    type: str = "file"
    mime_type: Annotated[str, about("by its name")] = "application/octet-stream"
    size_bytes: Annotated[int, about("as `bytes`")] = 0
    downloadable: bool = True


class Deleted(msgspec.Struct, kw_only=True):
    """DELETE /v1/files/{id}."""

    id: str
    object: str = "file"
    deleted: bool = True
    # As Anthropic's clients know it.
    type: str = "file_deleted"


class FilePage(msgspec.Struct, kw_only=True):
    """GET /v1/files."""

    object: str = "list"
    data: Sequence[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class UploadFields(msgspec.Struct, kw_only=True):
    """What a form says of its file."""

    purpose: Annotated[
        str | None, about("batch; of pictures vision or user_data", example="batch")
    ] = None
    anchor: Annotated[str | None, about("created_at; with the seconds alone")] = msgspec.field(
        default=None, name="expires_after[anchor]"
    )
    seconds: Annotated[
        str | None, about("for how long the file is kept: 3,600 to 2,592,000", "`--file-keep`")
    ] = msgspec.field(default=None, name="expires_after[seconds]")


class UploadBody(UploadFields, kw_only=True):
    """POST /v1/files: a file with a request in each line, or a picture."""

    file: Annotated[bytes, about("the file itself, in a part with a filename")]


class ExpiresAfter(msgspec.Struct, kw_only=True):
    """For how long the files of a batch are kept."""

    anchor: Annotated[str | None, about("created_at")] = None
    seconds: Annotated[
        Whole | None, about("3,600 to 2,592,000", minimum=3600, maximum=2_592_000)
    ] = None


class BatchRequest(msgspec.Struct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: Annotated[
        str | None,
        about(
            "a file of one's own, of at most 50,000 lines; until the batch has ended it cannot be deleted, and is kept"
            " as long as the batch",
            example="file-0",
        ),
    ] = None
    endpoint: Annotated[
        str | None,
        about(
            "the `url` of all lines: `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages`, or"
            " one of [vectors and scores](#vectors-and-scores) such as `/v1/embeddings`",
            example="/v1/chat/completions",
        ),
    ] = None
    completion_window: Annotated[
        str | None,
        about(
            "how long it may take, such as `24h`; `s`, `m`, `h` or `d`, up to `30d`", example="24h"
        ),
    ] = None
    metadata: Annotated[
        dict[str, str] | None,
        about("up to 16 texts of up to 512 characters under names of up to 64", "none"),
    ] = None
    output_expires_after: Annotated[
        ExpiresAfter | None,
        about(
            '`{"anchor": "created_at", "seconds": ...}`, 3,600 to 2,592,000: for how long the files that it writes are'
            " kept",
            "`--file-keep`",
        ),
    ] = None


class Counts(msgspec.Struct, kw_only=True):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, kw_only=True):
    """One batch. Times are in seconds since 1970."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: Problems | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    metadata: Mapping[str, Any] | None


class BatchPage(msgspec.Struct, kw_only=True):
    """GET /v1/batches."""

    object: str = "list"
    data: Sequence[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Line(msgspec.Struct):
    """One line of a batch's file."""

    custom_id: str | None = None
    method: str | None = None
    url: str | None = None
    body: msgspec.Raw = _NONE


class LineBody(msgspec.Struct):
    """What must not be asked for in a line."""

    stream: bool | None = None
    background: bool | None = None

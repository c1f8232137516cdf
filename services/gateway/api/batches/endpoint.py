"""The routes of files and batches."""

from collections.abc import Sequence

from services.gateway.admission.api_keys import BEARER, X_API_KEY
from services.gateway.api.batch_runs.runner import BatchRunner
from services.gateway.api.batches.files import Files
from services.gateway.api.batches.handlers import Batches
from services.gateway.api.batches.line_form import OpenAILines
from services.gateway.api.batches.schema import (
    BatchObject,
    BatchPage,
    BatchRequest,
    Deleted,
    FileObject,
    FilePage,
    UploadBody,
)
from services.gateway.api.batches.uploads import Uploads
from services.gateway.api.error_object import error_reply
from services.gateway.api.parts import Api, Parts
from services.gateway.http.endpoint import Route
from services.gateway.http.forms import ErrorReply
from shared.errors import ServingError
from shared.queue.stores.batch_store import KIND

_PAGE = {
    "limit": "how many to list at most",
    "after": "the id behind which the list goes on",
}
_FILES = {"order": "asc: the oldest first", "purpose": "batch, batch_output, vision or user_data"}


class BatchesEndpoint:
    """/v1/files and /v1/batches, and what lies below them."""

    roots = ("/v1/files", "/v1/batches")
    # Clients of Anthropic's API send files too.
    key_headers = (BEARER, X_API_KEY)

    def __init__(self, uploads: Uploads, files: Files, batches: Batches) -> None:
        self.routes: Sequence[Route] = (
            Route("POST", "/v1/files", uploads.upload, reply=FileObject, form=UploadBody),
            Route("GET", "/v1/files", files.all, reply=FilePage, query={**_PAGE, **_FILES}),
            Route("GET", "/v1/files/*", files.one, reply=FileObject),
            Route("DELETE", "/v1/files/*", files.delete, reply=Deleted),
            Route("GET", "/v1/files/*/content", files.content),
            Route("POST", "/v1/batches", batches.create, BatchRequest, BatchObject),
            Route("GET", "/v1/batches", batches.all, reply=BatchPage, query=_PAGE),
            Route("GET", "/v1/batches/*", batches.one, reply=BatchObject),
            Route("POST", "/v1/batches/*/cancel", batches.cancel, reply=BatchObject),
        )

    def error(self, error: ServingError) -> ErrorReply:
        """{"error": {"message", "type", "param", "code"}}."""
        return error_reply(error)


def _endpoint(parts: Parts) -> BatchesEndpoint:
    limits = parts.file_limits
    parts.batch_forms.add(KIND, OpenAILines())
    BatchRunner(parts)
    return BatchesEndpoint(
        Uploads(parts.files, limits, parts.body_limits.budget, parts.slices, parts.work),
        Files(parts.files),
        Batches(
            parts.batches, parts.batch_forms, parts.inner_calls, parts.body_limits, limits.keep_ms
        ),
    )


BATCHES = Api(_endpoint)

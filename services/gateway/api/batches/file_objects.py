"""Files as OpenAI's and Anthropic's clients read them."""

import mimetypes

from services.gateway.api.batches.schema import FileObject
from shared.queue.stores.file_store import StoredFile


def file_object(file: StoredFile) -> FileObject:
    """What is told of a file."""
    return FileObject(
        id=file.id,
        bytes=file.bytes,
        created_at=file.created_ms // 1000,
        expires_at=file.expires_ms // 1000,
        filename=file.name,
        purpose=file.purpose,
        mime_type=mimetypes.guess_type(file.name)[0] or "application/octet-stream",
        size_bytes=file.bytes,
    )

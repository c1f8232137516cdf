"""The name of a media item's embeddings: of the item and of the weights that encode it."""

from hashlib import blake2b

from shared.artifacts.file import DIGEST_BYTES


def embedding_name(content: bytes, digest: bytes) -> bytes:
    """16 bytes; the item's own digest where the content of the checkpoint is not known."""
    return blake2b(content + digest, digest_size=DIGEST_BYTES).digest() if content else digest

"""What the embeddings of a media item are called, all the way from the encoder to the decoder's blocks."""

from hashlib import blake2b

from shared.artifacts.file import DIGEST_BYTES


def embedding_name(content: bytes, digest: bytes, numerics: str = "") -> bytes:
    """16 bytes. content: of the weights (`Hello.content`); numerics: of the encoder. Of what is not known the name says
    nothing: with neither it is the item's own digest.
    """
    if not content and not numerics:
        return digest
    return blake2b(content + digest, digest_size=DIGEST_BYTES, key=_key(numerics)).digest()


def _key(numerics: str) -> bytes:
    """At most 64 bytes; none for none."""
    return blake2b(numerics.encode(), digest_size=DIGEST_BYTES).digest() if numerics else b""

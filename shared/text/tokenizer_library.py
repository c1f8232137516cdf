"""The tokenizers library, called so that it fails with errors."""

from tokenizers import Tokenizer

from shared.errors import InvalidRequest
from shared.text.rust_panic import panics_as_errors
from shared.text.tokenizer_file import TokenizerFile


def open_tokenizer(file: TokenizerFile) -> Tokenizer:
    """The library's tokenizer of a checkpoint's. Raises InvalidRequest where the library does not take it."""
    try:
        with panics_as_errors():
            return Tokenizer.from_str(file.text)
    except Exception as error:  # the library has no class of its own
        raise InvalidRequest(
            "BAD_CHECKPOINT", f"the tokenizer cannot be used: {error}", field="model"
        ) from error


def token_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text, without those that go around one. Runs without the GIL.

    Raises RustPanic where the tokenizer's regular expression backtracks too often, and an error of any class where it
    has no token for a part of the text.
    """
    # A batch of one: the library gives the GIL away for batches only, and only they can do without offsets.
    with panics_as_errors():
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids

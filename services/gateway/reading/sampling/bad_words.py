"""Words that must not be in an answer, as the sequences of token ids that would write them."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from services.gateway.decoding.bounds import texts, wrong
from shared.text.rust_panic import RustPanic
from shared.text.tokenizer_library import token_ids
from tessera.common.v1.sampling_pb2 import TokenSequence

_MOST_WORDS = 256
_LONGEST_WORD = 256
# How many times as long as other fields of the same size they may take to read: they are tokenized, twice.
BAD_WORDS_TIMES = 16


def read_bad_words(listed: str | Sequence[str] | None, tokenizer: Tokenizer) -> list[TokenSequence]:
    """The sequences for `bad_words`. Raises InvalidRequest for a word without tokens, or one that the tokenizer gives
    up on."""
    words = texts("bad_words", listed, _MOST_WORDS, _LONGEST_WORD)
    sequences: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(words):
        try:
            found = list(spellings(word, tokenizer))
        except RustPanic as error:
            raise wrong(
                f"bad_words[{place}]", f"is a text that the tokenizer gives up on ({error})"
            ) from error
        if not found:
            raise wrong(f"bad_words[{place}]", "has no tokens")
        sequences |= dict.fromkeys(found)
    return [TokenSequence(ids=ids) for ids in sequences]


def spellings(word: str, tokenizer: Tokenizer) -> Iterable[tuple[int, ...]]:
    """How a word is written at the beginning of a text and, where that is another sequence of the
    same length, after a space: vLLM's rule. Other ways to cut the word into tokens stay open.
    """
    bare = _ids(tokenizer, word.lstrip())
    if bare:
        yield bare
        spaced = _ids(tokenizer, " " + word.lstrip())
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            yield spaced


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Empty for what the tokenizer has no token for."""
    try:
        return tuple(token_ids(tokenizer, text))
    except RustPanic:
        raise
    except Exception:  # the library has no class of its own
        return ()

"""A checkpoint's tokenizer as llguidance has it: which bytes each token adds, and which tokens end an answer."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.telemetry.logs import Stopwatch
from shared.text.rust_panic import panics_as_errors
from shared.text.tokenizer_file import TokenizerFile, read_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class GrammarTokenizer:
    """`tokenizer` knows the text of each id that the checkpoint's has; other ids never come. `end_ids` has at least
    one."""

    tokenizer: "LLTokenizer"
    end_ids: frozenset[int]

    def is_special(self, token: int) -> bool:
        """Whether it is no text: a grammar has it by its name or id alone."""
        known = 0 <= token < self.tokenizer.vocab_size
        return known and self.tokenizer.is_special_token(token)

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> "GrammarTokenizer":
        """Takes some tenths of a second in which no other thread runs, and 100 MB, for 150,000 ids. Raises
        InvalidRequest for a tokenizer that cannot be used."""
        from llguidance import LLTokenizer

        watch = Stopwatch()
        try:
            file = read_tokenizer(checkpoint.folder / "tokenizer.json")
            size = _num_ids(file)
            end_ids = _end_ids(checkpoint, file, size)
            with panics_as_errors():
                tokenizer = LLTokenizer(file.text, n_vocab=size, eos_token=end_ids)
        except Exception as error:  # the library has no class of its own
            raise InvalidRequest(
                "UNSUPPORTED_SAMPLING",
                f"grammar: the tokenizer of this model cannot be used for grammars ({error}); leave it out",
                field="grammar",
            ) from error
        log.info("tokenizer for grammars", ids=size, ms=watch.lap_us() // 1000)
        return cls(tokenizer, frozenset(end_ids))

    @classmethod
    def begin(cls, checkpoint: Checkpoint) -> "Future[GrammarTokenizer]":
        """`load`, on a thread of its own, for while weights are read: later it would hold up every stream."""
        pool = ThreadPoolExecutor(1, "grammars")
        found = pool.submit(cls.load, checkpoint)
        pool.shutdown(wait=False)
        return found


def _end_ids(checkpoint: Checkpoint, file: TokenizerFile, size: int) -> list[int]:
    """Those of the tokenizer's `size` ids that the checkpoint's files name, where they name none its `eos_token`."""
    eos = file.special_id("eos_token")
    named = checkpoint.eos_token_ids() or (() if eos is None else (eos,))
    found = [index for index in named if 0 <= index < size]
    if not found:
        raise ValueError("neither it nor the model's files name a token that ends an answer")
    return found


def _num_ids(file: TokenizerFile) -> int:
    """One more than the largest id."""
    vocabulary = file.content["model"].get("vocab") or {}
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return 1 + max((*ids, *file.ids().values()), default=-1)

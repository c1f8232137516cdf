"""What `--speculation` may be."""

from services.decoder.speculation.proposer import Proposer
from services.decoder.speculation.suffix import SuffixProposer

PROPOSERS: dict[str, type[Proposer]] = {"suffix": SuffixProposer}


def make_proposer(mode: str, *, equal_rows: bool) -> Proposer | None:
    """What guesses; None if nothing does. equal_rows: whether a token's bits depend on its own sequence alone, without
    which drafts may change an answer: they are then to be asked for."""
    if mode == "off" or (mode == "auto" and not equal_rows):
        return None
    return PROPOSERS["suffix" if mode == "auto" else mode]()

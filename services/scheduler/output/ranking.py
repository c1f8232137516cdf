"""What is kept of candidates of which only the best are answered, until all have ended."""

from dataclasses import dataclass, field

from services.scheduler.core.sequence import Ending


@dataclass(slots=True)
class Candidate:
    """One output with its records; the score of sampled ones is the mean log-probability of a token, as with OpenAI."""

    records: bytearray = field(default_factory=bytearray)
    logprob: float = 0.0  # of all tokens
    num_tokens: int = 0
    ending: Ending | None = None

    def add(self, record: bytes, logprob: float) -> None:
        """Takes a token."""
        self.records += record
        self.logprob += logprob
        self.num_tokens += 1

    @property
    def score(self) -> float:
        """Higher is better."""
        return self.logprob / max(1, self.num_tokens)


class Candidates:
    """By the number of the sequence that makes each."""

    def __init__(self, num_wanted: int) -> None:
        self._num_wanted = num_wanted
        self._all: dict[int, Candidate] = {}

    def __getitem__(self, number: int) -> Candidate:
        return self._all.setdefault(number, Candidate())

    def best(self) -> list[Candidate]:
        """The wanted number of them, best first; of equal ones the first."""
        ranked = sorted(self._all.items(), key=lambda item: (-item[1].score, item[0]))
        return [candidate for _, candidate in ranked[: self._num_wanted]]

"""Outputs of which only the best are answered (`best_of`), kept until all have ended."""

from dataclasses import dataclass, field

from services.scheduler.core.sequence import Ending


@dataclass(slots=True)
class RankedOutput:
    """One output with its records. As with OpenAI, the score is the mean log-probability of a token."""

    records: bytearray = field(default_factory=bytearray)
    logprob: float = 0.0  # of all tokens
    num_tokens: int = 0
    ending: Ending | None = None

    def add(self, record: bytes, logprob: float) -> None:
        """Appends a token."""
        self.records += record
        self.logprob += logprob
        self.num_tokens += 1

    @property
    def score(self) -> float:
        """Higher is better."""
        return self.logprob / max(1, self.num_tokens)


class Ranking:
    """The outputs of a request by the number of the sequence that makes each."""

    def __init__(self, num_wanted: int) -> None:
        self._num_wanted = num_wanted
        self._outputs: dict[int, RankedOutput] = {}

    def __getitem__(self, number: int) -> RankedOutput:
        return self._outputs.setdefault(number, RankedOutput())

    def best(self) -> list[RankedOutput]:
        """The wanted number of outputs, best first; of equal ones the first."""
        ranked = sorted(self._outputs.items(), key=lambda item: (-item[1].score, item[0]))
        return [output for _, output in ranked[: self._num_wanted]]

"""What a decoder needs for a step: announced when it is bound, then corrected by every step that it has answered."""

from dataclasses import dataclass

# Before a step has told what attention costs: for a token and each token that it looks at, this share of what a token
# costs otherwise. It is 1/8,400 of the arithmetic of a model of 0.4 billion parameters and less for a larger one.
_OF_PAIR = 1 / 8192
_RATE = 0.3  # share of a step's error that is taken over
_LARGEST_ERROR = 3.0  # a process that lost its core for a while says little about the next step


@dataclass(slots=True)
class Costs:
    """Microseconds; 0 is not known yet.

    A step takes `of_step`, `of_token` for each token and `of_pair` for each token and each token that it looks at:
    what a token costs grows with the tokens before it, so that a chunk late in a long prompt is the dearer one.
    """

    of_step: float = 0.0
    of_token: float = 0.0
    of_pair: float = 0.0
    of_block: float = 0.0  # to move one between device and host; then swapping is tried first

    def announced(self, of_step: float, of_token: float) -> None:
        """What the decoder has measured at its start."""
        if of_step > 0:
            # No step is for nothing, and no token: what is 0 would stay 0.
            self.of_step, self.of_token = of_step, max(of_token, of_step / 1000)
            self.of_pair = self.of_token * _OF_PAIR

    def predict(self, tokens: int, pairs: int = 0) -> float:
        """How long a step takes."""
        return self.of_step + self.of_token * tokens + self.of_pair * pairs

    def learn(self, tokens: int, pairs: int, took: float) -> None:
        """A step with at least one token took so long.

        Each of the three is corrected by its share of the predicted time (normalized least mean squares over the
        shares). So steps of generated tokens alone, however many, leave what a prompt's token costs as it was, which a
        fit that forgets would lose or draw from noise; attention is corrected where it matters; and whatever does not
        follow the three is followed by them, since the next step is like the last one.
        """
        if not self.of_token:
            self.announced(took / 2, took / 2 / tokens)
            return
        parts = (self.of_step, self.of_token * tokens, self.of_pair * pairs)
        expected = sum(parts)
        error = min(took / expected - 1, _LARGEST_ERROR)
        rate = _RATE * error * expected / sum(part * part for part in parts)
        self.of_step *= 1 + rate * parts[0]
        self.of_token *= 1 + rate * parts[1]
        self.of_pair *= 1 + rate * parts[2]

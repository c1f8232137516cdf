"""How much memory caches may take, and what takes the rest."""

from dataclasses import dataclass, replace

Term = tuple[str, int]  # what it is, and its bytes


@dataclass(frozen=True)
class CacheBudget:
    """`allowed`: what this process may have; `taken`: what of it other things than caches need; `most`: a bound that
    the device sets beside that."""

    allowed: Term
    taken: tuple[Term, ...] = ()
    most: int | None = None

    @property
    def left(self) -> int:
        """Bytes that nothing else needs."""
        return max(0, self.allowed[1] - sum(size for _, size in self.taken))

    @property
    def nbytes(self) -> int:
        """Bytes for caches."""
        return self.left if self.most is None else min(self.left, self.most)

    def less(self, name: str, nbytes: int) -> "CacheBudget":
        """With one thing more that takes memory."""
        return replace(self, taken=(*self.taken, (name, nbytes))) if nbytes else self

    def __str__(self) -> str:
        """Every term, as people read it."""
        less = "".join(f", less {_gib(size)} for {name}" for name, size in self.taken)
        bound = "" if self.most is None else f", at most {_gib(self.most)}"
        return f"{_gib(self.allowed[1])} of {self.allowed[0]}{less}{bound}: {_gib(self.nbytes)}"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"

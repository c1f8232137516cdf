"""Vision encoders in virtual time: a queue, some servers, and a cache of what they made."""

import heapq


class SimulatedEncoders:
    """Each encodes one picture at a time; the cache forgets what was asked for longest ago."""

    def __init__(self, servers: int, cache: int) -> None:
        """`cache` in pictures."""
        self._free_at = [0.0] * servers
        self._ready_at: dict[bytes, float] = {}
        self._cache = cache
        self.encodes = 0
        self.hits = 0

    def encode(self, digest: bytes, seconds: float, now: float) -> float:
        """When the embeddings are there; whoever asks for what is under way gets the same."""
        known = self._ready_at.pop(digest, None)
        if known is not None:
            self.hits += 1
            self._ready_at[digest] = known
            return max(now, known)
        begins = max(now, heapq.heappop(self._free_at))
        heapq.heappush(self._free_at, begins + seconds)
        self.encodes += 1
        self._ready_at[digest] = begins + seconds
        if len(self._ready_at) > self._cache:
            del self._ready_at[next(iter(self._ready_at))]
        return begins + seconds

"""Fair shares of the image workers among tenants, and a budget for files that waste them.

Of the tenants that wait, the one with the fewest files under way comes first. There is one slot more than a single
tenant may hold, so that a worker is left for others whatever one tenant sends.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator

from cachetools import LRUCache

from shared.errors import Overloaded

# More than any ordinary picture or video takes; a usable file that took less costs no budget.
_ORDINARY_S = 2.0
_WINDOW_S = 60.0
_MOST_TENANTS = 10_000


class DecodeBudget:
    """Seconds of processor time for each tenant and minute that go to files which cannot be used, or
    which take long. 0 is no limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        # Seconds spent as of a time; they are restored evenly over a window.
        self._spent: LRUCache[str, tuple[float, float]] = LRUCache(_MOST_TENANTS)

    def check(self, tenant: str) -> None:
        """Raises Overloaded when a tenant has spent its budget."""
        spent = self._now(tenant)
        if not self._seconds or spent < self._seconds:
            return
        wait = int((spent - self._seconds) * _WINDOW_S / self._seconds) + 1
        raise Overloaded(
            "DECODE_BUDGET",
            f"the media of this tenant that could not be used or took long have taken {spent:.0f} s of"
            f" processor time; the limit is {self._seconds:g} s a minute (--media-budget-s)",
            retry_after_s=str(wait),
        )

    def charge(self, tenant: str, seconds: float, used: bool) -> None:
        """Charges the time that decoding a file took; `used`: it gave pixel values."""
        if not self._seconds or (used and seconds <= _ORDINARY_S):
            return
        self._spent[tenant] = (self._now(tenant) + seconds, time.monotonic())

    def _now(self, tenant: str) -> float:
        spent, since = self._spent.get(tenant, (0.0, 0.0))
        return max(0.0, spent - (time.monotonic() - since) * self._seconds / _WINDOW_S)


class DecodeSlots:
    """`each` slots for a tenant, and one more for all of them together."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._busy: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def num_busy(self) -> int:
        """Slots that are held."""
        return self._busy.total()

    @property
    def num_waiting(self) -> int:
        """Those that wait for one."""
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Waits for a slot and holds it."""
        if self._waiting or not self._has_slot(tenant):
            slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(slot)
            self._hand_out()
            try:
                await slot
            except asyncio.CancelledError:
                self._forget(tenant, slot)
                raise
        else:
            self._busy[tenant] += 1
        try:
            yield
        finally:
            self._leave(tenant)

    def _has_slot(self, tenant: str) -> bool:
        return self._busy[tenant] < self._each and self._busy.total() <= self._each

    def _hand_out(self) -> None:
        while True:
            able = [tenant for tenant in self._waiting if self._has_slot(tenant)]
            if not able:
                return
            # Of equal ones the one that waits longest.
            tenant = min(able, key=self._busy.__getitem__)
            slot = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not slot.done():
                self._busy[tenant] += 1
                slot.set_result(None)

    def _forget(self, tenant: str, slot: "asyncio.Future[None]") -> None:
        if slot.done() and not slot.cancelled():
            self._leave(tenant)  # the slot was granted in the same moment
        elif tenant in self._waiting:
            with contextlib.suppress(ValueError):
                self._waiting[tenant].remove(slot)
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    def _leave(self, tenant: str) -> None:
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]
        self._hand_out()

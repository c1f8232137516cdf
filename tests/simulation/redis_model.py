"""What Redis keeps, in plain dicts, and the commands that the scripts and the rooms use.

Strings are `str` of latin-1, a character for each byte, as Lua has them. Times are microseconds of whatever clock
`now_us` reads. Every change is noted, so that the last of them can be taken back: that is what a lost tail of the
append-only file is.
"""

from collections import deque
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from tests.simulation.lua import number_text

KEPT_US = 5_000_000  # how far back changes can be undone


class Hash(dict[str, str]):
    """Field -> value."""


class ZSet(dict[str, float]):
    """Member -> score."""

    def ranked(self) -> list[tuple[str, float]]:
        """By score, and by bytes among equals."""
        return sorted(self.items(), key=lambda item: (item[1], item[0]))


class Set(dict[str, None]):
    """Members."""


Value = Hash | ZSet | Set | str
Reply = Any  # int, str, None, list of them; or Status


class Status(str):
    """A reply like OK."""


class RedisError(Exception):
    """An error reply."""


class RedisModel:
    """The database. `call` is `redis.call`; `published` hears what is published."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self.now_us = now_us
        self.data: dict[str, Value] = {}
        self.expires: dict[str, int] = {}  # key -> ms
        self.run_id = "0" * 40
        self.published: Callable[[str, str], None] = lambda channel, message: None
        self.touched: dict[str, None] = {}  # keys changed since somebody looked
        self._undo: deque[tuple[int, str, Value | None, int | None]] = deque()

    def call(self, command: str, *arguments: str | int | float) -> Reply:
        """One command, atomically."""
        words = [number_text(a) if not isinstance(a, str) else a for a in arguments]
        method = getattr(self, f"_{command.lower()}", None)
        if method is None:
            raise RedisError(f"ERR unknown command '{command}'")
        return method(*words)

    def roll_back(self, to_us: int) -> int:
        """Undoes what was changed after a moment. Returns how many changes that were."""
        count = 0
        while self._undo and self._undo[-1][0] > to_us:
            _, key, value, expires = self._undo.pop()
            self.data.pop(key, None)
            self.expires.pop(key, None)
            if value is not None:
                self.data[key] = value
            if expires is not None:
                self.expires[key] = expires
            self.touched[key] = None
            count += 1
        return count

    def dump(self) -> dict[str, Any]:
        """All that is there, in a form that can be compared."""
        for key in list(self.data):
            self._find(key, None)
        return {
            key: sorted(value) if isinstance(value, Set) else value
            for key, value in sorted(self.data.items())
        }

    # Keys

    def _now_ms(self) -> int:
        return self.now_us() // 1000

    def _find(self, key: str, kind: type | None) -> Any:
        expires = self.expires.get(key)
        if expires is not None and self._now_ms() >= expires:
            self._note(key)
            del self.data[key], self.expires[key]
        value = self.data.get(key)
        if value is not None and kind is not None and not isinstance(value, kind):
            raise RedisError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def _note(self, key: str) -> None:
        value = self.data.get(key)
        now = self.now_us()
        kept = value if value is None or isinstance(value, str) else type(value)(value)
        self._undo.append((now, key, kept, self.expires.get(key)))
        self.touched[key] = None
        while self._undo[0][0] < now - KEPT_US:
            self._undo.popleft()

    def _change(self, key: str, kind: type) -> Any:
        """The container to change, made if need be."""
        value = self._find(key, kind)
        self._note(key)
        if value is None:
            value = self.data[key] = kind()
        return value

    def _tidy(self, key: str) -> None:
        if not self.data[key]:
            del self.data[key]
            self.expires.pop(key, None)

    def _exists(self, *keys: str) -> int:
        return sum(self._find(key, None) is not None for key in keys)

    def _del(self, *keys: str) -> int:
        count = 0
        for key in keys:
            if self._find(key, None) is not None:
                self._note(key)
                del self.data[key]
                self.expires.pop(key, None)
                count += 1
        return count

    def _keys(self, pattern: str) -> list[str]:
        return [key for key in list(self.data) if fnmatchcase(key, pattern) and self._exists(key)]

    def _type(self, key: str) -> Status:
        names = {Hash: "hash", ZSet: "zset", Set: "set", str: "string"}
        return Status(names.get(type(self._find(key, None)), "none"))

    def _expire(self, key: str, seconds: str) -> int:
        return self._pexpire(key, str(int(seconds) * 1000))

    def _pexpire(self, key: str, ms: str) -> int:
        if self._find(key, None) is None:
            return 0
        self._note(key)
        self.expires[key] = self._now_ms() + int(ms)
        return 1

    def _persist(self, key: str) -> int:
        if self._find(key, None) is None or key not in self.expires:
            return 0
        self._note(key)
        del self.expires[key]
        return 1

    def _pttl(self, key: str) -> int:
        if self._find(key, None) is None:
            return -2
        return self.expires[key] - self._now_ms() if key in self.expires else -1

    def _ttl(self, key: str) -> int:
        left = self._pttl(key)
        return left if left < 0 else (left + 500) // 1000

    def _flushall(self) -> Status:
        for key in list(self.data):
            self._del(key)
        return Status("OK")

    def _flushdb(self) -> Status:
        return self._flushall()

    # Strings

    def _get(self, key: str) -> str | None:
        found: str | None = self._find(key, str)
        return found

    def _set(self, key: str, value: str, *options: str) -> Status | None:
        words = [option.upper() for option in options]
        there = self._find(key, None) is not None
        if ("NX" in words and there) or ("XX" in words and not there):
            return None
        self._note(key)
        self.data[key] = value
        if "KEEPTTL" not in words:
            self.expires.pop(key, None)
        for word, scale in (("PX", 1), ("EX", 1000)):
            if word in words:
                self.expires[key] = self._now_ms() + scale * int(options[words.index(word) + 1])
        return Status("OK")

    def _append(self, key: str, more: str) -> int:
        value = (self._find(key, str) or "") + more
        self._note(key)
        self.data[key] = value
        return len(value)

    def _strlen(self, key: str) -> int:
        return len(self._find(key, str) or "")

    def _getrange(self, key: str, start: str, end: str) -> str:
        value: str = self._find(key, str) or ""
        first, last = _bounds(int(start), int(end), len(value))
        return value[first : last + 1]

    def _incrby(self, key: str, by: str) -> int:
        value = int(self._find(key, str) or "0") + int(by)
        self._note(key)
        self.data[key] = str(value)
        return value

    def _decrby(self, key: str, by: str) -> int:
        return self._incrby(key, str(-int(by)))

    # Hashes

    def _hset(self, key: str, *pairs: str) -> int:
        found: Hash = self._change(key, Hash)
        before = len(found)
        found.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(found) - before

    def _hsetnx(self, key: str, field: str, value: str) -> int:
        if field in (self._find(key, Hash) or ()):
            return 0
        self._change(key, Hash)[field] = value
        return 1

    def _hget(self, key: str, field: str) -> str | None:
        return (self._find(key, Hash) or Hash()).get(field)

    def _hmget(self, key: str, *fields: str) -> list[str | None]:
        found = self._find(key, Hash) or Hash()
        return [found.get(field) for field in fields]

    def _hgetall(self, key: str) -> list[str]:
        return [word for pair in (self._find(key, Hash) or Hash()).items() for word in pair]

    def _hkeys(self, key: str) -> list[str]:
        return list(self._find(key, Hash) or ())

    def _hvals(self, key: str) -> list[str]:
        return list((self._find(key, Hash) or Hash()).values())

    def _hlen(self, key: str) -> int:
        return len(self._find(key, Hash) or ())

    def _hexists(self, key: str, field: str) -> int:
        return int(field in (self._find(key, Hash) or ()))

    def _hdel(self, key: str, *fields: str) -> int:
        if self._find(key, Hash) is None:
            return 0
        found: Hash = self._change(key, Hash)
        count = sum(found.pop(field, None) is not None for field in fields)
        self._tidy(key)
        return count

    def _hincrby(self, key: str, field: str, by: str) -> int:
        found: Hash = self._change(key, Hash)
        value = int(found.get(field, "0")) + int(by)
        found[field] = str(value)
        return value

    # Sets

    def _sadd(self, key: str, *members: str) -> int:
        found: Set = self._change(key, Set)
        before = len(found)
        found.update(dict.fromkeys(members))
        return len(found) - before

    def _srem(self, key: str, *members: str) -> int:
        if self._find(key, Set) is None:
            return 0
        found: Set = self._change(key, Set)
        before = len(found)
        for member in members:
            found.pop(member, None)
        count = before - len(found)
        self._tidy(key)
        return count

    def _smembers(self, key: str) -> list[str]:
        return list(self._find(key, Set) or ())

    def _sismember(self, key: str, member: str) -> int:
        return int(member in (self._find(key, Set) or ()))

    def _scard(self, key: str) -> int:
        return len(self._find(key, Set) or ())

    # Sorted sets

    def _zadd(self, key: str, *words: str) -> int | str | None:
        options = []
        while words[0].upper() in ("XX", "NX", "GT", "INCR"):
            options.append(words[0].upper())
            words = words[1:]
        there = self._find(key, ZSet)
        if "INCR" in options:
            if "XX" in options and (there is None or words[1] not in there):
                return None
            return self._zincrby(key, *words)
        pairs = [(m, float(s)) for s, m in zip(words[::2], words[1::2], strict=True)]
        if "XX" in options:
            pairs = [(m, s) for m, s in pairs if there is not None and m in there]
            if not pairs:
                return 0
        if "NX" in options and there is not None:
            pairs = [(m, s) for m, s in pairs if m not in there]
        found: ZSet = self._change(key, ZSet)
        before = len(found)
        for member, score in pairs:
            if "GT" not in options or score > found.get(member, float("-inf")):
                found[member] = score
        return len(found) - before

    def _zincrby(self, key: str, by: str, member: str) -> str:
        found: ZSet = self._change(key, ZSet)
        found[member] = found.get(member, 0.0) + float(by)
        return number_text(found[member])

    def _zrem(self, key: str, *members: str) -> int:
        if self._find(key, ZSet) is None:
            return 0
        found: ZSet = self._change(key, ZSet)
        before = len(found)
        for member in members:
            found.pop(member, None)
        count = before - len(found)
        self._tidy(key)
        return count

    def _zscore(self, key: str, member: str) -> str | None:
        score = (self._find(key, ZSet) or ZSet()).get(member)
        return None if score is None else number_text(score)

    def _zremrangebyscore(self, key: str, low: str, high: str) -> int:
        found = self._zrangebyscore(key, low, high)
        return self._zrem(key, *found) if found else 0

    def _zcard(self, key: str) -> int:
        return len(self._find(key, ZSet) or ())

    def _zrange(self, key: str, start: str, end: str, *options: str) -> list[str]:
        ranked = (self._find(key, ZSet) or ZSet()).ranked()
        first, last = _bounds(int(start), int(end), len(ranked))
        return _members(ranked[first : last + 1], options)

    def _zrangebyscore(self, key: str, low: str, high: str, *options: str) -> list[str]:
        ranked = (self._find(key, ZSet) or ZSet()).ranked()
        found = [(m, s) for m, s in ranked if _above(s, low) and _above(-s, _negated(high))]
        words = [option.upper() for option in options]
        if "LIMIT" in words:
            at = words.index("LIMIT")
            first, count = int(options[at + 1]), int(options[at + 2])
            found = found[first : first + count if count >= 0 else None]
        return _members(found, options)

    def _zcount(self, key: str, low: str, high: str) -> int:
        return len(self._zrangebyscore(key, low, high))

    # The server

    def _publish(self, channel: str, message: str) -> int:
        self.published(channel, message)
        return 0

    def _time(self) -> list[str]:
        now = self.now_us()
        return [str(now // 1_000_000), str(now % 1_000_000)]

    def _info(self, *sections: str) -> str:
        return f"# Server\r\nredis_version:7.2.4\r\nrun_id:{self.run_id}\r\n"

    def _multi(self) -> Status:
        """What is sent together is carried out together here, so that each command may be at once."""
        return Status("OK")

    def _exec(self) -> list[Reply]:
        return []

    def _ping(self) -> Status:
        return Status("PONG")


def _bounds(start: int, end: int, length: int) -> tuple[int, int]:
    first = max(0, start + length if start < 0 else start)
    return first, end + length if end < 0 else end


def _members(found: list[tuple[str, float]], options: tuple[str, ...]) -> list[str]:
    if "WITHSCORES" in [option.upper() for option in options]:
        return [word for member, score in found for word in (member, number_text(score))]
    return [member for member, _ in found]


def _above(score: float, bound: str) -> bool:
    return score > float(bound[1:]) if bound.startswith("(") else score >= float(bound)


def _negated(bound: str) -> str:
    if bound.startswith("("):
        return f"({-float(bound[1:])}"
    return str(-float(bound))

"""A model of Redis: what the server keeps, in plain dicts, and the commands that the scripts and the services use.

Keys, fields and values are `bytes`. Times are microseconds of whatever clock `now_us` reads. Every change is recorded,
so that the last of them can be undone: that is what a lost tail of the append-only file is.
"""

import math
from collections import deque
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

KEPT_US = 5_000_000  # how far back changes can be undone


class Hash(dict[bytes, bytes]):
    """Field -> value."""


class ZSet(dict[bytes, float]):
    """Member -> score."""

    def ranked(self) -> list[tuple[bytes, float]]:
        """By score, and by bytes among equals."""
        return sorted(self.items(), key=lambda item: (item[1], item[0]))


class Set(dict[bytes, None]):
    """Members."""


Value = Hash | ZSet | Set | bytes
Reply = Any  # int, bytes, None, a list of them, or Status


class Status(bytes):
    """A reply like OK."""


class RedisError(Exception):
    """An error reply."""


class RedisModel:
    """The database. `call` executes a command; `published` is called with what is published."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self.now_us = now_us
        self.data: dict[bytes, Value] = {}
        self.expires: dict[bytes, int] = {}  # key -> ms
        self.run_id = "0" * 40
        self.published: Callable[[bytes, bytes], None] = lambda channel, message: None
        self.touched: dict[bytes, None] = {}  # keys changed since the invariants were checked last
        self._undo: deque[tuple[int, bytes, Value | None, int | None]] = deque()
        self._commands: dict[bytes, Callable[..., Reply]] = {}

    def call(self, command: bytes, *arguments: bytes) -> Reply:
        """Executes one command atomically. Raises RedisError."""
        return self.command(command)(*arguments)

    def command(self, name: bytes) -> Callable[..., Reply]:
        """What executes a command. Raises RedisError."""
        method = self._commands.get(name)
        if method is None:
            method = getattr(self, f"_{name.decode().lower()}", None)
            if method is None:
                raise RedisError(f"ERR unknown command '{name.decode()}'")
            self._commands[name] = method
        return method

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

    def dump(self) -> dict[bytes, Any]:
        """All keys and values, in a form that can be compared."""
        for key in list(self.data):
            self._find(key, None)
        return {
            key: sorted(value) if isinstance(value, Set) else value
            for key, value in sorted(self.data.items())
        }

    # Keys

    def _now_ms(self) -> int:
        return self.now_us() // 1000

    def _find(self, key: bytes, kind: type | None) -> Any:
        expires = self.expires.get(key)
        if expires is not None and self._now_ms() >= expires:
            self._note(key)
            del self.data[key], self.expires[key]
        value = self.data.get(key)
        if value is not None and kind is not None and not isinstance(value, kind):
            raise RedisError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def _note(self, key: bytes) -> None:
        """Records what a key holds before it is changed."""
        value = self.data.get(key)
        now = self.now_us()
        kept = value if value is None or isinstance(value, bytes) else type(value)(value)  # type: ignore[arg-type]
        self._undo.append((now, key, kept, self.expires.get(key)))
        self.touched[key] = None
        while self._undo[0][0] < now - KEPT_US:
            self._undo.popleft()

    def _change(self, key: bytes, kind: type) -> Any:
        """The container to change, made if need be."""
        value = self._find(key, kind)
        self._note(key)
        if value is None:
            value = self.data[key] = kind()
        return value

    def _remove(self, key: bytes, kind: type, names: tuple[bytes, ...]) -> int:
        """Removes names from a container, and the container with the last of them. Returns how many there were."""
        if self._find(key, kind) is None:
            return 0
        found = self._change(key, kind)
        before = len(found)
        for name in names:
            found.pop(name, None)
        count = before - len(found)
        if not found:
            del self.data[key]
            self.expires.pop(key, None)
        return count

    def _exists(self, *keys: bytes) -> int:
        return sum(self._find(key, None) is not None for key in keys)

    def _del(self, *keys: bytes) -> int:
        count = 0
        for key in keys:
            if self._find(key, None) is not None:
                self._note(key)
                del self.data[key]
                self.expires.pop(key, None)
                count += 1
        return count

    def _keys(self, pattern: bytes) -> list[bytes]:
        return [key for key in list(self.data) if fnmatchcase(key, pattern) and self._exists(key)]

    def _expire(self, key: bytes, seconds: bytes) -> int:
        return self._expire_after(key, int(seconds) * 1000)

    def _pexpire(self, key: bytes, ms: bytes) -> int:
        return self._expire_after(key, int(ms))

    def _expire_after(self, key: bytes, ms: int) -> int:
        if self._find(key, None) is None:
            return 0
        self._note(key)
        self.expires[key] = self._now_ms() + ms
        return 1

    def _persist(self, key: bytes) -> int:
        if self._find(key, None) is None or key not in self.expires:
            return 0
        self._note(key)
        del self.expires[key]
        return 1

    # Strings

    def _get(self, key: bytes) -> bytes | None:
        found: bytes | None = self._find(key, bytes)
        return found

    def _set(self, key: bytes, value: bytes, *options: bytes) -> Status | None:
        there = self._find(key, None) is not None
        if (b"NX" in options and there) or (b"XX" in options and not there):
            return None
        self._note(key)
        self.data[key] = value
        if b"KEEPTTL" not in options:
            self.expires.pop(key, None)
        for word, scale in ((b"PX", 1), (b"EX", 1000)):
            if word in options:
                self.expires[key] = self._now_ms() + scale * int(options[options.index(word) + 1])
        return Status(b"OK")

    def _append(self, key: bytes, more: bytes) -> int:
        value = (self._find(key, bytes) or b"") + more
        self._note(key)
        self.data[key] = value
        return len(value)

    def _strlen(self, key: bytes) -> int:
        return len(self._find(key, bytes) or b"")

    def _getrange(self, key: bytes, start: bytes, end: bytes) -> bytes:
        value: bytes = self._find(key, bytes) or b""
        first, last = _bounds(int(start), int(end), len(value))
        return value[first : last + 1]

    def _incrby(self, key: bytes, by: bytes) -> int:
        value = int(self._find(key, bytes) or b"0") + int(by)
        self._note(key)
        self.data[key] = b"%d" % value
        return value

    def _decrby(self, key: bytes, by: bytes) -> int:
        return self._incrby(key, b"%d" % -int(by))

    # Hashes

    def _hset(self, key: bytes, *pairs: bytes) -> int:
        found: Hash = self._change(key, Hash)
        before = len(found)
        found.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(found) - before

    def _hsetnx(self, key: bytes, field: bytes, value: bytes) -> int:
        if field in (self._find(key, Hash) or ()):
            return 0
        self._change(key, Hash)[field] = value
        return 1

    def _hget(self, key: bytes, field: bytes) -> bytes | None:
        return (self._find(key, Hash) or Hash()).get(field)

    def _hmget(self, key: bytes, *fields: bytes) -> list[bytes | None]:
        found = self._find(key, Hash) or Hash()
        return [found.get(field) for field in fields]

    def _hgetall(self, key: bytes) -> list[bytes]:
        return [word for pair in (self._find(key, Hash) or Hash()).items() for word in pair]

    def _hkeys(self, key: bytes) -> list[bytes]:
        return list(self._find(key, Hash) or ())

    def _hvals(self, key: bytes) -> list[bytes]:
        return list((self._find(key, Hash) or Hash()).values())

    def _hlen(self, key: bytes) -> int:
        return len(self._find(key, Hash) or ())

    def _hexists(self, key: bytes, field: bytes) -> int:
        return int(field in (self._find(key, Hash) or ()))

    def _hdel(self, key: bytes, *fields: bytes) -> int:
        return self._remove(key, Hash, fields)

    def _hincrby(self, key: bytes, field: bytes, by: bytes) -> int:
        found: Hash = self._change(key, Hash)
        value = int(found.get(field, b"0")) + int(by)
        found[field] = b"%d" % value
        return value

    # Sets

    def _sadd(self, key: bytes, *members: bytes) -> int:
        found: Set = self._change(key, Set)
        before = len(found)
        found.update(dict.fromkeys(members))
        return len(found) - before

    def _srem(self, key: bytes, *members: bytes) -> int:
        return self._remove(key, Set, members)

    def _smembers(self, key: bytes) -> list[bytes]:
        return list(self._find(key, Set) or ())

    def _scard(self, key: bytes) -> int:
        return len(self._find(key, Set) or ())

    def _sismember(self, key: bytes, member: bytes) -> int:
        return int(member in self._smembers(key))

    # Sorted sets

    def _zcard(self, key: bytes) -> int:
        return len(self._find(key, ZSet) or ())

    def _zadd(self, key: bytes, *words: bytes) -> int | bytes | None:
        options = []
        while words[0] in (b"XX", b"NX", b"INCR"):
            options.append(words[0])
            words = words[1:]
        there = self._find(key, ZSet)
        if b"INCR" in options:
            if b"XX" in options and (there is None or words[1] not in there):
                return None
            return self._zincrby(key, *words)
        pairs = [(m, float(s)) for s, m in zip(words[::2], words[1::2], strict=True)]
        if b"XX" in options:
            pairs = [(m, s) for m, s in pairs if there is not None and m in there]
            if not pairs:
                return 0
        if b"NX" in options and there is not None:
            pairs = [(m, s) for m, s in pairs if m not in there]
        found: ZSet = self._change(key, ZSet)
        before = len(found)
        found.update(pairs)
        return len(found) - before

    def _zincrby(self, key: bytes, by: bytes, member: bytes) -> bytes:
        found: ZSet = self._change(key, ZSet)
        found[member] = found.get(member, 0.0) + float(by)
        return _score_text(found[member])

    def _zrem(self, key: bytes, *members: bytes) -> int:
        return self._remove(key, ZSet, members)

    def _zscore(self, key: bytes, member: bytes) -> bytes | None:
        score = (self._find(key, ZSet) or ZSet()).get(member)
        return None if score is None else _score_text(score)

    def _zremrangebyscore(self, key: bytes, low: bytes, high: bytes) -> int:
        found = self._zrangebyscore(key, low, high)
        return self._zrem(key, *found) if found else 0

    def _zcount(self, key: bytes, low: bytes, high: bytes) -> int:
        return len(self._zrangebyscore(key, low, high))

    def _zrange(self, key: bytes, start: bytes, end: bytes, *options: bytes) -> list[bytes]:
        ranked = (self._find(key, ZSet) or ZSet()).ranked()
        first, last = _bounds(int(start), int(end), len(ranked))
        return _members(ranked[first : last + 1], options)

    def _zrangebyscore(self, key: bytes, low: bytes, high: bytes, *options: bytes) -> list[bytes]:
        lowest, highest = float(low.removeprefix(b"(")), float(high)
        there = self._find(key, ZSet) or ZSet()
        found = ZSet((m, s) for m, s in there.items() if lowest <= s <= highest).ranked()
        if low.startswith(b"("):
            found = [(m, s) for m, s in found if s > lowest]
        if b"LIMIT" in options:
            at = options.index(b"LIMIT")
            first, count = int(options[at + 1]), int(options[at + 2])
            found = found[first : first + count if count >= 0 else None]
        return _members(found, options)

    # The server

    def _publish(self, channel: bytes, message: bytes) -> int:
        self.published(channel, message)
        return 0

    def _time(self) -> list[bytes]:
        now = self.now_us()
        return [b"%d" % (now // 1_000_000), b"%d" % (now % 1_000_000)]

    def _info(self, *sections: bytes) -> bytes:
        return f"# Server\r\nredis_version:7.2.4\r\nrun_id:{self.run_id}\r\n".encode()

    def _multi(self) -> Status:
        """What is sent together is executed together here, so that each command may be at once."""
        return Status(b"OK")

    def _exec(self) -> list[Reply]:
        return []

    def _ping(self) -> Status:
        return Status(b"PONG")


def _bounds(start: int, end: int, length: int) -> tuple[int, int]:
    first = max(0, start + length if start < 0 else start)
    return first, end + length if end < 0 else end


def _members(found: list[tuple[bytes, float]], options: tuple[bytes, ...]) -> list[bytes]:
    if b"WITHSCORES" in options:
        return [word for member, score in found for word in (member, _score_text(score))]
    return [member for member, _ in found]


def _score_text(score: float) -> bytes:
    """A score as Redis answers it: whole ones without a point, others as short as they can be read back."""
    if math.isinf(score):
        return b"inf" if score > 0 else b"-inf"
    return (str(int(score)) if score.is_integer() and abs(score) < 1e17 else repr(score)).encode()

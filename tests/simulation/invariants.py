"""What must hold after every command that Redis has executed, and at the end."""

from typing import TYPE_CHECKING

from shared.queue.keys import Keys
from tessera.scheduler.v1.scheduler_pb2 import GetLoadResponse
from tests.simulation.processes.services import MODEL_NAME
from tests.simulation.redis.model import Hash, Reply

if TYPE_CHECKING:
    from tests.simulation.world import World


class Watch:
    """Sees each command of Redis. Remembers logs and endings as they were."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._redis = world.redis
        self._prefix = Keys(MODEL_NAME).prefix.encode()
        self._logs: dict[bytes, bytes] = {}
        self._endings: dict[tuple[bytes, bytes], bytes] = {}
        world.redis.after = self._look

    def rolled_back(self) -> None:
        """Redis has lost its tail: each log may have become a beginning of what it was."""
        for key, before in list(self._logs.items()):
            now = self._text(key)
            if not before.startswith(now):
                self._world.broken(f"{key!r} is no beginning of what it was before the loss")
            self._logs[key] = now
        self._endings = {
            at: ending for at, ending in self._endings.items() if self._field(*at) == ending
        }
        self._redis.model.touched.clear()

    def _look(self, name: str, words: list[bytes], reply: Reply) -> None:
        if name not in _QUIET:
            self._world.trace(f"redis: {name} {_short(words)} -> {_short(reply)}")
        if name in ("take", "fence") and self._is_held() and _gave_something(name, reply):
            self._world.broken(f"{name} gives something away while Redis recovers")
        touched, self._redis.model.touched = self._redis.model.touched, {}
        for key in touched:
            if key.startswith(self._prefix + b":l:"):
                self._look_at_log(key)
            elif key.startswith(self._prefix + b":r:"):
                self._look_at_request(key)

    def _is_held(self) -> bool:
        return self._prefix + b":recovery" in self._redis.model.data

    def _look_at_log(self, key: bytes) -> None:
        before, now = self._logs.get(key, b""), self._text(key)
        if not now.startswith(before):
            self._world.broken(f"{key!r} has changed what it said")
        self._logs[key] = now

    def _look_at_request(self, key: bytes) -> None:
        found = self._redis.model.data.get(key)
        if found is None:
            return
        assert isinstance(found, Hash)
        rid = key.rsplit(b":", 1)[1]
        for field, value in found.items():
            if not (field.startswith(b"e") and field[1:].isdigit()):
                continue
            if self._endings.setdefault((key, field), value) != value:
                self._world.broken(f"{rid!r}: choice {field[1:]!r} has a second ending")
        state, owner = found.get(b"state"), found.get(b"owner", b"")
        if (state == b"running") != bool(owner):
            self._world.broken(f"{rid!r} is {state!r} and its owner is {owner!r}")
        open_ = int(found.get(b"open", b"0"))
        if (state == b"ended") != (open_ <= 0):
            self._world.broken(f"{rid!r} is {state!r} with {open_} open choices")
        whose = [found.get(b"prio", b""), found.get(b"tenant", b"")]
        waiting = [b":".join([self._prefix, which, *whose]) for which in (b"w", b"late")]
        waits = sum(rid in self._redis.model.data.get(key, ()) for key in waiting)
        if waits != (state == b"queued"):
            self._world.broken(f"{rid!r} is {state!r} and waits at {waits} places")

    def _text(self, key: bytes) -> bytes:
        value = self._redis.model.data.get(key, b"")
        assert isinstance(value, bytes)
        return value

    def _field(self, key: bytes, field: bytes) -> bytes | None:
        found = self._redis.model.data.get(key)
        return found.get(field) if isinstance(found, Hash) else None


def _gave_something(name: str, reply: Reply) -> bool:
    return len(reply) > 1 if name == "take" else reply >= 0


_QUIET = {"members", "announce", "HLEN", "HGET", "HVALS", "HMGET", "GETRANGE", "sweep", "abandoned"}
_QUIET |= {"leases", "renew"}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 160 else text[:160] + "..."


def leftovers(world: "World") -> list[str]:
    """What has not been cleaned up, in words. Empty when all is quiet."""
    prefix = Keys(MODEL_NAME).prefix.encode()
    found = []
    waiting = (b":w:", b":late:", b":tenants:", b":goal", b":turns", b":wanted", b":due")
    for key, value in world.redis.model.data.items():
        part = key.removeprefix(prefix)
        if part.startswith((*waiting, b":own:", b":resv", b":live", b":begun")):
            found.append(f"{key!r}: {value!r}")
        elif part.startswith(b":r:") and isinstance(value, Hash) and value[b"state"] != b"ended":
            found.append(f"{key!r} is {value[b'state']!r}")
    tokens = world.redis.model.data.get(prefix + b":meta")
    if isinstance(tokens, Hash) and int(tokens.get(b"live_tokens", b"0")):
        found.append(f"{tokens[b'live_tokens']!r} tokens count as live")
    loads = world.redis.model.data.get(prefix + b":load")
    for sid, load in loads.items() if isinstance(loads, Hash) else ():
        for decoder in GetLoadResponse.FromString(load).decoders:
            if decoder.running or decoder.waiting or decoder.blocks_used:
                found.append(f"scheduler {sid!r} still has {decoder.running} running")
    return found

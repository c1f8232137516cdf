"""What must hold after every command that Redis has executed, and at the end."""

from typing import TYPE_CHECKING

from shared.queue.keys import Keys
from tessera.scheduler.v1.scheduler_pb2 import GetLoadResponse
from tests.simulation.redis_model import Hash, Reply
from tests.simulation.rooms import MODEL_NAME

if TYPE_CHECKING:
    from tests.simulation.world import World


class Watch:
    """Sees each command of Redis. Remembers logs and endings as they were."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._redis = world.redis
        self._prefix = Keys(MODEL_NAME).prefix
        self._logs: dict[str, str] = {}
        self._endings: dict[tuple[str, str], str] = {}
        world.redis.after = self._look

    def rolled_back(self) -> None:
        """Redis has lost its tail: each log may have become a beginning of what it was."""
        for key, before in list(self._logs.items()):
            now = self._text(key)
            if not before.startswith(now):
                self._world.broken(f"{key} is no beginning of what it was before the loss")
            self._logs[key] = now
        self._endings = {
            at: ending for at, ending in self._endings.items() if self._field(*at) == ending
        }
        self._redis.model.touched.clear()

    def _look(self, name: str, words: list[str], reply: Reply) -> None:
        if name not in _QUIET:
            self._world.trace(f"redis: {name} {_short(words)} -> {_short(reply)}")
        if name in ("take", "fence") and self._is_held() and _gave_something(name, reply):
            self._world.broken(f"{name} gives something away while Redis recovers")
        touched, self._redis.model.touched = self._redis.model.touched, {}
        for key in touched:
            if key.startswith(f"{self._prefix}:l:"):
                self._look_at_log(key)
            elif key.startswith(f"{self._prefix}:r:"):
                self._look_at_request(key)

    def _is_held(self) -> bool:
        return f"{self._prefix}:recovery" in self._redis.model.data

    def _look_at_log(self, key: str) -> None:
        before, now = self._logs.get(key, ""), self._text(key)
        if not now.startswith(before):
            self._world.broken(f"{key} has changed what it said")
        self._logs[key] = now

    def _look_at_request(self, key: str) -> None:
        found = self._redis.model.data.get(key)
        if found is None:
            return
        assert isinstance(found, Hash)
        rid = key.rsplit(":", 1)[1]
        for field, value in found.items():
            if not (field[0] == "e" and field[1:].isdigit()):
                continue
            if self._endings.setdefault((key, field), value) != value:
                self._world.broken(f"{rid}: choice {field[1:]} has a second ending")
        state, owner = found.get("state"), found.get("owner", "")
        if (state == "running") != bool(owner):
            self._world.broken(f"{rid} is {state} and its owner is '{owner}'")
        open_ = int(found.get("open", "0"))
        if (state == "ended") != (open_ <= 0):
            self._world.broken(f"{rid} is {state} with {open_} open choices")
        waiting = f"{self._prefix}:w:{found.get('prio')}:{found.get('tenant')}"
        waits = rid in self._redis.model.data.get(waiting, ())
        if waits != (state == "queued"):
            self._world.broken(f"{rid} is {state} and waits: {waits}")

    def _text(self, key: str) -> str:
        value = self._redis.model.data.get(key, "")
        assert isinstance(value, str)
        return value

    def _field(self, key: str, field: str) -> str | None:
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
    prefix = Keys(MODEL_NAME).prefix
    found = []
    for key, value in world.redis.model.data.items():
        part = key.removeprefix(prefix)
        if part.startswith((":own:", ":w:", ":tenants:", ":resv", ":live", ":due")):
            found.append(f"{key}: {value}")
        elif part.startswith(":r:") and isinstance(value, Hash) and value["state"] != "ended":
            found.append(f"{key} is {value['state']}")
    tokens = world.redis.model.data.get(f"{prefix}:meta", {})
    if isinstance(tokens, Hash) and int(tokens.get("live_tokens", "0")):
        found.append(f"{tokens['live_tokens']} tokens count as live")
    for sid, load in world.redis.model.data.get(f"{prefix}:load", {}).items():
        for decoder in GetLoadResponse.FromString(load.encode("latin-1")).decoders:
            if decoder.running or decoder.waiting or decoder.blocks_used:
                found.append(f"scheduler {sid} still has {decoder.running} running")
    return found

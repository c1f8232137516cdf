"""The twin of prelude.lua, which stands before every script, and of waiting.lua, which stands before some."""

import math
from dataclasses import dataclass

from tests.simulation.lua import byte, char, number_text, sub, tonumber
from tests.simulation.redis_model import RedisModel, Reply

Number = int | float


@dataclass
class Closing:
    """How waiting requests end."""

    keep_s: str
    grace_ms: Number
    cancelled: str
    queue: str
    first_token: str
    total: str


@dataclass
class Request:
    """The words of a request, as `admit` and `restore` get them."""

    rid: str
    spec: str
    head: str
    prio: str
    tenant: str
    cost: str
    n: str
    prompt_tokens: str
    stride: str
    media_cost: str
    timeout_ms: str
    queue_timeout_ms: str
    first_token_timeout_ms: str
    idem: str
    fingerprint: str
    follow_ms: str


def num(value: str | Number | None) -> Number:
    """What Lua's arithmetic makes of a string."""
    number = tonumber(value)
    assert number is not None, value
    return number


def integer(n: Number) -> str:
    """The prelude's `int`."""
    return f"{n:.0f}"


class Prelude:
    """ARGV counts from one."""

    def __init__(self, model: RedisModel, keys: list[str], arguments: list[str]) -> None:
        self.P = keys[0]
        self.ARGV = ["", *arguments]
        self.call = model.call
        self._model = model

    @property
    def argc(self) -> int:
        """#ARGV."""
        return len(self.ARGV) - 1

    def now_us(self) -> int:
        t = self.call("TIME")
        return int(t[0]) * 1000000 + int(t[1])

    def now_ms(self) -> int:
        """math.floor(now_us() / 1000), as every script has it."""
        return self.now_us() // 1000

    def request(self, rid: str) -> str:
        return f"{self.P}:r:{rid}"

    def log_of(self, rid: str, c: int | str) -> str:
        return f"{self.P}:l:{rid}:{c}"

    def varint(self, n: int) -> str:
        out = ""
        while n >= 128:
            out = out + char(n % 128 + 128)
            n = n // 128
        return out + char(n)

    def varint_at(self, data: str, at: int) -> tuple[int, int]:
        value, scale = 0, 1
        while True:
            found = byte(data, at)
            at = at + 1
            if found < 128:
                return value + found * scale, at
            value = value + (found - 128) * scale
            scale = scale * 128

    def ending_event(self, rid: str, choice: int, ending: str) -> str:
        event = "\x0a" + self.varint(len(rid)) + rid
        if choice > 0:
            event = event + "\x10" + self.varint(choice)
        event = event + "\x2a" + self.varint(len(ending)) + ending
        return "\x0a" + self.varint(len(event)) + event

    def closing(self) -> Closing:
        a = self.ARGV
        return Closing(a[1], num(a[2]), a[3], a[4], a[5], a[6])

    # What is counted against the limits

    def forget_live(self, rid: str) -> None:
        cost = self.call("HGET", self.P + ":live", rid)
        if cost is not None:
            self.call("HDEL", self.P + ":live", rid)
            self.call("HINCRBY", self.P + ":meta", "live_tokens", -num(cost))

    def set_live(self, rid: str, cost: str | Number) -> None:
        self.forget_live(rid)
        self.call("HSET", self.P + ":live", rid, cost)
        self.call("HINCRBY", self.P + ":meta", "live_tokens", cost)

    def free_late_reservations(self, now_ms: Number) -> None:
        for late in self.call("ZRANGEBYSCORE", self.P + ":resv", "-inf", now_ms):
            self.call("ZREM", self.P + ":resv", late)
            self.forget_live(late)

    # Fairness

    def floor_of(self, prio: str) -> Number:
        lowest = self.call("ZRANGE", f"{self.P}:tenants:{prio}", 0, 0, "WITHSCORES")
        if lowest:
            return num(lowest[1])
        floor = self.call("HGET", self.P + ":meta", "floor:" + prio)
        return num(0 if floor is None else floor)

    def charge(self, rid: str, tokens: Number) -> None:
        f = self.call("HMGET", self.request(rid), "charged", "tenant", "prio")
        more = tokens - num(0 if f[0] is None else f[0])
        if more == 0:
            return
        self.call("HSET", self.request(rid), "charged", tokens)
        weight = self.call("HGET", self.P + ":weights", f[1])
        more = more / num(1 if weight is None else weight)
        tenants = f"{self.P}:tenants:{f[2]}"
        if self.call("ZADD", tenants, "XX", "INCR", more, f[1]) is None:
            self.call("ZADD", f"{self.P}:idle:{f[2]}", "XX", "INCR", more, f[1])

    # Endings

    def is_finish(self, ending: str) -> bool:
        if len(ending) < 2:
            return False
        tag, reason = byte(ending, 1), byte(ending, 2)
        return tag == 8 and (reason == 1 or reason == 2)

    def settle_key(self, rid: str, finished: bool, keep_s: str) -> None:
        idem = self.call("HGET", self.request(rid), "idem")
        if idem is None or idem == "" or self.call("HGET", idem, "rid") != rid:
            return
        if finished:
            self.call("EXPIRE", idem, keep_s)
        else:
            self.call("DEL", idem)

    def learn_output(self, tokens: Number) -> None:
        mean = self.call("HGET", self.P + ":meta", "mean_output")
        if mean is not None:
            tokens = num(mean) + (tokens - num(mean)) / 16
        self.call("HSET", self.P + ":meta", "mean_output", tokens)

    def retire(self, rid: str, keep_s: str) -> None:
        r = self.request(rid)
        f = self.call("HMGET", r, "n", "owner", "stride", "prompt_tokens", "media_cost")
        if f[1] is not None and f[1] != "":
            self.call("SREM", f"{self.P}:own:{f[1]}", rid)
        output: Number = 0
        finished = True
        for c in range(int(f[0])):
            output = output + self.call("STRLEN", self.log_of(rid, c)) / num(f[2])
            finished = finished and self.is_finish(self.call("HGET", r, f"e{c}"))
            self.call("EXPIRE", self.log_of(rid, c), keep_s)
        self.call("EXPIRE", self.log_of(rid, "p"), keep_s)
        if finished:
            self.learn_output(output)
        was_run = output > 0 or (f[1] is not None and f[1] != "")
        self.charge(rid, num(f[3]) + num(f[4]) + output if was_run else 0)
        self.settle_key(rid, finished, keep_s)
        self.forget_live(rid)
        ended = integer(self.now_ms())
        self.call("HSET", r, "state", "ended", "owner", "", "ended_ms", ended)
        self.call("HDEL", r, "spec")
        self.call("EXPIRE", r, keep_s)

    def end_all(self, rid: str, ending: str, keep_s: str) -> None:
        r = self.request(rid)
        events = []
        for c in range(int(self.call("HGET", r, "n"))):
            if self.call("HSETNX", r, f"e{c}", ending) == 1:
                events.append(self.ending_event(rid, c, ending))
        self.call("HSET", r, "open", 0)
        self.retire(rid, keep_s)
        self.call("PUBLISH", self.P + ":tok", "".join(events))

    def up_since_ms(self, now_ms: Number) -> Number:
        f = self.call("HMGET", self.P + ":meta", "checked_ms", "up_since_ms")
        self.call("HSET", self.P + ":meta", "checked_ms", integer(now_ms))
        if f[0] is not None and now_ms - num(f[0]) < 3000:
            return num(f[1])
        self.call("HSET", self.P + ":meta", "up_since_ms", integer(now_ms))
        return now_ms

    def followed_until(self, fol_until: str | None, awake: Number, grace_ms: Number) -> Number:
        if num(0 if fol_until is None else fol_until) == 0:
            return math.inf
        return max(num(fol_until), awake + grace_ms)

    def may_wait_until(self, rid: str, awake: Number, close: Closing) -> tuple[Number, str]:
        f = self.call(
            "HMGET",
            self.request(rid),
            "cancel",
            "fol_until",
            "arrived_ms",
            "timeout_ms",
            "queue_timeout_ms",
            "taken_ms",
            "first_token_timeout_ms",
            "first_token_ms",
        )
        if f[0] == "1":
            return 0, close.cancelled
        if f[2] is None:
            return math.inf, ""
        found = [(self.followed_until(f[1], awake, close.grace_ms), close.cancelled)]

        def within(ms: str, what: str) -> None:
            if num(ms) > 0 and num(f[2]) + num(ms) < found[0][0]:
                found[0] = num(f[2]) + num(ms), what

        within(f[3], close.total)
        if f[5] == "0":
            within(f[4], close.queue)
        if f[7] is None:
            within(f[6], close.first_token)
        return found[0]

    # Waiting

    def enqueue(self, rid: str, prio: str, tenant: str, rank: str, close: Closing) -> None:
        tenants, rested = f"{self.P}:tenants:{prio}", f"{self.P}:idle:{prio}"
        if self.call("ZSCORE", tenants, tenant) is None:
            floor = self.floor_of(prio)
            known = self.call("ZSCORE", rested, tenant)
            counter = num(floor if known is None else known)
            self.call("ZREM", rested, tenant)
            self.call("ZADD", tenants, max(floor, counter), tenant)
        self.call("ZADD", f"{self.P}:w:{prio}:{tenant}", rank, rid)
        moment, _ = self.may_wait_until(rid, 0, close)
        if moment < math.inf:
            self.call("ZADD", self.P + ":due", moment, rid)
        self.call("PUBLISH", self.P + ":ctl", "q")

    def dequeue(self, rid: str) -> None:
        f = self.call("HMGET", self.request(rid), "prio", "tenant")
        waiting, tenants = f"{self.P}:w:{f[0]}:{f[1]}", f"{self.P}:tenants:{f[0]}"
        self.call("ZREM", waiting, rid)
        self.call("ZREM", self.P + ":due", rid)
        if self.call("EXISTS", waiting) == 1:
            return
        counter = self.call("ZSCORE", tenants, f[1])
        if counter is not None:
            self.call("ZREM", tenants, f[1])
            self.call("ZADD", f"{self.P}:idle:{f[0]}", counter, f[1])

    def end_if_due(self, rid: str, now_ms: Number, awake: Number, close: Closing) -> bool:
        moment, ending = self.may_wait_until(rid, awake, close)
        if moment > now_ms:
            return False
        self.dequeue(rid)
        self.end_all(rid, ending, close.keep_s)
        return True

    def put_back(self, rid: str, close: Closing) -> None:
        r = self.request(rid)
        f = self.call("HMGET", r, "state", "owner", "prio", "tenant", "rank")
        if f[0] != "running":
            return
        self.call("SREM", f"{self.P}:own:{f[1]}", rid)
        self.call("HSET", r, "state", "queued", "owner", "")
        self.charge(rid, 0)
        self.enqueue(rid, f[2], f[3], f[4], close)
        now_ms = self.now_ms()
        self.end_if_due(rid, now_ms, self.up_since_ms(now_ms), close)

    def keep_deaths(self, rid: str, deaths: str) -> None:
        r = self.request(rid)
        if num(deaths) > num(self.call("HGET", r, "deaths") or 0):
            self.call("HSET", r, "deaths", deaths)

    def request_at(self, i: int) -> Request:
        return Request(*self.ARGV[i : i + 16])

    def create(self, q: Request, now_ms: Number, arrived_ms: Number, rank: Number) -> None:
        follow_ms = num(q.follow_ms)
        fol_until = now_ms + follow_ms if follow_ms > 0 else 0
        fields = {
            "spec": q.spec,
            "head": q.head,
            "state": "queued",
            "owner": "",
            "own_at": 0,
            "cancel": 0,
            "arrived_ms": integer(arrived_ms),
            "rank": integer(rank),
            "prio": q.prio,
            "tenant": q.tenant,
            "cost": q.cost,
            "n": q.n,
            "open": q.n,
            "prompt_tokens": q.prompt_tokens,
            "stride": q.stride,
            "media_cost": q.media_cost,
            "timeout_ms": q.timeout_ms,
            "queue_timeout_ms": q.queue_timeout_ms,
            "first_token_timeout_ms": q.first_token_timeout_ms,
            "fol_until": integer(fol_until),
            "taken_ms": 0,
            "attempts": 0,
            "deaths": 0,
            "charged": 0,
            "idem": q.idem,
        }
        words = [word for field, value in fields.items() for word in (field, value)]
        self.call("HSET", self.request(q.rid), *words)
        self.set_live(q.rid, q.cost)

    def bind_key(self, q: Request) -> str | None:
        if q.idem == "":
            return None
        known: str | None = self.call("HGET", q.idem, "rid")
        if known is not None and known != q.rid:
            if self.call("EXISTS", self.request(known)) == 1:
                return known
        self.call("HSET", q.idem, "rid", q.rid)
        if known is None or q.fingerprint != "":
            self.call("HSET", q.idem, "fingerprint", q.fingerprint)
        self.call("PERSIST", q.idem)
        return None


__all__ = ["Number", "Prelude", "Reply", "byte", "integer", "num", "number_text", "sub"]

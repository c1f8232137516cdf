"""Twin of append.lua."""

from tests.simulation.scripts.prelude import Number, Prelude, Reply, byte, integer, sub


def read_event(lua: Prelude, batch: str, at: int, stop: int) -> list[int | str]:
    event: list[int | str] = ["", 0, 0, "", "", 0]
    while at < stop:
        key, at = lua.varint_at(batch, at)
        value: int | str
        number, at = lua.varint_at(batch, at)
        value = number
        if key % 8 == 2:
            first = at
            at = at + number
            value = sub(batch, first, at - 1)
        event[key // 8 - 1] = value
    return event


def read_token(batch: str, at: int, stop: int) -> tuple[str, int, str] | None:
    tag, length = byte(batch, at), byte(batch, at + 1)
    if tag != 10 or stop - at != length + 13:
        return None
    middle = at + 2 + length
    start_tag, a, b, c, d, records_tag, size = (byte(batch, middle + i) for i in range(7))
    if start_tag != 24 or a < 128 or b < 128 or c < 128 or d >= 128:
        return None
    if records_tag != 34 or size != 4:
        return None
    start = a - 128 + 128 * (b - 128) + 16384 * (c - 128) + 2097152 * d
    return sub(batch, at + 2, middle - 1), start, sub(batch, middle + 7, stop - 1)


def write(
    lua: Prelude, rid: str, choice: int | str, start: int, records: str, ending: str, stride: int
) -> tuple[int, Number, bool, bool]:
    sid, keep_s = lua.ARGV[1], lua.ARGV[2]
    if stride == 0:
        stride = 4
    if isinstance(choice, int) and choice > 2147483647:
        choice = "p"
    r = lua.request(rid)
    f = lua.call("HMGET", r, "owner", "cancel", f"e{choice}")
    if f[0] != sid:
        return 1, 0, False, False
    log = lua.log_of(rid, choice)
    length: Number = lua.call("STRLEN", log) / stride
    if f[2] is not None:
        return 0, length, False, False
    if start > length:
        return 3, length, False, False
    simple = start == length and f[1] != "1"
    fresh = records
    if start < length:
        fresh = sub(records, int((length - start) * stride) + 1)
    if len(fresh) > 0:
        if length == 0 and choice != "p":
            lua.call("HSETNX", r, "first_token_ms", integer(lua.now_ms()))
        length = lua.call("APPEND", log, fresh) / stride
    if ending != "":
        lua.call("HSET", r, f"e{choice}", ending)
        if lua.call("HINCRBY", r, "open", -1) <= 0:
            lua.retire(rid, keep_s)
    return 2 if f[1] == "1" else 0, length, True, simple


def run(lua: Prelude) -> Reply:
    batch = lua.ARGV[3]
    answers: list[Number] = []
    index, at = 0, 1
    told: list[str] | None = None
    while at <= len(batch):
        begin = at
        size, at = lua.varint_at(batch, at + 1)
        token = read_token(batch, at, at + size)
        if token is not None:
            code, length, news, simple = write(lua, token[0], 0, token[1], token[2], "", 4)
        else:
            event = read_event(lua, batch, at, at + size)
            code, length, news, simple = write(lua, *event)  # type: ignore[arg-type]
        at = at + size
        if not simple:
            answers += [index, code, length]
        if not news and told is None:
            told = [sub(batch, 1, begin - 1)]
        if news and told is not None:
            told.append(sub(batch, begin, at - 1))
        index = index + 1
    if told is not None:
        batch = "".join(told)
    if batch != "":
        lua.call("PUBLISH", lua.P + ":tok", batch)
    return answers

"""Twin of report.lua."""

from itertools import count

from tests.simulation.scripts.prelude import Prelude, Reply


def run(lua: Prelude) -> Reply:
    reporter, engines = lua.P + ":reporter", lua.P + ":engines"
    who = lua.call("GET", reporter)
    if who is not None and who != lua.ARGV[1]:
        return ["NO"]
    if lua.ARGV[2] == "0":
        lua.call("DEL", reporter)
        return ["NO"]
    lua.call("SET", reporter, lua.ARGV[1], "PX", lua.ARGV[2])
    decoders = lua.ARGV[3:]
    known = lua.call("HGETALL", engines)
    taken = set()
    for did, number in zip(known[::2], known[1::2], strict=True):
        if did in decoders:
            taken.add(number)
        else:
            lua.call("HDEL", engines, did)
    answer = ["YES"]
    for did in decoders:
        number = lua.call("HGET", engines, did)
        if number is None:
            number = next(text for text in map(str, count()) if text not in taken)
            taken.add(number)
            lua.call("HSET", engines, did, number)
        answer.append(number)
    return answer

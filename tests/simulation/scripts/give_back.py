"""Twin of give_back.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply


def run(lua: Prelude) -> Reply:
    close = lua.closing()
    returned = 0
    for rid in lua.ARGV[8:]:
        if lua.call("HGET", lua.request(rid), "owner") == lua.ARGV[7]:
            lua.put_back(rid, close)
            returned = returned + 1
    return returned

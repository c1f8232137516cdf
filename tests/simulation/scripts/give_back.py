"""Twin of give_back.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply


def run(lua: Prelude) -> Reply:
    close = lua.closing()
    returned = 0
    for rid, deaths in zip(lua.ARGV[8::2], lua.ARGV[9::2], strict=True):
        if lua.call("HGET", lua.request(rid), "owner") == lua.ARGV[7]:
            lua.keep_deaths(rid, deaths)
            lua.put_back(rid, close)
            returned = returned + 1
    return returned

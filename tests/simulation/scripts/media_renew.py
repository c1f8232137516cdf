"""Twin of media_renew.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply, num


def run(lua: Prelude) -> Reply:
    expires_ms = lua.now_ms() + num(lua.ARGV[1])
    for digest in lua.ARGV[2:]:
        lua.call("ZADD", lua.P + ":expiry", "XX", expires_ms, digest)
    return 1

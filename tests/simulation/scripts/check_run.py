"""Twin of check_run.lua."""

import re

from tests.simulation.scripts.prelude import Prelude, Reply, integer


def run(lua: Prelude) -> Reply:
    P = lua.P
    found = re.search("run_id:([0-9a-fA-F]+)", lua.call("INFO", "server"))
    assert found is not None
    run_id = found[1]
    meta = lua.call("HMGET", P + ":meta", "run_id", "recovered_run")

    def is_other(known: str | None) -> bool:
        return known is not None and known != "" and known != run_id

    if meta[0] != run_id:
        lua.call("HSET", P + ":meta", "run_id", run_id)
    if meta[1] != run_id and (is_other(meta[0]) or is_other(lua.ARGV[1])):
        awake = integer(lua.now_ms())
        lua.call("HSET", P + ":meta", "recovered_run", run_id, "up_since_ms", awake)
        lua.call("SET", P + ":recovery", run_id, "PX", lua.ARGV[2])
    return run_id

"""Deterministic simulation: the whole system in one process, on a clock that jumps, under faults drawn from a seed.

    python -m tests.simulation --seeds 500              runs seeds 0 to 499, prints what breaks
    python -m tests.simulation --seed 17 --trace        one of them, with all that happened in it
    pytest tests/simulation                             what CI runs

What runs is production code: `serve` of scheduler and decoder, `run_gateway`, the generated stubs and servicers,
`RedisConnection` and everything above it. Replaced is what the code asks for where it reaches outside: time and random
numbers (`shared/environment.py`), what opens connections and servers (`shared/net/transport.py`), and, as arguments of
`serve`, the HTTP server, the decoder's model and compute thread, and the scheduler's core, which is watched.

    surroundings    time, random numbers and connections of a world
    virtual_loop    the event loop, and processes that die or freeze between two callbacks
    network         connections: in order within one, independent of each other, slow, held back, cut
    rpc             the transport of gRPC on it: `insecure_channel` and `server`
    redis_server    Redis on it, speaking its protocol; `redis_model` is what it keeps, in plain dicts
    redis_scripts   the Lua scripts that Redis is given, run by Lua 5.1 on that model
    arithmetic      a decoder whose next token is a number computed from what its cache really holds
    services        the processes, and the launcher that starts again what dies
    client          who asks, reads, is cut off and comes back, sends twice, leaves; it knows the text that is right
    poison          requests that end whatever decoder computes them; some runs have one
    faults          kill and restart, freeze and wake, cut, delay, partition, drain; Redis killed with its tail lost
    invariants      what must hold after every command of Redis, and what must be gone at the end
    watched_core    what must hold after everything that the scheduler's core does
    planted         faults in scripts and beside the core that the invariants must see; see `test_faults.py`
    world           puts it together: `simulate(seed)`

What is looked at: logs only grow (after a loss in Redis they may become a beginning of themselves); each choice has one
ending; a request has an owner exactly while it runs and stands in line exactly while it waits; nothing is given away
while Redis recovers; blocks are held as often as they count, slots once; a block has the name of the tokens in it; the
tokens that clients get are those of an undisturbed run, none lost, none twice; every client is served within a
minute of the last fault, and then no request, reservation, place in line, sequence or block is left.

A run depends on its seed alone, not on PYTHONHASHSEED or on the machine. Where production code walks over a set, its
order would; there it keeps a dict.

`test_redis_model.py` has the same Lua do the same drawn calls on a real Redis and on the model, and compares answers,
messages and databases after each call.
"""

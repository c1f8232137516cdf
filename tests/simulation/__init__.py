"""Deterministic simulation: the whole system in one process, on a clock that jumps, under faults drawn from a seed.

    python -m tests.simulation --seeds 500              runs seeds 0 to 499, prints what breaks
    python -m tests.simulation --seed 17 --trace        one of them, with all that happened in it
    pytest tests/simulation                             what CI runs

What runs is production code: `serve` of scheduler and decoder, `run_gateway`, the generated stubs and servicers,
`RedisConnection` and everything above it. Replaced is what the code asks for where it reaches outside: time and random
numbers (`shared/environment.py`), what opens connections and servers (`shared/net/transport.py`), and, as arguments of
`serve`, the HTTP server, the decoder's model and compute thread, and the scheduler's core, which is watched.

    surroundings.py   time, random numbers and connections of a world
    virtual_loop.py   the event loop, and processes that die or freeze between two callbacks
    processes/        what runs and how it is connected:
      network.py        connections: in order within one, independent of each other, slow, held back, cut
      rpc.py            the transport of gRPC on it: `insecure_channel` and `server`
      arithmetic.py     a decoder whose next token is a number computed from what its cache really holds
      media_services.py preprocess and vision encoder
      services.py       the processes, and the launcher that starts again what dies
      client.py         who asks, reads, is cut off and comes back, sends twice, leaves; it knows the text that is right
    redis/            Redis on that network:
      server.py         speaks its protocol
      model.py          what it keeps, in plain dicts
      scripts.py        the Lua scripts that Redis is given, run by Lua 5.1 on that model
    poison.py         requests that end whatever decoder computes them; some runs have one
    faults.py         kill and restart, freeze and wake, cut, delay, partition, drain; Redis killed with its tail lost
    goodput.py        answers that come in time, under load
    invariants.py     what must hold after every command of Redis, and what must be gone at the end
    watched_core.py   what must hold after everything that the scheduler's core does
    planted.py        faults in scripts and beside the core that the invariants must see; see `test_faults.py`
    world.py          puts it together: `simulate(seed)`

What is looked at: logs only grow (after a loss in Redis they may become a beginning of themselves); each choice has one
ending; a request has an owner exactly while it runs and stands in line exactly while it waits; nothing is given away
while Redis recovers; blocks are held as often as they count, slots once; a block has the name of the tokens in it; the
tokens that clients get are those of an undisturbed run, none lost, none twice; every client is served within a
minute of the last fault, and then no request, reservation, place in line, sequence or block is left.

A run depends on its seed alone, not on PYTHONHASHSEED or on the machine. Where production code walks over a set, its
order would; there it keeps a dict.

`redis/test_model.py` has the same Lua do the same drawn calls on a real Redis and on the model, and compares answers,
messages and databases after each call.
"""

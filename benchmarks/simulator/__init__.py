"""The scheduler's real core and router against simulated decoders under a virtual clock.

trace       who comes when, with which prefix and pictures
prompt      what each of them asks for, as the core sees it
decoder     obeys plans in virtual time
encoders    turn pictures into embeddings in virtual time
shard       one scheduler process: a router, its decoders, its events
fleet       several shards, fed from one queue in windows of virtual time
policies    ways to choose a decoder, to compare
costs       what deciding took on this machine, and what that is made of
outcome     what came of a run
"""

from benchmarks.simulator.command import main

__all__ = ["main"]

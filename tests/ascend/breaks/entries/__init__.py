"""All ways to break the code, by what they break."""

from tests.ascend.breaks.entries import (
    attention,
    cache,
    coded_cache,
    codes,
    graphs,
    memory,
    ranks,
    towers,
    transfers,
)
from tests.ascend.breaks.fault import Break

BREAKS: list[Break] = [
    *transfers.BREAKS,
    *cache.BREAKS,
    *codes.BREAKS,
    *coded_cache.BREAKS,
    *memory.BREAKS,
    *attention.BREAKS,
    *graphs.BREAKS,
    *ranks.BREAKS,
    *towers.BREAKS,
]

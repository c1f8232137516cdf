"""A line every ten seconds in which there was work: what this scheduler's decoders do."""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from tessera.scheduler.v1.scheduler_pb2 import DecoderLoad

log = structlog.get_logger(__name__)

_EVERY_S = 10.0


class Throughput:
    """Counts what steps compute, and logs it."""

    def __init__(self, loads: Callable[[], Sequence[DecoderLoad]]) -> None:
        """`loads()` is what each decoder is doing now."""
        self._loads = loads
        self._prompt_tokens = 0
        self._generated = 0
        # Of each decoder, prefix blocks that were looked for and found, at the last report.
        self._asked: dict[str, tuple[int, int]] = {}

    def add(self, computed: int, generated: int) -> None:
        """A step computed so many tokens, and gave so many. All but the first token of an answer cost one of those that
        are computed; the rest are prompts."""
        self._prompt_tokens += max(0, computed - generated)
        self._generated += generated

    async def run(self) -> None:
        """Logs it until cancelled."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            await asyncio.sleep(_EVERY_S)
            now = loop.time()
            self._report(now - began)
            began = now

    def _report(self, seconds: float) -> None:
        prompt_tokens, generated = self._prompt_tokens, self._generated
        self._prompt_tokens = self._generated = 0
        loads = self._loads()
        queries, hits = self._prefixes(loads)
        if not prompt_tokens and not generated:
            return
        log.info(
            "throughput",
            prompt_tokens_per_s=round(prompt_tokens / seconds, 1),
            generation_tokens_per_s=round(generated / seconds, 1),
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            kv_cache_usage_percent=_percent(
                sum(load.blocks_used for load in loads), sum(load.blocks_total for load in loads)
            ),
            prefix_cache_hit_rate_percent=_percent(hits, queries),
        )

    def _prefixes(self, loads: Sequence[DecoderLoad]) -> tuple[int, int]:
        """Prefix blocks that were looked for since the last call, and those found."""
        before, self._asked = (
            self._asked,
            {load.decoder_id: (load.prefix_queries, load.prefix_hits) for load in loads},
        )
        queries = hits = 0
        for decoder_id, (asked, found) in self._asked.items():
            then = before.get(decoder_id, (0, 0))
            if then[0] > asked:  # another lease: it counts anew
                then = (0, 0)
            queries += asked - then[0]
            hits += found - then[1]
        return queries, hits


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 1) if whole else 0.0

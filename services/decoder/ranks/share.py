"""Which part of a model's layers one of several ranks computes (Shoeybi et al., 2019, Megatron-LM)."""

from dataclasses import dataclass

from services.decoder.steps.attention_meta import Heads
from shared.model_config.decoder import DecoderConfig
from shared.weights.linear_weight import LinearWeight, Range


@dataclass(frozen=True)
class Share:
    """That of rank `rank` of `size`. What a layer's first matrices give is divided by outputs, its last ones by inputs:
    each rank then has a summand of the whole. One rank of one has everything as it is.
    """

    rank: int = 0
    size: int = 1

    def heads(self, config: DecoderConfig) -> Heads:
        """Of each layer. Fewer heads of keys than ranks are each computed by several."""
        keys = max(1, config.num_kv_heads // self.size)
        return Heads(config.num_heads // self.size, keys, config.head_size)

    def fused(self, qkv: LinearWeight, config: DecoderConfig) -> LinearWeight:
        """The outputs of this rank's heads, of a layer of queries, keys and values as `Heads` says."""
        own, size = self.heads(config), config.head_size
        query = self.rank * own.num_q
        key = self.rank * config.num_kv_heads // self.size
        keys = config.num_heads + key
        values = keys + config.num_kv_heads
        ranges = [
            (query, query + own.num_q),
            (keys, keys + own.num_kv),
            (values, values + own.num_kv),
        ]
        return self._cut(qkv, [(first * size, last * size) for first, last in ranges])

    def halves(self, gate_up: LinearWeight) -> LinearWeight:
        """Its gates and what they gate, of a layer of all gates above what they gate."""
        half = gate_up.out // 2
        first, last = self.range(half)
        return self._cut(gate_up, [(first, last), (half + first, half + last)])

    def outputs(self, weight: LinearWeight) -> LinearWeight:
        """Its part of the outputs; of numbers that do not divide, as of a vocabulary, the last rank has fewer."""
        return self._cut(weight, [self.range(weight.out)])

    def inputs(self, weight: LinearWeight) -> LinearWeight:
        """Its part of the inputs, the bias with the first rank alone."""
        if self.size == 1:
            return weight
        part = weight.shard("in", [self.range(weight.inputs)])
        if self.rank:
            part.bias = None
        return part

    def range(self, count: int) -> Range:
        """Its part of so many."""
        most = -(-count // self.size)
        return min(count, self.rank * most), min(count, (self.rank + 1) * most)

    def _cut(self, weight: LinearWeight, ranges: list[Range]) -> LinearWeight:
        return weight if self.size == 1 else weight.shard("out", ranges)

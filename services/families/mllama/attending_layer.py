"""A layer whose tokens attend to pictures: gated attention to their keys, and a gated MLP."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.language_weights import LanguageWeights
from services.decoder.steps.attention_meta import Packed, PagedKV
from services.decoder.steps.encoder_keys import AttendingTokens
from services.families.mllama.config import MllamaConfig
from shared.weights.linear_weight import StackedWeight


@dataclass(frozen=True, eq=False)
class AttendingLayer:
    """Weights and operations. Like the layers of text it ends with the norm of the next one."""

    q: Packed
    k: Packed
    v: Packed
    output: Packed
    q_norm: Tensor  # [size], of each head
    k_norm: Tensor
    attention_gate: Tensor  # [1], after tanh
    post_norm: Tensor  # before the MLP
    gate_up: Packed
    down: Packed
    mlp_gate: Tensor  # [1], after tanh
    after_norm: Tensor
    size: int  # of a head
    eps: float
    ops: BaseOps

    @classmethod
    def load(
        cls,
        weights: LanguageWeights,
        number: int,
        after_norm: Tensor | None,
        config: MllamaConfig,
        ops: BaseOps,
    ) -> "AttendingLayer":
        """Raises InvalidRequest as `LanguageWeights.take` does."""
        assert after_norm is not None
        layer, hidden, inner = f"layers.{number}", config.hidden_size, config.intermediate_size
        queries, keys = (n * config.head_size for n in (config.num_heads, config.num_kv_heads))

        def pack(name: str, out: int, inputs: int) -> Packed:
            return ops.pack(weights.take_linear(f"{layer}.{name}_proj", out, inputs))

        def vector(name: str, size: int) -> Tensor:
            return ops.vector(weights.take(f"{layer}.{name}", size))

        up = [
            weights.take_linear(f"{layer}.mlp.{name}_proj", inner, hidden)
            for name in ("gate", "up")
        ]
        return cls(
            q=pack("cross_attn.q", queries, hidden),
            k=pack("cross_attn.k", keys, hidden),
            v=pack("cross_attn.v", keys, hidden),
            output=pack("cross_attn.o", hidden, queries),
            q_norm=vector("cross_attn.q_norm.weight", config.head_size),
            k_norm=vector("cross_attn.k_norm.weight", config.head_size),
            attention_gate=torch.tanh(vector("cross_attn_attn_gate", 1)),
            post_norm=vector("post_attention_layernorm.weight", hidden),
            gate_up=ops.pack_gate_up(StackedWeight(up)),
            down=pack("mlp.down", hidden, inner),
            mlp_gate=torch.tanh(vector("cross_attn_mlp_gate", 1)),
            after_norm=after_norm,
            size=config.head_size,
            eps=config.rms_norm_eps,
            ops=ops,
        )

    def attend(
        self, normed: Tensor, residual: Tensor, kv: PagedKV, attending: AttendingTokens
    ) -> Tensor:
        """The sums [T, H] after this layer, from rows after the norm before it and their sums so far; those of tokens
        that attend to no picture stay as they are."""
        ops, tokens = self.ops, attending.tokens
        self._write(kv, attending)
        queries = self._heads(normed.index_select(0, tokens), self.q, self.q_norm)
        mixed = ops.linear(self._look(queries, kv, attending).flatten(1), self.output)
        total = residual.index_select(0, tokens) + self.attention_gate * mixed
        gated = ops.gate_up_swiglu(ops.rms_norm(total, self.post_norm, self.eps), self.gate_up)
        gates = self.mlp_gate * attending.marks[:, None]
        total = total + gates * ops.linear(gated, self.down)
        return residual.index_copy(0, tokens, total)

    def _write(self, kv: PagedKV, attending: AttendingTokens) -> None:
        for new in attending.new:
            rows = new.values.to(self.ops.dtype)
            values = self.ops.linear(rows, self.v).view(len(rows), -1, self.size)
            self.ops.kv_write(self._heads(rows, self.k, self.k_norm), values, kv, new.meta)

    def _heads(self, rows: Tensor, layer: Packed, norm: Tensor) -> Tensor:
        """[n, heads, size], with the norm of each head."""
        heads = self.ops.linear(rows, layer).view(-1, self.size)
        return self.ops.rms_norm(heads, norm, self.eps).view(len(rows), -1, self.size)

    def _look(self, queries: Tensor, kv: PagedKV, attending: AttendingTokens) -> Tensor:
        """What attention gives [n, heads, size]."""
        found = torch.empty_like(queries)
        for seen in attending.seen:
            some = queries if seen.index is None else queries.index_select(0, seen.index)
            # Keys and values of this step's own tokens there are none.
            mixed = self.ops.paged_attention(
                some, some, some, kv, seen.meta, scale=self.size**-0.5, window=seen.window
            )
            if seen.index is None:
                return mixed
            found.index_copy_(0, seen.index, mixed)
        return found

"""Tensors that many architectures have."""

from collections.abc import Mapping

from shared.checkpoint.gguf.families.family import Part


def matrix(name: str, out: str, inputs: str, bias: bool | None = False, heads: str = "") -> Part:
    """A linear layer; heads as of `Part`."""
    return Part(name, (out, inputs), bias=bias, heads=(heads,) if heads else ())


def norm(name: str, shift: float = 0.0, bias: bool = False, size: str = "h") -> Part:
    """Of whole rows, if `size` does not say what else."""
    return Part(name, (size,), shift=shift, bias=bias)


def tables(shift: float = 0.0, norm_bias: bool = False, head: bool = True) -> dict[str, Part]:
    """Embedding, last norm and, where it is not the embedding, the output matrix."""
    found = {
        "token_embd": Part("model.embed_tokens", ("t", "h")),
        "output_norm": norm("model.norm", shift, norm_bias),
    }
    output = {"output": Part("lm_head", ("t", "h"), optional=True)}
    return found | output if head else found


def attention(
    turned: bool = False, bias: bool | None = None, output_bias: bool | None = None
) -> dict[str, Part]:
    """Queries, keys and values, each its own layer in transformers. turned: rows of queries and keys lie in the order
    of ggml's rotation."""
    queries, keys = ("n", "g") if turned else ("", "")
    names = tuple(f"self_attn.{part}_proj" for part in "qkv")
    together = "attn_qkv"
    parts = {
        f"attn_{part}": Part(
            name, (out, "h"), bias=bias, heads=(heads,) if heads else (), instead=together
        )
        for part, name, out, heads in zip("qkv", names, "qkv", (queries, keys, ""), strict=True)
    }
    return {
        **parts,
        together: Part(
            names,
            ("q+k+v", "h"),
            rows=("q", "k", "v"),
            heads=(queries, keys, "") if turned else (),
            bias=bias,
            optional=True,
        ),
        "attn_output": matrix("self_attn.o_proj", "h", "q", output_bias),
    }


def gated(bias: bool | None = False) -> dict[str, Part]:
    """An MLP with gates."""
    return {
        "ffn_gate": matrix("mlp.gate_proj", "f", "h", bias),
        "ffn_up": matrix("mlp.up_proj", "f", "h", bias),
        "ffn_down": matrix("mlp.down_proj", "h", "f", bias),
    }


def around(shift: float = 0.0, bias: bool = False) -> dict[str, Part]:
    """The norms before attention and MLP, as Llama has them."""
    return {
        "attn_norm": norm("input_layernorm", shift, bias),
        "ffn_norm": norm("post_attention_layernorm", shift, bias),
    }


def experts(
    router: str = "mlp.gate",
    inside: str = "mlp.experts.{}.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, Part]:
    """A router, and what it chooses of, all experts of a layer in one tensor."""
    gate, up, down = (inside + name for name in names)
    both, other = ("e", "m", "h"), ("e", "h", "m")
    return {
        "ffn_gate_inp": Part(router, ("e", "h")),
        "ffn_gate_exps": Part(gate, both),
        "ffn_up_exps": Part(up, both),
        "ffn_down_exps": Part(down, other),
    }


def shared_expert(inside: str = "mlp.shared_expert.") -> dict[str, Part]:
    """An expert that all tokens have."""
    return {
        "ffn_gate_shexp": Part(f"{inside}gate_proj", ("s", "h")),
        "ffn_up_shexp": Part(f"{inside}up_proj", ("s", "h")),
        "ffn_down_shexp": Part(f"{inside}down_proj", ("h", "s")),
    }


def head_norms(
    shift: float = 0.0, names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
) -> dict[str, Part]:
    """Norms of each head's queries and keys."""
    return {
        "attn_q_norm": norm(names[0], shift, size="d"),
        "attn_k_norm": norm(names[1], shift, size="d"),
    }


def row_norms() -> Mapping[str, Part]:
    """Norms of all queries of a token together, and of all its keys."""
    return {
        "attn_q_norm": norm("self_attn.q_norm", size="q"),
        "attn_k_norm": norm("self_attn.k_norm", size="k"),
    }

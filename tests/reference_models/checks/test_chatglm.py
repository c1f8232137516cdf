"""The ChatGLM references: positions, visibility, prompts, and transformers' Glm renamed."""

from pathlib import Path

import pytest
import torch
from transformers import GlmConfig, GlmForCausalLM

from tests.reference_models.common import below
from tests.reference_models.text_models import chatglm, chatglm_6b
from tests.reference_models.text_models.chatglm import ChatGlm
from tests.reference_models.text_models.chatglm_6b import ChatGlm6B

TALK = [("user", "What?"), ("assistant", "Dogs."), ("user", "And\nthis?")]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> ChatGlm6B:
    return ChatGlm6B(chatglm_6b.write_checkpoint(tmp_path_factory.mktemp("6b")))


def test_the_prompt_ends_in_its_two_tokens_and_blanks_are_tokens(first: ChatGlm6B) -> None:
    ids = first.prompt_ids([("user", "a   b\n\tc")])
    tokens = [first.tokenizer.id_to_token(token) for token in ids]
    assert tokens[-2:] == ["[gMASK]", "<sop>"]
    assert {"<|blank_3|>", "<n>", "<|tab|>"} <= set(tokens)
    assert first.text(ids) == "a   b\n\tc"
    assert first.prompt(TALK) == "[Round 0]\n问：What?\n答：Dogs.\n[Round 1]\n问：And\nthis?\n答："
    assert first.prompt(TALK[:1]) == "What?"


def test_positions_stop_at_the_mask_and_blocks_begin(first: ChatGlm6B) -> None:
    ids = [*first.prompt_ids([("user", "dog")]), 7, 8]
    start = ids.index(first.config["bos_token_id"])
    positions, blocks = first.positions(ids)
    assert positions.tolist() == [*range(start), start - 1, start - 1, start - 1]
    assert blocks.tolist() == [*[0] * start, 1, 2, 3]


def test_the_prompt_sees_itself_and_the_answer_what_is_before(first: ChatGlm6B) -> None:
    ids = [*first.prompt_ids([("user", "dog")]), 7, 8, 9]
    start = ids.index(first.config["bos_token_id"])
    base = first.logits(ids)

    def moved(place: int) -> list[bool]:
        changed = [*ids]
        changed[place] = 11
        return [bool(row) for row in ((first.logits(changed) - base).abs() > 1e-3).any(-1)]

    assert all(moved(start - 2))
    assert moved(start + 2) == [False] * (start + 2) + [True] * (len(ids) - start - 2)


def test_answers_go_on_as_their_whole_says(first: ChatGlm6B) -> None:
    ids = first.prompt_ids(TALK)
    result = first.generate(ids, 4)
    whole = first.logits([*ids, *result.tokens])[len(ids) - 1 : -1]
    assert whole.argmax(-1).tolist() == result.tokens


def glm(model: ChatGlm) -> GlmForCausalLM:
    """transformers' Glm with the same weights."""
    weights = {
        "model.embed_tokens.weight": model.tensors["transformer.embedding.word_embeddings.weight"],
        "model.norm.weight": model.tensors["transformer.encoder.final_layernorm.weight"],
        "lm_head.weight": model.tensors["transformer.output_layer.weight"],
    }
    for layer in range(2):
        part = below(model.tensors, f"transformer.encoder.layers.{layer}.")
        name = f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            rows = part[f"self_attention.query_key_value.{kind}"].split([64, 32, 32])
            for letter, rows_of_one in zip("qkv", rows, strict=True):
                weights[f"{name}self_attn.{letter}_proj.{kind}"] = rows_of_one
        weights[f"{name}self_attn.o_proj.weight"] = part["self_attention.dense.weight"]
        weights[f"{name}mlp.gate_up_proj.weight"] = part["mlp.dense_h_to_4h.weight"]
        weights[f"{name}mlp.down_proj.weight"] = part["mlp.dense_4h_to_h.weight"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}{norm}.weight"] = part[f"{norm}.weight"]
    config = GlmConfig(
        vocab_size=520,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        pad_token_id=0,
        rms_norm_eps=model.config["layernorm_epsilon"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0 * model.config.get("rope_ratio", 1),
            "partial_rotary_factor": 0.5,
        },
    )
    theirs = GlmForCausalLM(config).eval()
    theirs.load_state_dict(weights)
    return theirs


@pytest.mark.parametrize("generation", [2, 3, 4])
def test_later_generations_are_glm(tmp_path: Path, generation: int) -> None:
    model = ChatGlm(chatglm.write_checkpoint(tmp_path, generation=generation), generation)
    ids = model.prompt_ids(TALK)
    with torch.no_grad():
        expected = glm(model)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(model.logits(ids), expected, atol=1e-3, rtol=1e-3)
    assert len(model.generate(ids, 2).tokens) == 2


def test_prompts_of_the_later_generations(tmp_path: Path) -> None:
    assert ChatGlm.rounds(["a", "b", "c"]) == (
        "[Round 1]\n\n问：a\n\n答：b\n\n[Round 2]\n\n问：c\n\n答："
    )
    model = ChatGlm(chatglm.write_checkpoint(tmp_path, generation=3), 3)
    tokens = [model.tokenizer.id_to_token(token) for token in model.prompt_ids(TALK)]
    assert tokens[:3] == ["[gMASK]", "sop", "<|user|>"]
    assert tokens[-1] == "<|assistant|>"

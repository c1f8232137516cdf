"""ChatGLM2 and its successors: what their configurations say, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.families import registry
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.text.templates.processes import TemplateRefusal
from tests.reference_models.text_models import chatglm
from tests.support.chat_templates import chat_template
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.decoder.step_stream import (
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    running_decoder,
)

CHATGLM3: dict[str, Any] = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "ffn_hidden_size": 13_696,
    "hidden_size": 4096,
    "kv_channels": 128,
    "layernorm_epsilon": 1e-05,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 32,
    "num_layers": 28,
    "original_rope": True,
    "padded_vocab_size": 65_024,
    "post_layer_norm": True,
    "rmsnorm": True,
    "rope_ratio": 50,
    "seq_length": 32_768,
    "quantization_bit": 0,
    "pre_seq_len": None,
}


def checkpoint(folder: Path, **changes: Any) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps({**CHATGLM3, **changes}))
    return Checkpoint(folder)


def test_a_released_configuration(tmp_path: Path) -> None:
    config = registry.decoder_config(checkpoint(tmp_path))
    assert (config.vocab_size, config.num_layers, config.intermediate_size) == (65_024, 28, 13_696)
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (32, 2, 128)
    assert config.qkv_bias and not config.output_bias and not config.mlp_bias and not config.tied
    assert config.rope.theta == 500_000 and config.rope.size == 64 and config.rope.interleaved
    assert config.max_position_embeddings == 32_768
    alone = registry.decoder_config(checkpoint(tmp_path, multi_query_attention=False))
    assert alone.num_kv_heads == 32 and alone.qkv_by_head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_encoding_2d": True}, "position_encoding_2d"),
        ({"vision_config": {"image_size": 1120}}, "vision_config"),
        ({"rmsnorm": False}, "rmsnorm"),
        ({"original_rope": False}, "original_rope"),
        ({"pre_seq_len": 128}, "pre_seq_len"),
        ({"quantization_bit": 4}, "quantization_bit"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual"),
        ({"_name_or_path": "THUDM/chatglm2-6b-32k"}, "rope_ratio"),
    ],
)
def test_other_blocks_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        registry.decoder_config(checkpoint(tmp_path, **changes))


TALK = [
    {"role": "user", "content": "你好"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Who are you?"},
]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (
            {},
            "[gMASK]sop[Round 1]\n\n问：你好\n\n答：Hello.\n\n[Round 2]\n\n问：Who are you?\n\n答：",
        ),
        (
            {"tokens": {"64795": {"content": "<|user|>"}}},
            "[gMASK]sop<|user|>\n 你好<|assistant|>\n Hello.<|user|>\n Who are you?<|assistant|>",
        ),
    ],
    ids=["chatglm2", "chatglm3"],
)
def test_the_chat_format_of_folders_that_have_none(
    tmp_path: Path, files: dict[str, Any], text: str
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(files))
    found = checkpoint(tmp_path)
    source = registry.find(found).chat_template(found)
    assert source is not None
    assert chat_template(source, {}).render(TALK, True) == text
    named = checkpoint(tmp_path, _name_or_path="THUDM/chatglm3-6b")
    assert "<|assistant|>" in str(registry.find(named).chat_template(named))
    large = checkpoint(tmp_path, padded_vocab_size=151_552)
    assert registry.find(large).chat_template(large) is None
    if not files:
        with pytest.raises(TemplateRefusal, match="user and assistant alone"):
            chat_template(source, {}).render([{"role": "system", "content": "Be brief."}], True)


@pytest.mark.parametrize(
    ("generation", "changes"),
    [(2, {}), (2, {"multi_query_attention": False}), (3, {}), (4, {})],
    ids=["2", "2, packed by head", "3", "4"],
)
async def test_tokens_are_those_of_the_reference(
    tmp_path: Path, short_tmp: Path, generation: int, changes: dict[str, Any]
) -> None:
    folder = chatglm.write_checkpoint(tmp_path, generation=generation, **changes)
    reference = chatglm.ChatGlm(folder, generation)
    talk = [("user", "What?"), ("assistant", "Dogs."), ("user", "And this?")]
    prompts = [reference.prompt_ids(talk[2 * (i % 2) :]) * (1 + i // 4) for i in range(8)]
    async with (
        running_decoder(folder, short_tmp / "s") as decoder,
        StepStream.open(decoder.address) as stream,
    ):
        texts = [Text(slot, prompt, greedy()) for slot, prompt in enumerate(prompts)]
        await NaiveScheduler(stream).generate(texts, 12, chunk=16)
    for text in texts:
        expected = reference.generate(text.prompt, 12)
        assert_same_up_to_ties(text.output, expected.tokens, expected.logits)

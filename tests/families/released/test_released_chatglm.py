"""ChatGLM2-6B, ChatGLM3-6B and GLM-4-9b-chat in the forms that they are released in.

Read in copies of the repositories (ChatGLM2, ChatGLM3): config.json, its `_name_or_path`, no vocab_size;
tokenizer.model of SentencePiece, whose size is that of the released one; tokenizer_config.json with the class
and auto_map alone; prompts, `process_response`, stops 2 (ChatGLM2) and 2, 64795, 64797 (ChatGLM3), which no
file names. Quoted: ids of control tokens behind the pieces, and "你好" as [gMASK] sop <|user|> 30910 13 36474
54591 <|assistant|>. GLM-4: tokenizer_config.json read (class, tokens, template without tools), tokenizer.model
is a file of tiktoken; eos ids quoted of a log. What GLM-4's code does to a reply's text is known from memory
alone: it is shown as it is.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from tests.families.released.served import Released, assert_served, write_json
from tests.reference_models.common import Turn, read_json
from tests.reference_models.text_models import chatglm
from tests.shared.text.test_tokenizer_formats import GLM4, tiktoken_file
from tests.support.tokenizers import SENTENCES, trained_sentencepiece

CONTROL = ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *chatglm.ROLES]
CHATS: list[list[Turn]] = [
    [("user", "What is red?")],
    [("user", "图中\n有  什么"), ("assistant", "A circle."), ("user", "\nAnd then?")],
]
PIECES = {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False}
GLM4_TOKENS = [
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", *chatglm.ROLES),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
]
GLM4_TEMPLATE = (
    "[gMASK]<sop>{% for item in messages %}{% if item['content'] %}<|{{ item['role'] }}|>{{ item['metadata'] }}\n"
    "{{ item['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def shown(text: str) -> str:
    """`process_response` of a reply without the name of a tool."""
    return text.strip().replace("[[训练时间]]", "2023年")


@pytest.mark.parametrize("generation", [2, 3])
def test_chatglm2_and_3_served_as_released(tmp_path: Path, redis_url: str, generation: int) -> None:
    folder = tmp_path / "under-test"
    name = f"THUDM/chatglm{generation}-6b"
    chatglm.write_checkpoint(folder, generation=generation, _name_or_path=name)
    reference = chatglm.ChatGlm(folder, generation)
    (folder / "tokenizer.json").unlink()
    remote = {
        "AutoConfig": "configuration_chatglm.ChatGLMConfig",
        "AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration",
    }
    config = {**read_json(folder / "config.json"), "auto_map": remote}
    del config["vocab_size"]
    write_json(folder / "config.json", config)
    settings = {"tokenizer_class": "ChatGLMTokenizer", "remove_space": False}
    settings |= {"auto_map": {"AutoTokenizer": ["tokenization_chatglm.ChatGLMTokenizer", None]}}
    write_json(folder / "tokenizer_config.json", settings)
    words = trained_sentencepiece(folder / "tokenizer.model", SENTENCES * 20, **PIECES)
    ids = {token: words.vocab_size() + place for place, token in enumerate(CONTROL)}

    def prompt_ids(turns: Sequence[Turn]) -> list[int]:
        found = [ids["[gMASK]"], ids["sop"]]
        if generation == 2:
            return [*found, *words.encode(chatglm.ChatGlm.rounds([text for _, text in turns]))]
        for role, text in turns:
            found += [ids[f"<|{role}|>"], *words.encode("\n"), *words.encode(text)]
        return [*found, ids["<|assistant|>"]]

    ends = [2] if generation == 2 else [2, ids["<|user|>"], ids["<|observation|>"]]
    drawn = words.encode("The red\n 图中,")
    model = Released(folder, prompt_ids, reference.generate, ends, drawn, shown)
    assert_served(model, CHATS, redis_url)


def test_glm4_served_as_released(tmp_path: Path, redis_url: str) -> None:
    folder = tmp_path / "under-test"
    chatglm.write_checkpoint(folder, generation=4)
    reference = chatglm.ChatGlm(folder, 4)
    (folder / "tokenizer.json").unlink()
    ranks = tiktoken_file(folder / "tokenizer.model", GLM4)
    ids = {token: len(ranks) + place for place, token in enumerate(GLM4_TOKENS)}
    ends = [ids[token] for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    config = read_json(folder / "config.json") | {"eos_token_id": ends, "pad_token_id": ends[0]}
    config |= {"num_hidden_layers": config["num_layers"]}
    write_json(folder / "config.json", config)
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    settings: dict[str, Any] = {
        "tokenizer_class": "ChatGLM4Tokenizer",
        "added_tokens_decoder": {
            str(number): {"content": token, "special": True, **flags}
            for token, number in ids.items()
        },
        "additional_special_tokens": GLM4_TOKENS,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "model_max_length": 128_000,
        "chat_template": GLM4_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)
    words = tiktoken.Encoding("glm", pat_str=GLM4, mergeable_ranks=ranks, special_tokens={})

    def prompt_ids(turns: Sequence[Turn]) -> list[int]:
        found = [ids["[gMASK]"], ids["<sop>"]]
        for role, text in turns:
            found += [ids[f"<|{role}|>"], *words.encode(f"\n{text}")]
        return [*found, ids["<|assistant|>"]]

    drawn = words.encode("The red\n 图中,")
    model = Released(folder, prompt_ids, reference.generate, ends, drawn)
    assert_served(model, CHATS, redis_url)

"""Qwen-7B-Chat in the two forms that it is released in.

Read in copies of the repositories: keys of config.json of 2023-08 (n_embd, n_layer, n_head, ffn_hidden_size,
n_positions, padded_vocab_size, eos 151643) and later ones (hidden_size, intermediate_size, no eos);
qwen.tiktoken alone, class QWenTokenizer; generation_config.json with chat_format chatml, eos and pad 151643 and
no end of a turn; prompts, stops 151645 and 151644 beside that, and replies without white space at their ends by
its code.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.families.released.served import Released, assert_served, write_json
from tests.reference_models import qwen_vl, tiktoken_words
from tests.reference_models.common import Generated, Turn, read_json

CHATS: list[list[Turn]] = [
    [("user", "\n\nWhat is red?")],
    [("system", "Be brief."), ("user", "图中"), ("assistant", "A circle."), ("user", "And then?")],
]
FIRST_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "padded_vocab_size": "vocab_size",
    "n_positions": "max_position_embeddings",
}


@pytest.mark.parametrize("form", ["2023-08", "later"])
def test_served_as_released(tmp_path: Path, redis_url: str, form: str) -> None:
    folder = qwen_vl.write_checkpoint(tmp_path / "under-test")
    reference = qwen_vl.QwenVL(folder)
    ranks = len(reference.words.ranks)
    config = read_json(folder / "config.json")
    del config["visual"]
    if form == "2023-08":
        config |= {first: config.pop(later) for first, later in FIRST_KEYS.items()}
        config |= {"bos_token_id": ranks, "eos_token_id": ranks}
    write_json(folder / "config.json", config)
    tensors = load_file(folder / "model.safetensors")
    text = {name: tensor for name, tensor in tensors.items() if ".visual." not in name}
    save_file(text, folder / "model.safetensors", {"format": "pt"})
    generation = {"chat_format": "chatml", "eos_token_id": ranks, "pad_token_id": ranks}
    generation |= {"max_new_tokens": 512, "top_k": 0, "top_p": 0.8, "do_sample": True}
    if form == "2023-08":
        generation |= {"stop_words_ids": [[ranks]]}
    write_json(folder / "generation_config.json", generation)

    def prompt_ids(turns: Sequence[Turn]) -> list[int]:
        return reference.prompt_ids(turns, [])

    def generate(ids: list[int], count: int) -> Generated:
        return reference.generate(ids, [], count)

    places = (tiktoken_words.END_OF_TEXT, tiktoken_words.START, tiktoken_words.END)
    ends = [ranks + place for place in places]
    drawn = reference.words.encode("The red\n 图中,")
    assert_served(Released(folder, prompt_ids, generate, ends, drawn, str.strip), CHATS, redis_url)

"""A folder without tokenizer.json and without safetensors is served by the files that it has."""

import json
from pathlib import Path
from typing import Any

import httpx

from tests.support.checkpoints import as_torch_files, load_reference, make_checkpoint
from tests.support.greedy_reference import assert_same_up_to_ties, greedy_tokens
from tests.support.services_in_process import services_in_process
from tests.support.tokenizers import trained_sentencepiece

LLAMA: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "remove_extra_whitespaces": False,
    "normalization_rule_name": "identity",
}
PROMPT = "The red circle  图中有一个"


def test_a_sentencepiece_model_and_pickled_weights(tmp_path: Path, redis_url: str) -> None:
    words = trained_sentencepiece(tmp_path / "words.model", **LLAMA)
    sizes = {"vocab_size": words.vocab_size()}
    folder = make_checkpoint(tmp_path / "model", "llama", text=sizes)
    reference = load_reference(folder)
    for file in folder.glob("*token*"):
        file.unlink()
    (tmp_path / "words.model").rename(folder / "tokenizer.model")
    named = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    as_torch_files(folder)
    expected, logits = greedy_tokens(reference, [words.bos_id(), *words.encode(PROMPT)], 12)
    request = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with services_in_process(folder, redis_url) as addresses:
        answer = httpx.post(
            f"{addresses.base_url}/completions",
            json={"model": folder.name, **request, "return_token_ids": True},
            timeout=60,
        ).json()
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == [words.bos_id(), *words.encode(PROMPT)]
    assert_same_up_to_ties(choice["token_ids"], expected, logits)
    assert choice["text"] == words.decode(choice["token_ids"])

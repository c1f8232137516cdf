"""A folder without tokenizer.json and without safetensors is served by the files that it has."""

import json
from pathlib import Path
from typing import Any

import httpx

from services.launcher import cli
from tests.support import flm
from tests.support.checkpoints import as_torch_files, load_reference, make_checkpoint
from tests.support.decoder.greedy_reference import assert_same_up_to_ties, greedy_tokens
from tests.support.processes.services_in_process import services_in_process
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


def test_a_file_of_fastllm_is_converted_and_served(tmp_path: Path, redis_url: str) -> None:
    """A vocabulary that is matched by its longest token: a text that has none is the client's mistake."""
    source = make_checkpoint(tmp_path / "source", "llama")
    config = json.loads((source / "config.json").read_text())
    pairs = {key: str(value) for key, value in config.items()}
    pairs |= {"bos_token_id": "1", "eos_token_id": "2", "user_role": "<s>", "bot_role": "the"}
    file = flm.Flm(pairs, flm.TRIE, flm.tensors(source, flm.INT4_GROUP))
    folder = tmp_path / "model"
    path = file.write(tmp_path / "m.flm")
    assert cli.run(["convert", "flm", str(path), str(folder), "--dtype", "float32"]) == 0
    prompt = [1, *(flm.reference_ids(flm.TRIE, "thermal<n>图中".encode()) or [])]
    expected, logits = greedy_tokens(load_reference(folder), prompt, 12)
    request = {"model": "model", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    talk = {**request, "messages": [{"role": "user", "content": "thermal"}]}
    with (
        services_in_process(folder, redis_url) as addresses,
        httpx.Client(base_url=f"{addresses.base_url}/", timeout=60) as client,
    ):
        known = {**request, "prompt": "thermal\n图中", "return_token_ids": True}
        answer = client.post("completions", json=known).json()
        refused = client.post("completions", json={**request, "prompt": "Q"})
        chat = client.post("chat/completions", json=talk).json()
    choice = answer["choices"][0]
    assert choice["prompt_token_ids"] == prompt
    assert_same_up_to_ties(choice["token_ids"], expected, logits)
    assert refused.status_code == 400 and "no token" in refused.json()["error"]["message"]
    assert chat["usage"]["prompt_tokens"] == 3

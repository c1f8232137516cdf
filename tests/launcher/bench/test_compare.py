"""The table of workloads, and the checkpoints that it is made for."""

import asyncio
import json
import random
from pathlib import Path

import pytest
import transformers

from benchmarks.checkpoints import __main__ as checkpoints
from benchmarks.checkpoints.words import make_tokenizer, save_tokenizer
from benchmarks.load.words import WordPrompts
from benchmarks.system import compare
from shared.text.text_fold import TokenBytes
from tests.support.network.openai_like_server import events, playing


async def test_a_row_for_each_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    few = ["--least", "1", "--scale", "0.01", "--output", str(file)]
    async with playing() as server:
        command = ["text-1", "image-4", "toy-32", "--base-url", server.url, *few]
        assert await asyncio.to_thread(compare.main, command) == 0
        again = ["text-1", "image-1", "--base-url", server.url, "--against", str(file), *few]
        assert await asyncio.to_thread(compare.main, again) == 0
    printed = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in printed]
    assert names == ["workload", "text-1", "image-4", "toy-32", "workload", "text-1", "image-1"]
    assert " x " in printed[5] and " x " not in printed[6]
    text = next(b for b in server.bodies if isinstance(b.get("prompt"), list))
    assert len(text["prompt"]) == 263
    pictures = [b for b in server.bodies if "messages" in b]
    assert pictures and all(len(b["messages"][0]["content"]) == 2 for b in pictures)
    assert set(json.loads(file.read_text())) == {"text-1", "image-1"}


async def test_a_workload_that_fails_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    async with playing(answer=lambda body: events(2)[:1], framing="chunked") as server:
        server.refuses = ("ignore_eos",)
        flags = ["--base-url", server.url, "text-1", "--least", "2", "--scale", "0.01"]
        assert await asyncio.to_thread(compare.main, flags) == 1
    assert "ignore_eos is unknown" in capsys.readouterr().out


def test_a_tokenizer_of_any_size(tmp_path: Path) -> None:
    words = make_tokenizer(2_000, ("<image>",))
    save_tokenizer(words, tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == len(loaded.get_vocab()) == 2_000
    text = "the people of 1234 states,  naïve 图中 code()\n\n"
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.convert_tokens_to_ids("<|im_end|>") == loaded.eos_token_id == 1_999
    table = TokenBytes.from_tokenizer_json(tmp_path / "tokenizer.json")
    ids = list(range(0, 1_990, 7))
    assert table.text(ids, skip_special_tokens=True) == loaded.decode(ids)
    drawn = WordPrompts(tmp_path).draw(random.Random(3), 200)
    assert len(loaded.encode(drawn)) == 200
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]
    shown = loaded.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert shown == "<|im_start|>user\n<image>\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_checkpoint_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    assert checkpoints.main(["toy", str(folder)]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == 32_000 and model.config.num_hidden_layers == 2
    assert checkpoints.main(["toy", str(folder)]) == 2  # not empty
    assert checkpoints.main(["nothing", str(tmp_path / "x")]) == 2

"""Pictures in shared memory by MindIE-LLM's ids, from the REST API to the answer's tokens."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.artifacts.mindie_shm import BLOCKS
from tests.reference_models import qwen_vl, wemm
from tests.support.pictures import data_url, png
from tests.support.processes.services_in_process import services_in_process

WRITERS = {
    "qwen_vl": lambda path: qwen_vl.write_checkpoint(path),
    "wemm": lambda path: wemm.write_checkpoint(path, stock=False),
}
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", WRITERS)
def test_answers_are_those_to_the_picture_itself(
    model: str, redis_url: str, tmp_path: Path, short_tmp: Path
) -> None:
    folder, lists = WRITERS[model](tmp_path / model), short_tmp / "lists"
    url = data_url(png(1, (300, 180)))
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": parts}]}
    with (
        services_in_process(folder, redis_url, mindie_shm=lists) as system,
        httpx.Client(base_url=system.base_url, timeout=120, verify=False) as http,
    ):

        def post(path: str, **body: Any) -> Any:
            return http.post(path, json=body)

        answer = post("/chat/completions", **chat, **GREEDY).json()
        plain = post("/tokenize", **chat).json()["tokens"]
        assert plain == answer["prompt_token_ids"] and min(plain) >= 0
        name = f"{lists}/asked.txt"
        ids = post("/tokenize", **chat, shm_name_save_path=name).json()["tokens"]
        assert len(ids) == len(plain) and min(ids) < -(1 << 58)
        blocks = (lists / "asked.txt").read_text().split()

        for refused, param in (
            ({"prompt": ids, "echo": True}, "echo"),
            ({"prompt": [ids, ids]}, "prompt[0]"),
            ({"prompt": "text", "shm_name_save_path": name}, "shm_name_save_path"),
            ({"prompt": ids, "shm_name_save_path": "../asked.txt"}, "shm_name_save_path"),
            ({"prompt": [*ids, -(1 << 70)]}, f"prompt[{len(ids)}]"),
            ({"prompt": [*ids[:-1], -5]}, "prompt"),
        ):
            reply = post("/completions", **refused, **GREEDY)
            assert reply.status_code == 400, refused
            assert reply.json()["error"]["param"].startswith(param)

        expected = answer["choices"][0]["token_ids"]
        for more in ({}, {"shm_name_save_path": "asked.txt"}):
            made = post("/completions", prompt=ids, **more, **GREEDY).json()["choices"][0]
            assert made["prompt_token_ids"] == plain
            assert made["token_ids"] == expected
        assert not (lists / "asked.txt").exists()
        assert not any((BLOCKS / block).exists() for block in blocks)
        gone = post("/completions", prompt=ids, **GREEDY)
        assert gone.status_code == 400 and "no block" in gone.json()["error"]["message"]
        assert post("/chat/completions", **chat, **GREEDY).status_code == 200

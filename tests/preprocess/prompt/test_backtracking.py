"""A tokenizer whose regular expression backtracks too often in a text: its library panics, one request is refused."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.gateway.reading.sampling.bad_words import read_bad_words
from shared.errors import InvalidRequest, from_failure
from shared.net.rpc.errors import calling
from tessera.preprocess.v1.preprocess_pb2 import (
    Conversation,
    PrepareManyRequest,
    PrepareManyResponse,
    PrepareRequest,
)
from tests.support.preprocess.service import PreprocessMaker, text, turn

LONG = "a" * 60 + "b"


@pytest.fixture(scope="module")
def folder(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("backtracking") / "model"
    shutil.copytree(llama_folder, made)
    path = made / "tokenizer.json"
    content = json.loads(path.read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    steps = [step for step in [content["pre_tokenizer"]] if step]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, *steps]}
    path.write_text(json.dumps(content))
    return made


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("prompt", PrepareRequest(text=LONG)),
        (
            "messages",
            PrepareRequest(conversation=Conversation(messages=[turn("user", text(LONG))])),
        ),
    ],
)
async def test_the_request_is_refused_at_once(
    folder: Path, make_preprocess: PreprocessMaker, field: str, request_: PrepareRequest
) -> None:
    async with make_preprocess(folder) as service:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="retry-limit") as caught, calling("it"):
                await service.stub.Prepare(request_, timeout=60)
            assert caught.value.metadata["field"] == field
        await service.prepare(PrepareRequest(text="hello"))


async def test_others_of_its_message_are_answered(
    folder: Path, make_preprocess: PreprocessMaker
) -> None:
    async with make_preprocess(folder) as service:
        call = service.stub.PrepareMany(timeout=60)
        prompts = [PrepareRequest(text="hello"), PrepareRequest(text=LONG)]
        await call.write(PrepareManyRequest(prompts=prompts))
        answer = await call.read()
        assert isinstance(answer, PrepareManyResponse)
        good, bad = answer.results
        assert good.prepared.token_ids
        assert from_failure(bad.failure).metadata["field"] == "prompt"
        await call.done_writing()


def test_a_bad_word_names_its_place(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with pytest.raises(InvalidRequest, match="retry-limit") as caught:
        read_bad_words(["fine", LONG], tokenizer)
    assert caught.value.metadata["field"] == "bad_words[1]"

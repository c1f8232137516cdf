"""Adapters by name, in every API that names a model."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from inference import inference_pb2, inference_pb2_grpc
from shared.lora.adapter import LoraAdapter
from shared.net.channels import open_channel
from tessera.gateway.v1 import chat_pb2, chat_pb2_grpc
from tests.support.gateway.stage import MODEL, Stage, open_stage, write_model
from tests.support.lora_folder import write_adapter

Ask = Callable[[httpx.AsyncClient, str], Awaitable[httpx.Response]]
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def adapter(tmp_path: Path) -> LoraAdapter:
    return LoraAdapter.open(write_adapter(tmp_path / "adapter"), 64)


@pytest.fixture
async def stage(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, adapter: LoraAdapter
) -> AsyncIterator[Stage]:
    modules = f"sql={adapter.folder},other={adapter.folder}"
    async with open_stage(redis_url, model_folder, tokenizer, lora_modules=modules) as opened:
        yield opened


@pytest.fixture
async def adapted(
    redis_url: str, tmp_path: Path, tokenizer: Tokenizer, adapter: LoraAdapter
) -> AsyncIterator[Stage]:
    """Of a model whose folder names an adapter."""
    folder = write_model(tmp_path / MODEL, tokenizer)
    (folder / "lora_adapter.json").write_text(json.dumps({"sql": str(adapter.folder)}))
    async with open_stage(redis_url, folder, tokenizer) as opened:
        yield opened


def _post(path: str, **body: Any) -> Ask:
    async def ask(http: httpx.AsyncClient, name: str) -> httpx.Response:
        filled = {k: name if v == "NAME" else v for k, v in body.items()}
        return await http.post(path.replace("NAME", name), json=filled)

    return ask


def _with_parameters(path: str) -> Ask:
    async def ask(http: httpx.AsyncClient, name: str) -> httpx.Response:
        return await http.post(path, json={"inputs": "Hi", "parameters": {"adapter_id": name}})

    return ask


ASKS = {
    "chat": _post("/v1/chat/completions", model="NAME", messages=MESSAGES),
    "completion": _post("/v1/completions", model="NAME", prompt="Hi"),
    "responses": _post("/v1/responses", model="NAME", input="Hi"),
    "messages": _post("/v1/messages", model="NAME", messages=MESSAGES, max_tokens=64),
    "ollama": _post("/api/chat", model="NAME", messages=MESSAGES, stream=False),
    "ollama tag": _post("/api/generate", model="NAME", prompt="Hi", stream=False),
    "triton": _post("/v2/models/NAME/generate", text_input="Hi"),
    "vllm": _post("/generate", model="NAME", prompt="Hi"),
    "tgi": _with_parameters("/generate"),
    "mindie": _with_parameters("/infer"),
}


@pytest.mark.parametrize("api", ASKS)
async def test_a_name_picks_its_adapter(stage: Stage, adapter: LoraAdapter, api: str) -> None:
    name = "sql:latest" if api == "ollama tag" else "sql"
    reply = await ASKS[api](stage.http, name)
    assert reply.status_code == 200, reply.text
    [played] = stage.scheduler.played.values()
    assert (played.spec.model, played.spec.lora_id) == ("sql", adapter.lora_id)


@pytest.mark.parametrize("api", ASKS)
async def test_the_name_of_no_adapter_is_refused(stage: Stage, api: str) -> None:
    reply = await ASKS[api](stage.http, "absent")
    assert reply.status_code in (400, 404)
    assert not stage.scheduler.played


async def test_grpc_picks_adapters_and_lists_them(stage: Stage, adapter: LoraAdapter) -> None:
    async with open_channel(stage.gateway.grpc_address) as channel:
        stub = chat_pb2_grpc.ChatServiceStub(channel)
        listed = await stub.ListModels(chat_pb2.ListModelsRequest())
        assert [model.id for model in listed.models] == [MODEL, "sql", "other"]
        _ = [
            event async for event in stub.Complete(chat_pb2.CompleteRequest(model="sql", text="Hi"))
        ]
    [played] = stage.scheduler.played.values()
    assert played.spec.lora_id == adapter.lora_id


async def test_the_model_itself_has_no_adapter(stage: Stage) -> None:
    for reply in (await stage.chat(model=MODEL), await stage.chat()):
        assert reply.json()["model"] == MODEL
    assert not any(played.spec.lora_id for played in stage.scheduler.played.values())


@pytest.mark.parametrize("api", ASKS)
async def test_the_adapter_of_the_models_folder_answers_for_the_model(
    adapted: Stage, adapter: LoraAdapter, api: str
) -> None:
    """And `base` is the model without it, where the name of an adapter may stand and where that of a model may."""
    name = "base:latest" if api == "ollama tag" else "base"
    assert (await ASKS[api](adapted.http, name)).status_code == 200
    if api not in ("tgi", "mindie"):
        assert (await ASKS[api](adapted.http, MODEL)).status_code == 200
    else:
        path = "/generate" if api == "tgi" else "/infer"
        assert (await adapted.http.post(path, json={"inputs": "Hi"})).status_code == 200
    asked = [(one.spec.model, one.spec.lora_id) for one in adapted.scheduler.played.values()]
    assert asked == [(MODEL, ""), ("sql", adapter.lora_id)]


async def test_a_default_adapter_is_shown(adapted: Stage) -> None:
    cards = (await adapted.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"], card["adapter"]) for card in cards] == [
        (MODEL, None, "sql"),
        ("base", None, None),
        ("sql", MODEL, None),
    ]
    for model in (None, "dummy", MODEL):  # what names no model means it
        assert (await adapted.chat(model=model)).json()["model"] == "sql"


async def test_adapters_are_listed_with_their_parent(stage: Stage) -> None:
    cards = (await stage.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        (MODEL, None),
        ("sql", MODEL),
        ("other", MODEL),
    ]
    one = (await stage.http.get("/v1/models/other")).json()
    assert (one["id"], one["parent"]) == ("other", MODEL)
    assert [m["name"] for m in (await stage.http.get("/api/tags")).json()["models"]] == [
        MODEL,
        "sql",
        "other",
    ]


async def test_metadata_of_tensors_have_the_adapters_name(stage: Stage) -> None:
    for name in (MODEL, "sql"):
        for path in (f"/v2/models/{name}", f"/v2/models/{name}/config"):
            assert (await stage.http.get(path)).json()["name"] == name
    async with open_channel(stage.gateway.grpc_address) as channel:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        about = await stub.ModelMetadata(inference_pb2.ModelMetadataRequest(name="sql"))
    assert about.name == "sql"


async def test_an_answer_has_the_adapters_name(stage: Stage) -> None:
    assert (await stage.chat(model="sql")).json()["model"] == "sql"

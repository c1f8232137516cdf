"""Adapters that are loaded and unloaded while the system runs, over vLLM's routes."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from grpc.aio import AioRpcError
from tokenizers import Tokenizer

from services.gateway.apis import APIS
from services.gateway.timings import USUAL
from shared.errors import ServingError
from shared.lora.adapter import LoraAdapter
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from tessera.gateway.v1.adapters_pb2 import (
    AdapterEntry,
    ListAdaptersRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)
from tessera.gateway.v1.adapters_pb2_grpc import AdapterServiceStub
from tests.support.gateway.stage import MODEL, Stage, open_stage
from tests.support.lora_folder import write_adapter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "adapters"


@pytest.fixture
async def stage(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, folder: Path
) -> AsyncIterator[Stage]:
    fixed = write_adapter(folder / "fixed", 9)
    changes = {"allowed_adapter_dir": folder, "lora_modules": f"fixed={fixed}"}
    async with open_stage(redis_url, model_folder, tokenizer, **changes) as opened:
        yield opened


async def load(stage: Stage, name: str, path: Path | str, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return await stage.http.post("/v1/load_lora_adapter", json=body)


async def unload(stage: Stage, name: str) -> httpx.Response:
    return await stage.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def digest(folder: Path) -> str:
    return LoraAdapter.open(folder, 64).lora_id


class OverGrpc:
    """The same over gRPC, with replies as REST has them."""

    def __init__(self, channel: Any, key: str = "") -> None:
        self._stub = AdapterServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()

    async def load(self, name: str, path: Path | str, *, in_place: bool = False) -> str:
        asked = LoadAdapterRequest(lora_name=name, lora_path=str(path), load_inplace=in_place)
        return await self._said(self._stub.LoadAdapter(asked, metadata=self._metadata))

    async def unload(self, name: str) -> str:
        asked = UnloadAdapterRequest(lora_name=name)
        return await self._said(self._stub.UnloadAdapter(asked, metadata=self._metadata))

    async def listed(self) -> list[AdapterEntry]:
        answer = await self._stub.ListAdapters(ListAdaptersRequest(), metadata=self._metadata)
        return list(answer.adapters)

    async def _said(self, call: Any) -> str:
        """What is not known, or the reason of the refusal as REST has it."""
        try:
            with calling("gateway"):
                answer = await call
        except ServingError as error:
            return error.reason.lower()
        not_known: str = answer.not_known
        return not_known


def error(reply: httpx.Response) -> str:
    assert reply.status_code in (400, 404), reply.text
    code: str = reply.json()["error"]["code"]
    return code


async def test_an_adapter_is_served_from_its_load_to_its_unload(stage: Stage, folder: Path) -> None:
    own = write_adapter(folder / "own", 1)
    assert (await stage.chat(model="sql")).status_code == 404
    loaded = await load(stage, "sql", own)
    assert (loaded.status_code, loaded.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    assert (await stage.chat(model="sql")).json()["model"] == "sql"
    [played] = stage.scheduler.played.values()
    assert (played.spec.model, played.spec.lora_id) == ("sql", digest(own))
    cards = (await stage.http.get("/v1/models")).json()["data"]
    assert {card["id"]: card["parent"] for card in cards} == {
        MODEL: None,
        "fixed": MODEL,
        "sql": MODEL,
    }
    gone = await unload(stage, "sql")
    assert (gone.status_code, gone.text) == (
        200,
        "Success: LoRA adapter 'sql' removed successfully.",
    )
    assert (await stage.chat(model="sql")).status_code == 404
    assert error(await unload(stage, "sql")) == "adapter_not_found"


async def test_another_gateway_serves_what_one_has_loaded(
    stage: Stage, folder: Path, redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    """It does so by the time the load is answered, and one that starts later does too."""
    own = write_adapter(folder / "own", 1)
    async with open_stage(redis_url, model_folder, tokenizer, allowed_adapter_dir=folder) as other:
        assert (await load(other, "sql", own)).status_code == 200
        assert (await stage.http.get("/v1/models/sql")).status_code == 200
        async with open_stage(redis_url, model_folder, tokenizer) as later:
            assert (await later.http.get("/v1/models/sql")).status_code == 200
        await unload(other, "sql")
        assert (await stage.http.get("/v1/models/sql")).status_code == 404


async def test_a_name_gets_other_weights_only_where_that_is_asked_for(
    stage: Stage, folder: Path
) -> None:
    one, other = write_adapter(folder / "one", 1), write_adapter(folder / "other", 2)
    assert (await load(stage, "sql", one)).status_code == 200
    refused = await load(stage, "sql", other)
    assert error(refused) == "adapter_loaded"
    assert "already been loaded" in refused.json()["error"]["message"]
    await stage.chat(model="sql")
    assert (await load(stage, "sql", other, load_inplace=True)).status_code == 200
    await stage.chat(model="sql")
    found = [played.spec.lora_id for played in stage.scheduler.played.values()]
    assert found == [digest(one), digest(other)]


@pytest.mark.parametrize(
    "path",
    [
        *(
            "../outside",
            "/outside",
            "link",
            "files",
            "",
            ".",
            "absent",
            "fixed/adapter_config.json",
        ),
        *("a" * 300, "a/" * 3000, "\0"),
    ],
)
async def test_only_folders_below_the_allowed_one_are_read(
    stage: Stage, folder: Path, path: str
) -> None:
    """Nor is one that a link leads to, nor one whose files are links."""
    outside = write_adapter(folder.parent / "outside", 3)
    (folder / "link").symlink_to(outside)
    (folder / "files").mkdir()
    for file in outside.iterdir():
        (folder / "files" / file.name).symlink_to(file)
    where = str(outside) if path == "/outside" else path
    assert (await load(stage, "sql", where)).status_code == 400
    assert "sql" not in stage.gateway.model.adapters


async def test_what_is_not_served_is_refused_by_its_name(stage: Stage, folder: Path) -> None:
    own = write_adapter(folder / "own", 1)
    dora = write_adapter(folder / "dora", 1, use_dora=True)
    large = write_adapter(folder / "large", 1, rank=65)
    assert error(await load(stage, MODEL, own)) == "adapter_name_taken"
    assert error(await load(stage, "fixed", own)) == "adapter_name_taken"
    assert error(await unload(stage, "fixed")) == "adapter_name_taken"
    assert error(await load(stage, "a\nb", own)) == "invalid_value"
    assert error(await load(stage, "sql", dora)) == "unsupported_adapter"
    assert error(await load(stage, "sql", large)) == "bad_adapter"
    assert error(await stage.http.post("/v1/load_lora_adapter", json={})) == "invalid_value"
    assert error(await stage.http.post("/v1/unload_lora_adapter", json={})) == "invalid_value"


async def test_a_decoder_that_cannot_read_it_leaves_all_as_it_was(
    stage: Stage, folder: Path
) -> None:
    one, other = write_adapter(folder / "one", 1), write_adapter(folder / "other", 2)
    await load(stage, "sql", one)
    stage.scheduler.cannot_read = "it does not fit"
    for name in ("sql", "new"):
        refused = await load(stage, name, other, load_inplace=True)
        assert error(refused) == "bad_adapter"
        assert "it does not fit" in refused.json()["error"]["message"]
    assert stage.gateway.model.adapters["sql"] == digest(one)
    assert "new" not in stage.gateway.model.adapters


async def test_grpc_loads_and_unloads_as_rest_does(stage: Stage, folder: Path) -> None:
    own, other = write_adapter(folder / "own", 1), write_adapter(folder / "other", 2)
    async with open_channel(stage.gateway.grpc_address) as channel:
        grpc = OverGrpc(channel)
        assert await grpc.load("sql", own) == ""
        assert (await stage.chat(model="sql")).json()["model"] == "sql"
        fixed, loaded = await grpc.listed()
        assert (fixed.lora_name, fixed.is_fixed, fixed.is_default) == ("fixed", True, False)
        assert (loaded.lora_name, loaded.lora_id, loaded.is_fixed) == ("sql", digest(own), False)
        refused = [
            ("sql", other),
            ("fixed", own),
            (MODEL, own),
            ("base", own),
            ("", own),
            ("a\nb", own),
        ]
        for name, path in [*refused, ("new", Path("../outside"))]:
            assert await grpc.load(name, path) == error(await load(stage, name, path))
        assert await grpc.load("new", "") == "invalid_value"
        assert await grpc.load("sql", other, in_place=True) == ""
        assert stage.gateway.model.adapters["sql"] == digest(other)
        assert await grpc.unload("sql") == ""
        assert [await grpc.unload(name) for name in ("sql", "fixed")] == [
            "adapter_not_found",
            "adapter_name_taken",
        ]
    assert (await stage.chat(model="sql")).status_code == 404


async def test_who_does_not_answer_in_time_is_named(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, folder: Path
) -> None:
    own = write_adapter(folder / "own", 1)
    timings = replace(USUAL, adapters_s=0.1)
    allowed = {"allowed_adapter_dir": folder}
    async with open_stage(redis_url, model_folder, tokenizer, APIS, timings, **allowed) as stage:
        stage.scheduler.reads_adapters = False
        loaded = await load(stage, "sql", own)
        assert (loaded.status_code, loaded.text) == (
            200,
            "Success: LoRA adapter 'sql' added successfully. Not known: 1 of the decoders did not say within 0.1 s"
            " that this was done.",
        )
        async with open_channel(stage.gateway.grpc_address) as channel:
            assert "1 of the decoders" in await OverGrpc(channel).load("other", own)


async def test_without_an_allowed_folder_nothing_is_loaded(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, folder: Path
) -> None:
    own = write_adapter(folder / "own", 1)
    async with open_stage(redis_url, model_folder, tokenizer) as stage:
        for reply in (await load(stage, "sql", own), await unload(stage, "sql")):
            assert error(reply) == "adapters_not_allowed"
            assert "--allowed-adapter-dir" in reply.json()["error"]["message"]


async def test_who_has_no_key_loads_nothing(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, folder: Path
) -> None:
    own = write_adapter(folder / "own", 1)
    keyed = {"api_key": "secret", "allowed_adapter_dir": folder}
    async with open_stage(redis_url, model_folder, tokenizer, **keyed) as stage:
        assert (await load(stage, "sql", own)).status_code == 401
        assert (await unload(stage, "sql")).status_code == 401
        async with open_channel(stage.gateway.grpc_address) as channel:
            assert await OverGrpc(channel).load("sql", own) == "invalid_api_key"
            assert await OverGrpc(channel).unload("sql") == "invalid_api_key"
            with pytest.raises(AioRpcError, match="UNAUTHENTICATED"):
                await OverGrpc(channel).listed()
            assert await OverGrpc(channel, "secret").load("sql", own) == ""
        assert json.loads((await stage.http.get("/version")).content)

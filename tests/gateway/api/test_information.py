"""Models, health, metrics, tokenizing, and the page."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import InferenceClient
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from services.gateway.gateway import open_gateway
from services.launcher.redis.embedded_redis import EmbeddedRedis
from tests.support.gateway.stage import ANSWER, MODEL, Stage, open_stage, until_ready


async def test_models_are_listed(stage: Stage) -> None:
    models = [model async for model in stage.openai.models.list()]
    assert [model.id for model in models] == [MODEL]
    card = (await stage.http.get(f"/v1/models/{MODEL}")).json()
    assert card["max_model_len"] == 512 and card["object"] == "model"


async def test_whose_code_runs_each_part_is_said(stage: Stage) -> None:
    (card,) = (await stage.http.get("/v1/models")).json()["data"]
    decoder = {
        "code": "transformers 5",
        "off": ["prefix reuse"],
        "largest_difference": 2e-6,
        "ranks": 2,
    }
    assert card["parts"] == {"prompt": {"code": "native", "off": []}, "decoder": decoder}


async def test_metrics_have_vllm_names(stage: Stage) -> None:
    tokens = stage.says(ANSWER)
    await stage.chat()
    await stage.chat(stream=True)
    await stage.chat(temperature=9)
    page = (await stage.http.get("/metrics")).text
    values = {
        (sample.name, sample.labels.get("finished_reason") or sample.labels.get("stage")): (
            sample.value
        )
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if "le" not in sample.labels and sample.labels.get("engine", "0") == "0"
    }
    assert values["vllm:num_requests_running", None] == 3
    assert values["vllm:num_requests_waiting", None] == 0
    assert values["vllm:kv_cache_usage_perc", None] == 0.25
    assert values["tessera_step_target_seconds", None] == 0.25
    assert values["tessera_step_predicted_seconds", None] == 0.125
    assert values["tessera_step_prompt_tokens", None] == 48
    assert values["tessera_step_duration_seconds_count", None] == 10
    assert values["tessera_step_duration_seconds_sum", None] == 1.75
    assert 'tessera_step_duration_seconds_bucket{le="0.25",model_name="tiny-vl"} 9.0' in page
    assert values["vllm:prompt_tokens_total", None] == 22
    assert values["vllm:generation_tokens_total", None] == 2 * len(tokens)
    assert values["vllm:request_success_total", "stop"] == 2
    assert values["vllm:time_to_first_token_seconds_count", None] == 2
    assert values["vllm:e2e_request_latency_seconds_count", None] == 2
    assert values["vllm:inter_token_latency_seconds_count", None] > 0
    assert values["tessera_stage_duration_seconds_count", "preprocess"] == 2
    assert 'tessera_rejections_total{reason="invalid_value"} 1.0' in page
    labelled = re.findall(r'^vllm:\w+\{.*model_name="tiny-vl"', page, re.M)
    assert len(labelled) == len(re.findall(r"^vllm:", page, re.M))


async def test_tokenize_and_back(stage: Stage) -> None:
    ids = stage.tokenizer.encode("The red 🦊").ids
    reply = (await stage.http.post("/tokenize", json={"prompt": "The red 🦊"})).json()
    assert reply == {"count": len(ids), "max_model_len": 512, "tokens": ids}
    back = (await stage.http.post("/detokenize", json={"tokens": ids})).json()
    assert back == {"prompt": "The red 🦊"}
    messages = [{"role": "user", "content": "hello"}]
    reply = (await stage.http.post("/tokenize", json={"messages": messages})).json()
    assert reply["count"] > 0
    assert (await stage.http.post("/tokenize", json={})).status_code == 400
    assert (await stage.http.post("/detokenize", json={"tokens": [9999]})).status_code == 400


async def test_tokenizing_has_two_addresses(stage: Stage) -> None:
    ids = stage.tokenizer.encode("The red").ids
    reply = (await stage.http.post("/v1/tokenize", json={"prompt": "The red"})).json()
    assert reply["tokens"] == ids
    back = (await stage.http.post("/v1/detokenize", json={"tokens": ids})).json()
    assert back == {"prompt": "The red"}


async def test_the_settings_of_the_tokenizer_are_served(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    config = {"tokenizer_class": "Qwen2Tokenizer", "chat_template": "old"}
    (model_folder / "tokenizer_config.json").write_text(json.dumps(config))
    (model_folder / "chat_template.jinja").write_text("{{ messages }}")
    async with open_stage(redis_url, model_folder, tokenizer, api_key="k") as stage:
        assert (await stage.http.get("/tokenizer_info")).status_code == 401
        stage.http.headers["Authorization"] = "Bearer k"
        told = (await stage.http.get("/tokenizer_info")).json()
    assert told == {"tokenizer_class": "Qwen2Tokenizer", "chat_template": "{{ messages }}"}


async def test_load_counts_answers_that_are_being_given(stage: Stage) -> None:
    go = asyncio.Event()

    async def wait(rid: str, index: int) -> None:
        await go.wait()

    stage.scheduler.step = wait
    assert (await stage.http.get("/load")).json() == {"server_load": 0}
    asked = [asyncio.create_task(stage.chat()) for _ in range(2)]
    async with asyncio.timeout(60):
        while (await stage.http.get("/load")).json() != {"server_load": 2}:
            await asyncio.sleep(0.02)
    go.set()
    await asyncio.gather(*asked)
    assert (await stage.http.get("/load")).json() == {"server_load": 0}


async def test_hosting_platforms_ping_by_either_method(stage: Stage) -> None:
    assert (await stage.http.get("/ping")).status_code == 200
    assert (await stage.http.post("/ping")).status_code == 200


async def test_the_hugging_face_client_needs_no_model_name(stage: Stage) -> None:
    def ask() -> list[Any]:
        client = InferenceClient(stage.gateway.url, token="none")
        messages = [{"role": "user", "content": "hello"}]
        whole = client.chat_completion(messages)
        streamed = client.chat_completion(messages, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in streamed]
        return [whole.choices[0].message.content, whole.model, "".join(pieces)]

    assert await asyncio.to_thread(ask) == [ANSWER, MODEL, ANSWER]
    for name in ("gpt-4", "dummies"):
        assert (await stage.chat(model=name)).status_code == 404
    assert (await stage.http.get("/v1/models/dummy")).status_code == 404


async def test_version_and_liveness(stage: Stage) -> None:
    assert (await stage.http.get("/version")).json()["version"]
    assert (await stage.http.get("/health/live")).json() == {"status": "alive"}
    assert (await stage.http.get("/health")).status_code == 200


async def test_not_ready_without_its_neighbours(stage: Stage) -> None:
    await stage.preprocess.__aexit__(None)
    async with asyncio.timeout(60):
        while (reply := await stage.http.get("/health/ready")).status_code != 503:
            await asyncio.sleep(0.05)
    assert reply.json()["missing"] == ["no preprocess running"]


async def test_a_model_with_vision_is_not_ready_without_an_encoder(
    stage: Stage,
) -> None:
    settings = stage.settings.model_copy(update={"language_model_only": True})
    async with open_gateway(settings) as text_alone, httpx.AsyncClient() as client:
        await stage.scheduler.encoder.withdraw()
        async with asyncio.timeout(60):
            while (reply := await stage.http.get("/health/ready")).status_code != 503:
                await asyncio.sleep(0.05)
            assert reply.json()["missing"] == ["no vision encoder running"]
            url = f"{text_alone.url}/health/ready"
            while (await client.get(url)).status_code != 200:
                await asyncio.sleep(0.05)


async def test_a_gateway_starts_without_redis_and_lives(
    model_folder: Path, tokenizer: Tokenizer, private_redis: EmbeddedRedis
) -> None:
    url = private_redis.url
    async with open_stage(url, model_folder, tokenizer) as stage:
        private_redis.kill()
        assert (await stage.http.get("/health/live")).status_code == 200
        reply = await stage.chat()
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "redis_unavailable")
        assert (await stage.http.get("/metrics")).status_code == 200
        await asyncio.to_thread(private_redis.start)
        await until_ready(stage.http)

"""The page of metrics: vLLM's names, labels and buckets, and sums over gateways that are the truth."""

import asyncio

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from services.gateway.gateway import Gateway
from shared.queue import connect
from shared.queue.keys import Keys
from tessera.scheduler.v1.scheduler_pb2 import DecoderLoad, GetLoadResponse
from tests.support.gateway.neighbours import SECOND_DECODER
from tests.support.gateway.process import beside
from tests.support.gateway.stage import ANSWER, MODEL, Stage
from tests.support.network.http import plain_client

# As vLLM has them, with the labels that its boards filter by.
_REQUEST_S = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
_TOKEN_S = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
_TTFT_S = (
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
_TOKENS = "1 2 5 10 20 50 100 200 500"  # of a model of 512
_HISTOGRAMS = {
    "time_to_first_token_seconds": _TTFT_S,
    "inter_token_latency_seconds": _TOKEN_S,
    "request_time_per_output_token_seconds": _TOKEN_S,
    "e2e_request_latency_seconds": _REQUEST_S,
    "request_queue_time_seconds": _REQUEST_S,
    "request_prefill_time_seconds": _REQUEST_S,
    "request_decode_time_seconds": _REQUEST_S,
    "request_inference_time_seconds": _REQUEST_S,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "request_max_num_generation_tokens": _TOKENS,
    "request_params_max_tokens": _TOKENS,
    "request_params_n": "1 2 5 10 20",
    "request_prefill_kv_computed_tokens": _TOKENS,
    "request_num_preemptions": "1 2 3 4 5 10 20",
}
_COUNTERS = (
    *("prompt_tokens", "generation_tokens", "request_success", "num_preemptions"),
    *("prompt_tokens_cached", "prompt_tokens_by_source"),
    *("prefix_cache_queries", "prefix_cache_hits", "mm_cache_queries", "mm_cache_hits"),
)
_GAUGES = (
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
    "kv_cache_usage_perc",
)


async def samples_of(client: httpx.AsyncClient) -> list[Sample]:
    page = (await client.get("/metrics")).text
    return [s for family in text_string_to_metric_families(page) for s in family.samples]


async def samples_of_both(stage: Stage, other: Gateway) -> list[list[Sample]]:
    async with plain_client(other.url) as client:
        return [await samples_of(stage.http), await samples_of(client)]


def total(samples: list[Sample], name: str, **labels: str) -> float:
    """What `sum(name{labels})` gives."""
    return sum(
        sample.value
        for sample in samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def test_names_types_labels_and_buckets_are_those_of_vllm(stage: Stage) -> None:
    await stage.chat()
    page = (await stage.http.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    for name, bounds in _HISTOGRAMS.items():
        family = families[f"vllm:{name}"]
        assert family.type == "histogram"
        found = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
        assert found == [*map(float, bounds.split()), float("inf")], name
    for name in _COUNTERS:
        assert families[f"vllm:{name}"].type == "counter", name
    for name in _GAUGES:
        assert families[f"vllm:{name}"].type == "gauge", name
    ours = [s for f in families.values() if f.name.startswith("vllm:") for s in f.samples]
    assert all(s.labels["model_name"] == MODEL and s.labels["engine"] for s in ours)
    reasons = {s.labels.get("finished_reason") for s in families["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}
    assert families["vllm:iteration_tokens_total"].type == "histogram"
    info = families["vllm:cache_config_info"].samples[0]
    assert info.value == 1 and info.labels["block_size"] == "16"
    assert info.labels["num_gpu_blocks"] == "100" and info.labels["num_cpu_blocks"] == "7"
    assert families["process_resident_memory_bytes"].samples[0].value > 1 << 20


async def test_a_request_is_counted_once_and_its_times_add_up(stage: Stage) -> None:
    stage.scheduler.queued_s = 0.25
    tokens = len(stage.says(ANSWER))

    async def step(rid: str, index: int) -> None:
        await asyncio.sleep(0.5 if index == 0 else 0.001)

    stage.scheduler.step = step
    await stage.chat(n=2, max_tokens=77)
    found = await samples_of(stage.http)

    def measured(name: str) -> float:
        assert total(found, f"vllm:{name}_count") == 1, name
        return total(found, f"vllm:{name}_sum")

    assert measured("request_queue_time_seconds") == pytest.approx(0.25)
    prefill = measured("request_prefill_time_seconds")
    decode = measured("request_decode_time_seconds")
    assert prefill > 0 and decode > 0
    assert measured("request_inference_time_seconds") == pytest.approx(prefill + decode)
    assert measured("time_to_first_token_seconds") >= prefill + 0.25
    assert measured("e2e_request_latency_seconds") >= prefill + decode + 0.25
    per_token = measured("request_time_per_output_token_seconds")
    assert per_token == pytest.approx(decode / (tokens - 1))
    assert measured("request_generation_tokens") == 2 * tokens
    assert total(found, "vllm:generation_tokens_total") == 2 * tokens
    prompt_tokens = total(found, "vllm:prompt_tokens_total")
    assert measured("request_prompt_tokens") == prompt_tokens > 0
    assert measured("request_max_num_generation_tokens") == tokens
    assert measured("request_params_max_tokens") == 77
    assert measured("request_params_n") == 2


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_every_token_of_every_choice_has_its_gap(stage: Stage, size: int) -> None:
    """Whether tokens come one by one, a few at a time, or all at once."""
    tokens = len(stage.says(ANSWER, size))

    async def step(rid: str, index: int) -> None:
        await asyncio.sleep(0.02)

    stage.scheduler.step = step
    await stage.chat(n=2)
    await stage.chat(stream=True)
    found = await samples_of(stage.http)
    given = total(found, "vllm:generation_tokens_total")
    assert given == 3 * tokens
    gaps = "vllm:inter_token_latency_seconds"
    assert total(found, f"{gaps}_count") == given - 3
    between = total(found, f"{gaps}_sum")
    # The two answers to the first request were given at the same time.
    assert between <= 2 * total(found, "vllm:request_decode_time_seconds_sum")
    assert (between > 0) == (size < tokens), "those that come with a first token have no time"


async def test_gaps_of_an_answer_that_is_gone_on_with_are_counted_once(stage: Stage) -> None:
    tokens = len(stage.says(ANSWER))
    first = await stage.chat(stream=True, with_ids=True)
    places = [line[4:] for line in first.text.splitlines() if line.startswith("id: ")]
    rid = places[0].partition("/")[0]
    path = f"/v1/requests/{rid}/stream"
    again = await stage.http.get(path, headers={"Last-Event-ID": places[3]})
    assert again.status_code == 200
    found = await samples_of(stage.http)
    assert total(found, "vllm:inter_token_latency_seconds_count") == tokens - 1


async def test_cached_tokens_and_preemptions_of_requests(stage: Stage) -> None:
    stage.scheduler.cached_tokens, stage.scheduler.preemptions = 2, 3
    await stage.chat(n=2)
    found = await samples_of(stage.http)
    prompt = total(found, "vllm:prompt_tokens_total")
    assert total(found, "vllm:prompt_tokens_cached_total") == 2
    source = "vllm:prompt_tokens_by_source_total"
    assert total(found, source, source="local_cache_hit") == 2
    assert total(found, source, source="local_compute") == prompt - 2 > 0
    assert total(found, source, source="external_kv_transfer") == 0
    assert total(found, "vllm:request_prefill_kv_computed_tokens_sum") == prompt - 2
    name = "vllm:request_num_preemptions"
    assert (total(found, f"{name}_sum"), total(found, f"{name}_count")) == (3, 1)


async def test_drafts_are_counted_as_vllm_counts_them(stage: Stage) -> None:
    name = "vllm:spec_decode_num_"
    found = await samples_of(stage.http)
    async with asyncio.timeout(60):
        while not total(found, f"{name}drafts_total"):
            await asyncio.sleep(0.1)
            found = await samples_of(stage.http)
    told = [
        total(found, f"{name}{of}_total") for of in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    assert told == [6, 15, 8]
    by_place = f"{name}accepted_tokens_per_pos_total"
    assert [total(found, by_place, position=p) for p in "012"] == [5, 3, 0]
    engines = {s.labels["engine"] for s in found if s.name.startswith(name)}
    assert len(engines) == 1  # the other decoder has no drafts


async def test_waiting_requests_are_told_apart(stage: Stage) -> None:
    loads = [
        DecoderLoad(decoder_id="one", waiting=5, waiting_for_media=2),
        DecoderLoad(decoder_id="two", waiting=4, waiting_for_media=4),
    ]
    stage.scheduler.load = GetLoadResponse(decoders=loads)
    async with connect(stage.settings.redis_url) as redis:
        await redis.hset(Keys(MODEL).live, mapping={f"r{number}": 1 for number in range(12)})
    waiting = "vllm:num_requests_waiting"
    found = await samples_of(stage.http)
    async with asyncio.timeout(60):
        while total(found, f"{waiting}_by_reason", reason="deferred") != 6:
            await asyncio.sleep(0.1)
            found = await samples_of(stage.http)
    assert total(found, waiting) == 12
    assert total(found, f"{waiting}_by_reason", reason="capacity") == 6
    for engine in "01":
        of_engine = total(found, f"{waiting}_by_reason", engine=engine)
        assert of_engine == total(found, waiting, engine=engine)


async def test_http_requests_are_counted_as_vllm_counts_them(stage: Stage) -> None:
    sent = await stage.chat()
    await stage.chat(stream=True)
    await stage.http.post("/v1/chat/completions", content=b"{")
    await stage.http.get("/v1/requests/r_unknown_1")
    await stage.http.get("/nowhere/at/all")
    await stage.http.get("/health")
    page = (await stage.http.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    found = [sample for family in families.values() for sample in family.samples]
    chat = {"method": "POST", "handler": "/v1/chat/completions"}
    assert total(found, "http_requests_total", **chat, status="2xx") == 2
    assert total(found, "http_requests_total", **chat, status="4xx") == 1
    one = {"method": "GET", "status": "4xx"}
    assert total(found, "http_requests_total", **one, handler="/v1/requests/*") == 1
    assert total(found, "http_requests_total", **one, handler="none") == 1
    assert total(found, "http_requests_total") == 5
    assert total(found, "http_request_duration_highr_seconds_count") == 5
    assert total(found, "http_request_duration_seconds_count", **chat) == 3
    assert total(found, "http_request_size_bytes_count", handler=chat["handler"]) == 3
    assert total(found, "http_request_size_bytes_sum", handler=chat["handler"]) > 100
    size = total(found, "http_response_size_bytes_sum", handler=chat["handler"])
    assert size > len(sent.content)
    bounds = {
        "http_request_duration_seconds": "0.1 0.5 1",
        "http_request_duration_highr_seconds": "0.01 0.025 0.05 0.075 0.1 0.25 0.5 0.75 1 1.5 2 2.5 3 3.5 4 4.5"
        " 5 7.5 10 30 60",
    }
    for name, expected in bounds.items():
        le = [float(s.labels["le"]) for s in families[name].samples if s.name.endswith("_bucket")]
        assert le[: len(expected.split()) + 1] == [*map(float, expected.split()), float("inf")]


async def test_media_are_looked_for_in_a_cache(stage: Stage) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    await stage.chat(messages=[{"role": "user", "content": [picture, picture]}])
    found = await samples_of(stage.http)
    assert total(found, "vllm:mm_cache_queries_total") == 2
    assert total(found, "vllm:mm_cache_hits_total") == 1


async def test_each_decoder_is_an_engine(stage: Stage) -> None:
    found = await samples_of(stage.http)
    running = "vllm:num_requests_running"
    assert total(found, running, engine="0") == 3 and total(found, running, engine="1") == 0
    assert total(found, "vllm:kv_cache_usage_perc", engine="0") == 0.25
    # In tokens, as vLLM counts them.
    assert total(found, "vllm:prefix_cache_queries_total", engine="0") == 160
    assert total(found, "vllm:prefix_cache_hits_total") == 64
    steps = "vllm:iteration_tokens_total"
    assert total(found, f"{steps}_bucket", engine="0", le="8.0") == 8
    assert total(found, f"{steps}_count", engine="0") == 9
    assert total(found, f"{steps}_sum") == 60
    # Who stays keeps the number, whoever goes and comes.
    now = [("new", 5), (SECOND_DECODER, 2)]
    stage.scheduler.load = GetLoadResponse(
        decoders=[DecoderLoad(decoder_id=name, running=count) for name, count in now]
    )
    async with asyncio.timeout(60):
        while total(found, running) != 7:
            await asyncio.sleep(0.1)
            found = await samples_of(stage.http)
    assert total(found, running, engine="1") == 2 and total(found, running, engine="0") == 5


async def test_a_sum_over_gateways_is_the_truth(stage: Stage, other: Gateway) -> None:
    pages = await samples_of_both(stage, other)
    reporting = [total(page, "vllm:num_requests_running") > 0 for page in pages]
    assert sorted(reporting) == [False, True]
    both = [sample for page in pages for sample in page]
    assert total(both, "vllm:num_requests_running") == 3
    assert total(both, "vllm:kv_cache_usage_perc") == 0.25
    assert total(both, "vllm:prefix_cache_queries_total") == 176
    assert total(both, "vllm:cache_config_info") == 2
    assert total(both, "tessera_step_target_seconds") == 0.25
    await stage.chat()
    async with plain_client(other.url) as client:
        await client.post("/v1/completions", json={"prompt": "hello"})
    both = [sample for page in await samples_of_both(stage, other) for sample in page]
    assert total(both, "vllm:request_success_total") == 2


async def test_another_gateway_reports_when_one_dies(stage: Stage) -> None:
    running = "vllm:num_requests_running"
    async with beside(stage) as (process, client), asyncio.timeout(60):
        async with connect(stage.settings.redis_url) as redis:
            while total(await samples_of(client), running) != 3:
                # The stage's own was there first: its lease ends before it is renewed.
                await redis.delete(f"{Keys(MODEL).prefix}:reporter")
                await asyncio.sleep(0.05)
        assert total(await samples_of(stage.http), running) == 0
        process.kill()
        while total(await samples_of(stage.http), running) != 3:
            await asyncio.sleep(0.1)


async def test_adapters_of_all_decoders_have_one_series_as_in_vllm(stage: Stage) -> None:
    async def series() -> list[Sample]:
        found = await samples_of(stage.http)
        return [sample for sample in found if sample.name == "vllm:lora_requests_info"]

    assert not await series()
    first, second = stage.scheduler.load.decoders
    first.max_adapters = second.max_adapters = 8
    first.running_adapters.extend(["chat", "sql"])
    second.running_adapters.append("sql")
    second.waiting_adapters.append("poem")
    async with asyncio.timeout(30):
        while not (found := await series()):
            await asyncio.sleep(0.05)
    [sample] = found
    assert sample.labels == {
        "max_lora": "8",
        "running_lora_adapters": "chat,sql",
        "waiting_lora_adapters": "poem",
    }
    assert sample.value > 1e9

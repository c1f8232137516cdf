"""The page of the system in a real browser: every service with its load, the errors of all gateways, all of it live."""

import asyncio
import json
import re
from pathlib import Path

import httpx
from playwright.async_api import Browser, expect
from tokenizers import Tokenizer

from services.gateway.gateway import Gateway
from services.launcher.why import waterfall
from services.preprocess.measures import PreprocessMeasures
from services.vision_encoder.measures import EncoderMeasures
from shared.net import supervise
from shared.queue import connect
from shared.queue.keys import Keys, new_instance_id
from shared.queue.registry import Announcement
from tests.support.browser import Balancer, ChatPage
from tests.support.gateway.stage import ANSWER, MODEL, Stage, open_stage


class Dying(Announcement):
    """A process that can die without withdrawing."""

    async def die(self) -> None:
        await supervise.end(self._task)


def preprocess_measures() -> PreprocessMeasures:
    measures = PreprocessMeasures()
    for tokens in (12, 30):
        measures.prepared(tokens, 4_000, has_media=True)
    for cached in (False, True, True, True):
        measures.taken("image", 1_000, 90_000, cached=cached)
    measures.item_times(2_000, 18_000)
    return measures


def encoder_measures() -> EncoderMeasures:
    measures = EncoderMeasures()
    measures.taken([0.010, 0.030], 512)
    measures.computed(0.25, 32, 0)
    measures.taken([0.020], 256)
    measures.queries, measures.hits = 4, 1
    return measures


async def test_every_service_shows_its_load(stage: Stage, browser: Browser) -> None:
    encoder, preprocess = encoder_measures(), preprocess_measures()
    async with connect(stage.settings.redis_url) as redis:
        names = [new_instance_id(), new_instance_id()]
        keys, (tower, prompt) = Keys(MODEL), names
        at = [f"10.0.0.7:{name[:4]}" for name in names]
        dying = [
            Dying(redis, keys, "vision_encoder", tower, at[0], load=encoder.load),
            Dying(redis, keys, "preprocess", prompt, at[1], load=preprocess.load),
        ]
        async with dying[0], dying[1]:
            chat = await ChatPage.open(browser, f"{stage.gateway.url}/system")
            towers = chat.page.locator(
                "article[data-service=vision_encoder]", has_text=names[0][:4]
            )
            prompts = chat.page.locator("article[data-service=preprocess]", has_text=names[1][:4])
            await expect(towers.locator("dd")).to_have_text(
                ["1", "0", "20.0 ms", "1.5 items", "125.0 ms", "25 % found", "0"]
            )
            await expect(prompts.locator("dd")).to_have_text(
                ["0", "0", "4.0 ms", "5.0 ms", "75 % found", "0"]
            )
            # What came since the last look: figures are those of now, not of all times.
            encoder.computed(0.25, 16, 0)
            encoder.taken([0.5] * 4, 1024)
            await expect(towers.locator("dd").nth(2)).to_have_text("500.0 ms")
            await expect(towers.locator("dd").nth(3)).to_have_text("4.0 items")
            for one in dying:
                await one.die()
            await expect(towers).to_have_count(0, timeout=10_000)
            await expect(prompts).to_have_count(0, timeout=10_000)
            assert chat.complaints == []


async def test_errors_of_all_gateways_are_shown_at_each(
    stage: Stage, other: Gateway, browser: Browser
) -> None:
    secret = "a secret in a prompt"
    refused = await stage.http.post(
        f"{other.url}/v1/completions", json={"prompt": secret, "temperature": 9}
    )
    assert refused.status_code == 400
    chat = await ChatPage.open(browser, f"{stage.gateway.url}/system")
    row = chat.page.locator("tr", has_text="invalid_value")
    await expect(row).to_contain_text(other.url)
    assert (await stage.chat(max_tokens=-1)).status_code == 400
    await expect(chat.page.locator("tr", has_text=stage.gateway.url).last).to_be_visible()
    told = (await stage.http.get("/v1/system")).json()
    by = {one["id"]: one["address"] for one in told["services"][0]["replicas"]}
    assert [by[error["gateway"]] for error in told["errors"]] == [stage.gateway.url, other.url]
    assert told["errors"][1]["request_id"] == refused.headers["x-tessera-request-id"]
    assert secret not in json.dumps(told)


async def test_refusals_by_deadline_are_counted_and_seen(stage: Stage, browser: Browser) -> None:
    """One that could not get its first token in time when it came, and one whose time in the queue ran out."""
    stage.scheduler.taking = False
    async with connect(stage.settings.redis_url) as redis:
        await redis.hset(
            Keys(MODEL).meta, "turn_ms", 30_000
        )  # as first tokens came after each other
    body = {"messages": [{"role": "user", "content": "a secret in a prompt"}]}

    async def ask(**headers: str) -> httpx.Response:
        named = {f"X-Tessera-{name}-Timeout": seconds for name, seconds in headers.items()}
        return await stage.http.post("/v1/chat/completions", json=body, headers=named)

    late = await ask(Queue="0.2")  # nobody waits, so it is accepted
    waiting = asyncio.create_task(ask())
    await stage.admitted(2)
    refused = await ask(**{"First-Token": "20"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "queue_timeout")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_too_long")
    assert int(refused.headers["retry-after"]) > 0

    counted = (await stage.http.get("/metrics")).text
    assert 'tessera_rejections_total{reason="queue_too_long"} 1.0' in counted
    assert re.search(r'vllm:request_success_total\{.*finished_reason="error".*\} 1\.0', counted)
    chat = await ChatPage.open(browser, f"{stage.gateway.url}/system")
    for status, code, answer in ((504, "queue_timeout", late), (429, "queue_too_long", refused)):
        row = chat.page.locator("tr", has_text=code)
        await expect(row).to_contain_text(str(status))
        rid = answer.headers["x-tessera-request-id"]
        await expect(row.locator("td").last).to_have_attribute("title", rid)
        told = (await stage.http.get(f"/v1/requests/{rid}/timeline")).json()
        assert f"{status} {code}" in told["text"] and "a secret" not in json.dumps(told)
        (end,) = (s["attributes"] for s in told["spans"] if s["name"] in ("refused", "end"))
        assert end["status"] == status and code.upper() in end.values()
        assert told["text"] in "\n".join(waterfall(told, 80))
        assert ("queue" in told["parts"]) == (answer is late)
    assert chat.complaints == []
    stage.scheduler.taking = True
    assert (await waiting).status_code == 200


async def test_the_page_of_the_system_is_live(stage: Stage, browser: Browser) -> None:
    async with Balancer([stage.gateway.http_server.port]) as balancer:
        chat = await ChatPage.open(browser, f"{balancer.url}/system")
        page = chat.page
        await expect(page.locator(".card", has_text="preprocess").first).to_contain_text("1")
        await expect(page.locator(".decoder").first).to_contain_text("blocks")
        # The page is longer than the window, and has one colour to its end.
        colours = "[document.documentElement, document.body].map(e => getComputedStyle(e).backgroundColor)"
        above, below = await page.evaluate(colours)
        assert above == below
        assert (await stage.chat(temperature=9)).status_code == 400
        await expect(page.locator("td", has_text="invalid_value").first).to_contain_text("400")
        balancer.move([])
        await expect(page.get_by_role("alert")).to_contain_text("Something between this page")
        balancer.move([stage.gateway.http_server.port])
        await expect(page.get_by_role("alert")).to_have_count(0)


async def test_the_system_as_json(redis_url: str, model_folder: Path, tokenizer: Tokenizer) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, api_key="k") as stage:
        assert (await stage.http.get("/v1/system")).status_code == 401
        stage.http.headers["Authorization"] = "Bearer k"
        assert (await stage.chat(temperature=9)).status_code == 400
        told = (await stage.http.get("/v1/system")).json()
    services = {one["service"]: len(one["replicas"]) for one in told["services"]}
    assert services["gateway"] == services["preprocess"] == 1
    assert told["model"] == MODEL and told["takes"] == ["image"] and told["missing"] == []
    assert told["limits"] == {"max_body_bytes": 32 << 20, "max_model_len": 512}
    decoders = told["decoders"]
    assert decoders and decoders[0]["kv_blocks_total"] > 0
    assert told["queue"]["running"] == sum(one["running"] for one in decoders)
    error = told["errors"][0]
    assert (error["status"], error["code"]) == (400, "invalid_value")
    assert error["path"] == "/v1/chat/completions"
    assert "message" not in error and "temperature" not in json.dumps(error)
    assert ANSWER not in json.dumps(told)

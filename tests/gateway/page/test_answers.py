"""What a model writes, shown: Markdown without danger, code, formulas, reasoning, calls, figures."""

import json

import pytest
from playwright.async_api import expect

from tests.gateway.page.test_conversations import asked
from tests.support.browser import ChatPage
from tests.support.gateway.marked_model import MARKED, THOUGHT
from tests.support.gateway.stage import MODEL, Stage

STAGED_MODEL = MARKED
MARKDOWN = r"""# Title

Some **bold** words, `code`, and $a^2 + b^2$ for $5 or 6.

| left | right |
|:-----|------:|
| 1 | 2 |

```python
def f(x): return x + 1
```

$$\frac{1}{2} = \begin{aligned} x &= 1 \end{aligned}$$
"""
HOSTILE = """<script>window.hurt = 1</script>
<img src=x onerror="window.hurt = 2"> <iframe src="https://example.com"></iframe>
<style>body { display: none }</style>

[a](javascript:window.hurt=3) [b](https://example.com/x) ![pixel](https://example.com/pixel.png)

<svg onload="window.hurt = 4"><form action="https://example.com"><input name=q></form>

$\\href{javascript:window.hurt=5}{x}$ $\\class{a}{<img src=y onerror=window.hurt=6>}$
"""


async def test_markdown_is_shown(chat: ChatPage, stage: Stage) -> None:
    stage.says(MARKDOWN, 4)
    await chat.ask("Show me")
    await chat.answered()
    answer = chat.answers
    await expect(answer.locator("h1")).to_have_text("Title")
    await expect(answer.locator("strong")).to_have_text("bold")
    await expect(answer.locator("td[align=right]")).to_have_text("2")
    await expect(answer.locator(".code .hljs-keyword").first).to_have_text("def")
    await expect(answer.locator("math")).to_have_count(2)
    await expect(answer.locator("mfrac")).to_have_count(1)
    await expect(answer).to_contain_text("for $5 or 6")
    await chat.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await answer.locator(".code-head button").click()
    copied = await chat.page.evaluate("() => navigator.clipboard.readText()")
    assert copied.strip() == "def f(x): return x + 1"


async def test_hostile_answers_stay_text(chat: ChatPage, stage: Stage) -> None:
    reached: list[str] = []
    chat.page.on("request", lambda request: reached.append(request.url))
    stage.says(HOSTILE, 3)
    await chat.ask("Hurt me")
    await chat.answered()
    await expect(chat.answers).to_contain_text("<script>window.hurt = 1</script>")
    bad = "script, iframe, style, form, svg:not(.icon), img, [onerror], [onload], [style]"
    await expect(chat.answers.locator(".markdown").locator(bad)).to_have_count(0)
    links = chat.answers.locator("a[href]")
    assert await links.evaluate_all("(all) => all.map((a) => a.href)") == [
        "https://example.com/x",
        "https://example.com/pixel.png",
    ]
    assert await links.first.get_attribute("rel") == "noopener noreferrer nofollow"
    assert await chat.page.evaluate("() => window.hurt === undefined")
    assert not [url for url in reached if "example.com" in url]


async def test_reasoning_calls_and_results(chat: ChatPage, stage: Stage) -> None:
    bodies = asked(chat.page)
    tools = [{"type": "function", "function": {"name": "weather"}}]
    await chat.button("Settings").click()
    await chat.page.get_by_label("Tools (a JSON list)").fill("[1")
    await expect(chat.page.get_by_text("This is not a JSON list.")).to_be_visible()
    await chat.page.get_by_label("Tools (a JSON list)").fill(json.dumps(tools))
    await chat.button("Close").click()
    await chat.ask("What is the weather?")
    await chat.answered()
    assert bodies[0]["tools"] == tools
    thought = chat.page.locator("details.reasoning")
    await expect(thought.locator(".markdown")).to_be_hidden()
    await thought.locator("summary").click()
    await expect(thought).to_contain_text(THOUGHT)
    await expect(chat.page.locator(".call-head").first).to_have_text("Call of weather")
    await expect(chat.page.locator(".call").first).to_contain_text('"city": "Łódź"')
    stage.says("It rains.")
    await chat.page.get_by_label("What weather gives").fill("rain")
    await chat.page.get_by_label("What stop gives").fill("done")
    await chat.button("Send the result").click()
    await expect(chat.answers.last).to_contain_text("It rains.")
    messages = bodies[1]["messages"]
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "tool"]
    calls = messages[1]["tool_calls"]
    assert messages[2]["tool_call_id"] == calls[0]["id"]


async def test_settings_go_along(chat: ChatPage) -> None:
    bodies = asked(chat.page)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    page = chat.page
    await chat.button("Settings").click()
    await page.get_by_label("System prompt").fill("Be brief.")
    await page.get_by_label("Most tokens").fill("40")
    await page.get_by_label("Temperature").fill("0.5")
    await page.get_by_label("Seed").fill("7")
    await page.get_by_label("Stop texts").fill("END\n\n##")
    await page.get_by_label("JSON schema").fill(json.dumps(schema))
    await page.keyboard.press("Escape")
    await chat.ask("Hello")
    await expect(chat.answers).to_have_count(1)
    body = bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (40, 0.5, 7)
    assert body["stop"] == ["END", "##"] and body["model"] == MODEL
    assert body["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.full
async def test_an_adapter_is_chosen(chat: ChatPage) -> None:
    cards = [{"id": MODEL, "max_model_len": 512}, {"id": "poems", "parent": MODEL}]
    told = json.dumps({"object": "list", "data": cards})
    await chat.page.route(
        "**/v1/models", lambda route: route.fulfill(body=told, content_type="application/json")
    )
    await chat.page.reload()
    bodies = asked(chat.page)
    await chat.page.get_by_role("combobox", name="Model").select_option("poems (adapter)")
    await chat.ask("Hello")
    await expect(chat.answers.get_by_role("alert")).to_contain_text("'poems' does not exist")
    assert bodies[0]["model"] == "poems"


async def test_json_is_shown_in_lines(chat: ChatPage, stage: Stage) -> None:
    stage.says('{"shapes": [{"colour": "red"}]}')
    await chat.ask("As JSON")
    await chat.answered()
    await expect(chat.answers.locator("code")).to_contain_text('  "shapes": [\n    {')


@pytest.mark.parametrize("known", [True, pytest.param(False, marks=pytest.mark.full)])
async def test_figures_open_a_panel(chat: ChatPage, known: bool) -> None:
    if known:
        span = {"name": "prefill", "service": "decoder", "replica": "", "start_ms": 3.0}
        spans = [{**span, "duration_ms": 1200.0, "attributes": {}}]
        told = json.dumps({"duration_ms": 1300.0, "spans": spans, "text": "It took long."})
        await chat.page.route(
            "**/v1/requests/*/timeline",
            lambda route: route.fulfill(body=told, content_type="application/json"),
        )
    await chat.ask("What is there?")
    await chat.answered()
    await expect(chat.done).to_contain_text("tokens")
    await chat.done.click()
    panel = chat.page.get_by_role("dialog")
    for name in ("Tokens of the prompt", "of these found in a cache", "Schedulers that took it"):
        await expect(panel).to_contain_text(name)
    await expect(panel).to_contain_text("In the queue")
    if known:
        await expect(panel.locator(".timeline li")).to_contain_text("prefilldecoder1.20 s")
        await expect(panel).to_contain_text("It took long.")
    else:
        await expect(panel).to_contain_text("This server has no timelines")

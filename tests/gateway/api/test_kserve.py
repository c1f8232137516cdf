"""KServe's protocol with Triton's extensions: text, streams from every event on, tensors, and what is refused."""

import base64
import json
import struct
from typing import Any

import pytest

from services.gateway.gateway import Gateway
from shared.errors import InvalidRequest
from tests.support.gateway.stage import ANSWER, MODEL, Stage
from tests.support.network.http import plain_client
from tests.support.network.sse import ASK_FOR_IDS, event_ids, unended_events
from tests.support.pictures import data_url, png

MODEL_PATH = f"/v2/models/{MODEL}"
TEXT = "What is there?"


def strings(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


async def test_health_and_metadata(stage: Stage) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", f"{MODEL_PATH}/ready"):
        reply = await stage.http.get(path)
        assert (reply.status_code, reply.content) == (200, b"")
    assert "generate" in (await stage.http.get("/v2")).json()["extensions"]
    for path in (MODEL_PATH, f"{MODEL_PATH}/versions/1"):
        about = (await stage.http.get(path)).json()
        assert (about["name"], about["versions"]) == (MODEL, ["1"])
        assert {"name": "text_input", "datatype": "BYTES", "shape": [1]} in about["inputs"]
    config = (await stage.http.get(f"{MODEL_PATH}/config")).json()
    assert config["input"][0]["data_type"] == "TYPE_STRING"


@pytest.mark.parametrize("version", ["", "/versions/1"])
async def test_generate_takes_parameters_in_all_their_places(stage: Stage, version: str) -> None:
    path = f"{MODEL_PATH}{version}/generate"
    for body in (
        {"max_tokens": 7, "temperature": 0.5, "stop_words": ["blue"], "random_seed": 3},
        {"parameters": {"max_new_tokens": 7, "temperature": 0.5, "stop": "blue", "seed": 3}},
        {"sampling_parameters": '{"max_tokens": 7, "temperature": 0.5, "stop": "blue", "seed": 3}'},
    ):
        reply = await stage.http.post(path, json={"text_input": TEXT, "id": "mine", **body})
        assert reply.status_code == 200, reply.text
        content = reply.json()
        assert (content["id"], content["model_name"], content["model_version"]) == (
            "mine",
            MODEL,
            "1",
        )
        sampling = stage.scheduler.played[reply.headers["x-tessera-request-id"]].spec.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (7, 0.5, 3)
        assert list(sampling.stop) == ["blue"]
    asked = {"text_input": TEXT, "parameters": {"details": True, "exclude_input_in_output": False}}
    content = (await stage.http.post(path, json=asked)).json()
    assert content["text_output"] == TEXT + ANSWER
    assert content["details"] == {"finish_reason": "eos_token", "generated_tokens": 15}


async def test_the_rest_after_every_event_at_another_gateway(stage: Stage, other: Gateway) -> None:
    asked = {"text_input": TEXT, "id": "a", "details": True, "exclude_input_in_output": False}
    path = f"{MODEL_PATH}/generate_stream"
    reply = await stage.http.post(path, json=asked, headers=ASK_FOR_IDS)
    found, places = unended_events(reply.text), event_ids(reply.text)
    assert "".join(event["text_output"] for event in found) == TEXT + ANSWER
    assert found[-1]["details"]["finish_reason"] == "eos_token"
    rid = reply.headers["x-request-id"]
    async with plain_client(other.url, timeout=60) as client:
        for index, place in enumerate(places[:-1], 1):
            rest = await client.get(f"/v1/requests/{rid}/stream", params={"after": place})
            again = unended_events(rest.text)
            text = "".join(event["text_output"] for event in again)
            assert text == "".join(event["text_output"] for event in found[index:])
            assert again[-1]["details"] == found[-1]["details"]
            assert {event["id"] for event in again} == {"a"}


async def test_infer_in_json(stage: Stage) -> None:
    ids = stage.says(ANSWER)
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
    count = {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [[5]]}
    stop = {"name": "stop", "datatype": "BYTES", "shape": [2], "data": ["a blue", "b"]}
    wanted = [{"name": "text_output"}, {"name": "finish_reason"}, {"name": "output_ids"}]
    body = {"id": "7", "inputs": [text, count, stop], "outputs": wanted}
    reply = await stage.http.post(f"{MODEL_PATH}/infer", json=body)
    content = reply.json()
    outputs = {output["name"]: output["data"] for output in content["outputs"]}
    assert content["id"] == "7" and outputs["output_ids"] == ids[:5]
    assert outputs["finish_reason"] == ["length"] and ANSWER.startswith(outputs["text_output"][0])
    sampling = stage.scheduler.played[reply.headers["x-tessera-request-id"]].spec.sampling
    assert list(sampling.stop) == ["a blue", "b"]


async def test_generate_with_pictures_beside_the_text(stage: Stage) -> None:
    """As tensors of /infer have them: a data URL, a file in base64, a list of both; large ones too."""
    small, large = png(1, (28, 28)), png(2, (300, 300))
    coded = base64.b64encode(large).decode()
    for given, files in (
        (data_url(large), [large]),
        (coded, [large]),
        ([data_url(small), coded], [small, large]),
    ):
        body: dict[str, Any] = {"text_input": TEXT, "image": given}
        reply = await stage.http.post(f"{MODEL_PATH}/generate", json=body)
        assert reply.status_code == 200, reply.text
        [message] = stage.preprocess.seen[-1].conversation.messages
        *pictures, words = message.content
        assert [part.media.data for part in pictures] == files
        assert words.text == TEXT
    for body, field in (
        ({"text_input": [{"text": TEXT}], "image": coded}, "text_input"),
        ({"text_input": TEXT, "image": ["%"]}, "image[0]"),
    ):
        reply = await stage.http.post(f"{MODEL_PATH}/generate", json=body)
        assert reply.status_code == 400 and reply.json()["error"].startswith(field), reply.text


async def test_infer_of_ids_as_mindie_has_it(stage: Stage) -> None:
    ids = stage.says(ANSWER)
    given = {
        "name": "input0", "shape": [1, 3], "datatype": "UINT32", "data": [5, 6, 7],
        "parameters": {"temperature": 0.5, "max_new_tokens": 20, "timeout": 60},
    }  # fmt: skip
    for name in ("output0", "anything"):
        body = {"id": "a", "inputs": [given], "outputs": [{"name": name}]}
        reply = await stage.http.post(f"{MODEL_PATH}/infer", json=body)
        [output] = reply.json()["outputs"]
        assert output == {"name": name, "datatype": "UINT32", "shape": [1, len(ids)], "data": ids}
    spec = stage.scheduler.played[reply.headers["x-tessera-request-id"]].spec
    assert spec.prompt == struct.pack("<3i", 5, 6, 7)
    assert (spec.sampling.temperature, spec.sampling.max_tokens, spec.timeout_ms) == (
        0.5,
        20,
        60_000,
    )


async def test_infer_with_bytes_behind_the_json(stage: Stage) -> None:
    ids = stage.says(ANSWER)
    words, picture = (
        strings(TEXT.encode()),
        strings(png(1, (28, 28)), data_url(png(2, (28, 28))).encode()),
    )
    seed = struct.pack("<q", 11)
    tensors = [
        ("text_input", "BYTES", 1, words),
        ("image", "BYTES", 2, picture),
        ("seed", "INT64", 1, seed),
    ]
    head = json.dumps({
        "inputs": [
            {"name": name, "datatype": kind, "shape": [size], "parameters": {"binary_data_size": len(data)}}
            for name, kind, size, data in tensors
        ],
        "outputs": [
            {"name": "text_output", "parameters": {"binary_data": True}},
            {"name": "finish_reason", "parameters": {"binary_data": False}},
            {"name": "output_ids"},
        ],
        "parameters": {"binary_data_output": True},
    }).encode()  # fmt: skip
    headers = {
        "content-type": "application/octet-stream",
        "inference-header-content-length": str(len(head)),
        "idempotency-key": "one",
    }
    body = head + b"".join(data for *_, data in tensors)
    reply = await stage.http.post(f"{MODEL_PATH}/infer", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    size = int(reply.headers["inference-header-content-length"])
    text, reason, listed = json.loads(reply.content[:size])["outputs"]
    assert reason["data"] == ["eos_token"]
    expected = strings(ANSWER.encode())
    assert text["parameters"]["binary_data_size"] == len(expected)
    assert reply.content[size:] == expected + struct.pack(f"<{len(ids)}I", *ids)
    assert listed["parameters"]["binary_data_size"] == 4 * len(ids)
    (message,) = stage.preprocess.seen[-1].conversation.messages
    assert [part.media.data for part in message.content[:2]] == [png(1, (28, 28)), png(2, (28, 28))]
    assert stage.scheduler.played[reply.headers["x-tessera-request-id"]].spec.sampling.seed == 11
    other = body.replace(seed, struct.pack("<q", 12))
    reply = await stage.http.post(f"{MODEL_PATH}/infer", content=other, headers=headers)
    assert reply.status_code == 409, "the bytes are a part of what is asked"


def tensor(**changes: Any) -> dict[str, Any]:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
    return {"inputs": [text | changes]}


REFUSED: list[tuple[str, Any, str]] = [
    ("generate", {"text_input": TEXT, "max_tokenz": 3}, "max_tokenz "),
    ("generate", {"text_input": TEXT, "parameters": {"top_q": 3}}, "parameters.top_q "),
    ("generate", {"text_input": TEXT, "parameters": {"top_p": 3}}, "parameters.top_p "),
    ("generate", {"text_input": TEXT, "parameters": {"max_new_tokens": 0}}, "parameters.max_new_tokens "),
    ("generate", {"text_input": TEXT, "sampling_parameters": '{"top_p": 3}'}, "sampling_parameters.top_p "),
    ("generate", {"text_input": TEXT, "sampling_parameters": "{"}, "sampling_parameters "),
    ("generate", {"text_input": TEXT, "sampling_parameters": "[1]"}, "sampling_parameters must be a JSON object"),
    ("generate", {"text_input": TEXT, "typical_p": 0.5}, "typical_p "),
    ("generate", {}, "text_input "),
    ("generate_stream", {"text_input": 3}, "text_input "),
    ("infer", {}, "inputs "),
    ("infer", {"inputs": [{}]}, "inputs[0].name "),
    ("infer", tensor(datatype="STRING"), "inputs.text_input "),
    ("infer", tensor(datatype="INT32"), "inputs.text_input.data "),
    ("infer", tensor(shape=[2]), "inputs.text_input "),
    ("infer", tensor(shape=[-1]), "inputs[0].shape "),
    ("infer", tensor(shape=[2**30, 2**30]), "inputs"),
    ("infer", tensor(data=[[[1]]]), "inputs.text_input.data "),
    ("infer", tensor(parameters={"binary_data_size": 9}), "inputs[0].data "),
    ("infer", tensor(parameters={"shared_memory_region": "a"}), "inputs[0].parameters.shared_memory_region "),
    ("infer", tensor(name="prompt"), "inputs.prompt "),
    ("infer", tensor(name="seed", datatype="INT32", data=[4]), "inputs.text_input "),
    ("infer", tensor(name="input0", datatype="INT32", data=[-1]), "inputs.input0[0] "),
    ("infer", {**tensor(), "outputs": [{"name": "logits"}]}, "outputs[0].name "),
    ("infer", {**tensor(), "outputs": [{"name": "text_output"}] * 2}, "outputs[1].name "),
    ("infer", {**tensor(), "parameters": {"sequence_id": 4}}, "parameters.sequence_id "),
    ("infer", {**tensor(), "parameters": {"stream": True}}, "parameters.stream "),
    ("infer", {"inputs": tensor()["inputs"] * 2}, "inputs "),
]  # fmt: skip


@pytest.mark.parametrize(("verb", "body", "begins"), REFUSED, ids=str)
async def test_what_is_wrong_is_named_as_a_string(
    stage: Stage, verb: str, body: Any, begins: str
) -> None:
    reply = await stage.http.post(f"{MODEL_PATH}/{verb}", json=body)
    content = reply.json()
    assert (reply.status_code, list(content)) == (400, ["error"]), content
    assert content["error"].startswith(begins), content
    assert not stage.scheduler.played


@pytest.mark.parametrize("size", ["x", "-1", "9999", "3"])
async def test_a_wrong_length_of_the_json_is_refused(stage: Stage, size: str) -> None:
    headers = {"inference-header-content-length": size}
    reply = await stage.http.post(f"{MODEL_PATH}/infer", json=tensor(), headers=headers)
    assert reply.status_code == 400 and isinstance(reply.json()["error"], str)


async def test_bytes_that_are_no_tensors_are_refused(stage: Stage) -> None:
    for data, shape in (
        (b"\xff\xff\xff\xff", [1]),
        (strings(b"a", b"b"), [1]),
        (b"ab", [1]),
        (strings(b"\xff"), [1]),
    ):
        asked = tensor(shape=shape, parameters={"binary_data_size": len(data)})
        del asked["inputs"][0]["data"]
        head = json.dumps(asked).encode()
        headers = {"inference-header-content-length": str(len(head))}
        for behind in (data, data + b"more", data[:-1]):
            reply = await stage.http.post(
                f"{MODEL_PATH}/infer", content=head + behind, headers=headers
            )
            assert reply.status_code == 400 and isinstance(reply.json()["error"], str)


async def test_models_and_routes_that_are_not_there(stage: Stage) -> None:
    for method, path in (
        ("GET", "/v2/models/another"), ("GET", "/v2/models/another/ready"), ("GET", "/v2/nothing"),
        ("POST", f"{MODEL_PATH}/versions/2/infer"), ("GET", "/v2/models/a/b/c/d/e/f"),
    ):  # fmt: skip
        reply = await stage.http.request(method, path, json=tensor())
        assert reply.status_code == 404 and isinstance(reply.json()["error"], str), path
    reply = await stage.http.post("/v2/models/org/name/generate", json={"text_input": TEXT})
    assert reply.status_code == 404 and "'org/name'" in reply.json()["error"]
    reply = await stage.http.get(f"{MODEL_PATH}/generate")
    assert reply.status_code == 405 and isinstance(reply.json()["error"], str)


async def test_an_error_inside_a_stream(stage: Stage) -> None:
    stage.scheduler.answer = lambda spec: [stage.tokenizer.encode("The red").ids]
    stage.scheduler.failure = InvalidRequest("BAD_LUCK", "it broke").to_failure()
    reply = await stage.http.post(f"{MODEL_PATH}/generate_stream", json={"text_input": TEXT})
    assert unended_events(reply.text)[-1] == {"error": "it broke"}

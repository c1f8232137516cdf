"""inference.GRPCInferenceService: metadata, tensors in and out, streams, keys, and errors."""

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from inference import inference_pb2 as pb
from inference.inference_pb2_grpc import GRPCInferenceServiceStub
from shared.net.channels import open_channel
from tests.support.gateway.stage import ANSWER, MODEL, Stage, open_stage
from tests.support.pictures import png

TEXT = "What is there?"


@pytest.fixture
async def stub(stage: Stage) -> AsyncIterator[Any]:
    async with open_channel(stage.gateway.grpc_address) as channel:
        yield GRPCInferenceServiceStub(channel)


def tensor(name: str, datatype: str, **contents: Any) -> pb.ModelInferRequest.InferInputTensor:
    (values,) = contents.values()
    return pb.ModelInferRequest.InferInputTensor(
        name=name,
        datatype=datatype,
        shape=[len(values)],
        contents=pb.InferTensorContents(**contents),
    )


def question(*more: pb.ModelInferRequest.InferInputTensor, **fields: Any) -> pb.ModelInferRequest:
    text = tensor("text_input", "BYTES", bytes_contents=[TEXT.encode()])
    fields.setdefault("model_name", MODEL)
    return pb.ModelInferRequest(inputs=[text, *more], **fields)


def outputs(response: pb.ModelInferResponse) -> dict[str, Any]:
    """Values by name: texts, or ids."""
    found: dict[str, Any] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            (size,) = struct.unpack_from("<I", raw)
            assert len(raw) == 4 + size
            found[output.name] = raw[4:].decode()
        else:
            found[output.name] = [*struct.unpack(f"<{len(raw) // 4}I", raw)]
            assert list(output.shape) == [1, len(found[output.name])]
    return found


def wanted(*names: str) -> list[Any]:
    return [pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in names]


async def test_what_is_served(stub: Any) -> None:
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await stub.ModelReady(pb.ModelReadyRequest(name=MODEL, version="1"))).ready
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="another"))).ready
    assert "generate" in (await stub.ServerMetadata(pb.ServerMetadataRequest())).extensions
    about = await stub.ModelMetadata(pb.ModelMetadataRequest(name=MODEL))
    assert (about.name, list(about.versions), about.inputs[0].name) == (MODEL, ["1"], "text_input")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelMetadata(pb.ModelMetadataRequest(name=MODEL, version="2"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_infer_answers_in_the_outputs_that_are_asked_for(stage: Stage, stub: Any) -> None:
    ids = stage.says(ANSWER)
    names = ("text_output", "output_ids", "finish_reason")
    asked = question(
        tensor("image", "BYTES", bytes_contents=[png(1, (28, 28))]),
        tensor("temperature", "FP32", fp32_contents=[0.5]),
        id="mine",
        outputs=wanted(*names),
        parameters={"max_tokens": pb.InferParameter(int64_param=30)},
    )
    reply = await stub.ModelInfer(asked)
    assert (reply.model_name, reply.model_version, reply.id) == (MODEL, "1", "mine")
    assert outputs(reply) == dict(zip(names, (ANSWER, ids, "eos_token"), strict=True))
    [played] = stage.scheduler.played.values()
    assert (played.spec.sampling.temperature, played.spec.sampling.max_tokens) == (0.5, 30)
    raw = pb.ModelInferRequest(
        model_name=MODEL,
        inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=[1, 2])],
        raw_input_contents=[struct.pack("<2i", 5, 6)],
    )
    assert outputs(await stub.ModelInfer(raw)) == {"output0": ids}


async def test_a_stream_answers_prompts_in_turn_in_parts_or_whole(stage: Stage, stub: Any) -> None:
    stream = tensor("stream", "BOOL", bool_contents=[True])
    both = wanted("text_output", "output_ids", "finish_reason")
    asked = [
        question(stream, id="a", outputs=both),
        question(id="b", outputs=both),
        question(id="c", parameters={"top_q": pb.InferParameter(double_param=1)}),
        question(stream, id="d", parameters={"exclude_input_in_output": pb.InferParameter(bool_param=False)}),
    ]  # fmt: skip
    ids = stage.says(ANSWER)
    found: dict[str, list[pb.ModelStreamInferResponse]] = {}
    async for response in stub.ModelStreamInfer(iter_of(asked)):
        found.setdefault(response.infer_response.id, []).append(response)
    assert list(found) == ["a", "b", "c", "d"] and len(found["a"]) > 1 and len(found["b"]) == 1
    for name in "ab":
        parts = [outputs(response.infer_response) for response in found[name]]
        assert "".join(part["text_output"] for part in parts) == ANSWER
        assert [token for part in parts for token in part["output_ids"]] == ids
        assert [part["finish_reason"] for part in parts] == [""] * (len(parts) - 1) + ["eos_token"]
    for responses in found.values():
        finals = [
            r.infer_response.parameters["triton_final_response"].bool_param for r in responses
        ]
        assert finals == [False] * (len(responses) - 1) + [True]
    assert found["c"][0].error_message.startswith("parameters.top_q ")
    texts = [outputs(response.infer_response)["text_output"] for response in found["d"]]
    assert "".join(texts) == TEXT + ANSWER


async def iter_of(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


async def test_a_call_that_is_cancelled_ends_its_request(stage: Stage, stub: Any) -> None:
    async def step(rid: str, index: int) -> None:
        await asyncio.sleep(0.05)

    stage.scheduler.step = step
    for begin in (stub.ModelInfer, lambda request: stub.ModelStreamInfer(iter_of([request]))):
        stage.scheduler.played.clear()
        call = begin(question(tensor("max_tokens", "INT32", int_contents=[400])))
        stage.says(ANSWER * 20)
        if begin is not stub.ModelInfer:
            reading = asyncio.ensure_future(call.read())
        played = await stage.scheduler.taken()
        call.cancel()
        async with asyncio.timeout(60):
            await played.ended.wait()
        assert played.cancelled
        if begin is not stub.ModelInfer:
            reading.cancel()


def refusals() -> Iterator[tuple[pb.ModelInferRequest, str]]:
    text = "text_input"
    yield pb.ModelInferRequest(model_name=MODEL), "inputs "
    yield question(tensor("nothing", "BYTES", bytes_contents=[b""])), "inputs.nothing "
    yield question(tensor("top_p", "FP32", fp32_contents=[3.0])), "inputs.top_p "
    yield question(tensor("stream", "BOOL", bool_contents=[True])), "stream "
    yield question(parameters={"top_p": pb.InferParameter(string_param="x")}), "parameters.top_p "
    yield question(parameters={"seed": pb.InferParameter(double_param=0.5)}), "parameters.seed "
    yield question(outputs=wanted("logits")), "outputs[0].name "
    yield question(outputs=wanted("output_ids", "output_ids")), "outputs[1].name "
    yield question(raw_input_contents=[b"a", b"b"]), "raw_input_contents "
    yield question(raw_input_contents=[b"\xff\xff\xff\xff"]), f"inputs.{text} "
    yield question(raw_input_contents=[b"\x01\x00\x00\x00\xff"]), f"inputs.{text} "
    one = pb.ModelInferRequest.InferInputTensor(name=text, datatype="BYTES", shape=[1])
    yield pb.ModelInferRequest(model_name=MODEL, inputs=[one]), f"inputs.{text} "


@pytest.mark.parametrize(
    ("request_", "begins"), list(refusals()), ids=lambda value: str(value)[:40]
)
async def test_what_is_wrong_is_named(
    stage: Stage, stub: Any, request_: pb.ModelInferRequest, begins: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(request_)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(begins)
    assert not stage.scheduler.played


async def test_bytes_in_a_stream_that_are_no_message_end_it(stage: Stage) -> None:
    async with open_channel(stage.gateway.grpc_address) as channel:
        call: Any = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call(iter_of([b"\xff\xff"])):
                pass
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "no inference.ModelInferRequest" in (caught.value.details() or "")


async def test_it_is_behind_the_keys(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with (
        open_stage(redis_url, model_folder, tokenizer, api_key="sesame") as stage,
        open_channel(stage.gateway.grpc_address) as channel,
    ):
        stub: Any = GRPCInferenceServiceStub(channel)
        key = (("authorization", "Bearer sesame"),)
        assert outputs(await stub.ModelInfer(question(), metadata=key)) == {"text_output": ANSWER}
        about = pb.ModelReadyRequest(name=MODEL), pb.ModelMetadataRequest(name=MODEL)
        calls = (
            (stub.ModelInfer, question()),
            (stub.ModelReady, about[0]),
            (stub.ModelMetadata, about[1]),
            (stub.ServerMetadata, pb.ServerMetadataRequest()),
        )
        for call, message in calls:
            await call(message, metadata=key)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(message)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.ModelStreamInfer(iter_of([question()])):
                pass
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_whole_answers_have_the_limits_of_http(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    limits = {"max_answer_bytes": 5_000, "max_answer_bytes_in_flight": 6_000}
    stream = tensor("stream", "BOOL", bool_contents=[True])
    large, small = (tensor("max_tokens", "INT32", int_contents=[count]) for count in (400, 300))
    async with (
        open_stage(redis_url, model_folder, tokenizer, **limits) as stage,
        open_channel(stage.gateway.grpc_address) as channel,
    ):
        stub: Any = GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(question(large))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "--max-answer-bytes" in (caught.value.details() or "")
        assert not stage.scheduler.played
        asked = [question(large, id="a"), question(stream, large, id="b")]
        asked += [question(small, id=name) for name in "cd"]
        errors = {
            response.infer_response.id: response.error_message
            async for response in stub.ModelStreamInfer(iter_of(asked))
        }
        assert "--max-answer-bytes" in errors["a"]
        # What an answer reserved is given back before the next prompt of the stream.
        assert [errors[name] for name in "bcd"] == [""] * 3
        for _ in range(2):
            assert outputs(await stub.ModelInfer(question(small))) == {"text_output": ANSWER}

"""POST /v2/models/{model}/infer: tensors in JSON or behind it, and the outputs that are asked for."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from services.gateway.api.kserve.schema import VERSION, InferRequest, InputTensor, OutputTensor
from services.gateway.api.kserve.tensors import BYTES, Tensor, from_bytes, from_json, to_bytes
from services.gateway.decoding.bounds import at_most, text, whole, wrong
from services.gateway.decoding.decode import decode
from services.gateway.decoding.list_limits import MOST_IDS
from services.gateway.endings import end_name
from services.gateway.following.answer import Answer, Outcome
from shared.errors import InvalidRequest

MOST_TENSORS = 64
_LONGEST_NAME = 256
TEXT, IDS, REASON = "text_output", "output_ids", "finish_reason"
_OF_IDS = "output0"


class InferBody(NamedTuple):
    """A request by tensors."""

    content: InferRequest
    tensors: Sequence[Tensor]
    json: bytes  # what a repeated request is known by


class WantedOutput(NamedTuple):
    """An output that is asked for: its name, what it holds, and whether as bytes."""

    name: str
    holds: str
    binary: bool


def read_body(body: bytes, header_length: str) -> InferBody:
    """`header_length`: of the JSON before bytes, as a header says it; empty where there are none. Raises
    InvalidRequest.
    """
    size = len(body)
    if header_length:
        is_number = header_length.isascii() and header_length.isdigit() and len(header_length) < 12
        if not is_number or int(header_length) > len(body):
            name = "Inference-Header-Content-Length"
            raise InvalidRequest(
                "INVALID_HEADER",
                f"{name} must be the length of the JSON that the body begins with",
                field=name,
            )
        size = int(header_length)
    content = decode(body[:size], InferRequest)
    inputs = content.inputs
    if not inputs:
        raise wrong("inputs", "must hold at least one tensor")
    at_most("inputs", len(inputs), MOST_TENSORS)
    rest = memoryview(body)[size:]
    tensors = []
    for index, given in enumerate(inputs):
        tensor, used = _tensor(given, f"inputs[{index}]", rest)
        rest = rest[used:]
        tensors.append(tensor)
    if len(rest):
        raise wrong("inputs", f"are followed by {len(rest)} bytes of no tensor (binary_data_size)")
    return InferBody(content, tensors, body if size == len(body) else _repeatable(body, size))


def wanted_outputs(
    outputs: Sequence[OutputTensor] | None, by_ids: bool, binary: bool
) -> list[WantedOutput]:
    """The outputs that are asked for, by default what the prompt was: text or ids. `binary`: whether as bytes, unless
    they say so themselves. Raises InvalidRequest for one that there is not, or that is asked for twice.
    """
    if not outputs:
        return [WantedOutput(_OF_IDS, IDS, binary) if by_ids else WantedOutput(TEXT, TEXT, binary)]
    at_most("outputs", len(outputs), MOST_TENSORS)
    found: dict[str, WantedOutput] = {}
    for index, output in enumerate(outputs):
        one = _wanted(output, f"outputs[{index}]", by_ids, binary)
        if one.name in found:
            raise wrong(f"outputs[{index}].name", f"is {one.name!r} again: ask for it once")
        found[one.name] = one
    return [*found.values()]


def output_tensor(wanted: WantedOutput, text: str, ids: Sequence[int], reason: str) -> Tensor:
    """One output of an answer."""
    if wanted.holds == IDS:
        return Tensor(wanted.name, "UINT32", (1, len(ids)), ids)
    value = text if wanted.holds == TEXT else reason
    return Tensor(wanted.name, BYTES, (1,), (value.encode(),))


def infer_reply(
    answer: Answer, outcome: Outcome, wanted: Sequence[WantedOutput]
) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON where bytes follow it."""
    reply = answer.head.reply
    outputs, behind = [], []
    for one in wanted:
        tensor = output_tensor(
            one, reply.prompt_text + outcome.text, answer.token_ids(0), end_name(outcome.ending)
        )
        about: dict[str, Any] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": list(tensor.shape),
        }
        if one.binary:
            behind.append(to_bytes(tensor))
            about["parameters"] = {"binary_data_size": len(behind[-1])}
        else:
            values = tensor.values
            about["data"] = [v.decode() for v in values] if tensor.datatype == BYTES else [*values]
        outputs.append(about)
    content = {"model_name": answer.head.model, "model_version": VERSION, "outputs": outputs}
    if reply.client_id:
        content["id"] = reply.client_id
    written = json.dumps(content, ensure_ascii=False).encode()
    return b"".join([written, *behind]), len(written) if behind else None


def _tensor(given: InputTensor, field: str, rest: memoryview) -> tuple[Tensor, int]:
    """A tensor, and how many of the bytes behind the JSON are its."""
    name = text(f"{field}.name", given.name, _LONGEST_NAME)
    if not name:
        raise wrong(f"{field}.name", "is missing")
    if given.datatype is None or given.shape is None:
        raise wrong(field, "must have a datatype and a shape")
    shape = [whole(f"{field}.shape", size, 0, MOST_IDS * 1024) or 0 for size in given.shape]
    size = None
    if given.parameters is not None:
        size = whole(
            f"{field}.parameters.binary_data_size", given.parameters.binary_data_size, 0, 1 << 31
        )
    if size is None:
        return from_json(name, given.datatype, shape, given.data), 0
    if bytes(given.data):
        raise wrong(f"{field}.data", "cannot be combined with binary_data_size")
    if size > len(rest):
        raise wrong(
            f"{field}.parameters.binary_data_size",
            f"must not be above the {len(rest)} bytes that follow",
        )
    return from_bytes(name, given.datatype, shape, bytes(rest[:size])), size


def _wanted(output: OutputTensor, field: str, by_ids: bool, binary: bool) -> WantedOutput:
    name = text(f"{field}.name", output.name, _LONGEST_NAME)
    if output.parameters is not None and output.parameters.binary_data is not None:
        binary = output.parameters.binary_data
    if name in (TEXT, IDS, REASON):
        return WantedOutput(name, name, binary)
    if by_ids and name:
        return WantedOutput(name, IDS, binary)
    raise wrong(f"{field}.name", f"must be one of {TEXT}, {IDS}, {REASON}, not {name[:64]!r}")


def _repeatable(body: bytes, size: int) -> bytes:
    return msgspec.json.encode(
        {"json": body[:size].decode("utf-8", "replace"), "data": body[size:]}
    )

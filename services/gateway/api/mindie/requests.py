"""POST /infer: its body, checked and turned into our own types."""

from collections.abc import Mapping

from services.gateway.api.mindie.schema import InferRequest, Parameters
from services.gateway.decoding.bounds import wrong
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.fields.field_names import fields_named
from services.gateway.reading.fields.unsupported import unsupported
from services.gateway.reading.generation import (
    Prompt,
    check_adapter,
    ids_prompt,
    read_generation,
)
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.prompt_parts import read_prompt
from services.gateway.reading.sampling.drawn import drawn
from services.gateway.reading.valid_request import ValidRequest
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_DEFAULT_NEW_TOKENS = 20
_SAME = (
    "temperature", "top_k", "top_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop",
    "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "ignore_eos", "priority", "timeout",
    "max_window_size",
)  # fmt: skip
_NAMES: Mapping[str, str] = {
    "max_tokens": "parameters.max_new_tokens",
    **{name: f"parameters.{name}" for name in _SAME},
}


def read_infer(body: InferRequest, model: ServedModel) -> tuple[ValidRequest, GenerationOptions]:
    """The request, and the options that it was made of. Raises InvalidRequest naming the field."""
    given = body.parameters or Parameters()
    _refuse(given)
    check_adapter("parameters.adapter_id", given.adapter_id, model)
    wanted = given.max_new_tokens
    options = GenerationOptions(
        model=given.adapter_id or None,
        stream=body.stream,
        max_tokens=_DEFAULT_NEW_TOKENS if wanted is None else wanted,
        **{name: getattr(given, name) for name in _SAME},
    )
    if given.do_sample is False:
        options.temperature = 0.0
    elif given.do_sample:
        options.temperature = drawn(options.temperature, model)
    prompt = _prompt(body, model)
    with fields_named(_NAMES):
        request = read_generation(options, prompt, ReplyKind.REPLY_KIND_MINDIE, None, model)
    request.reply.details = given.details is True
    return request, options


def _prompt(body: InferRequest, model: ServedModel) -> Prompt:
    if body.input_id is None:
        return read_prompt(body.inputs, "inputs", model)
    if body.inputs is not None:
        raise wrong("input_id", "cannot be combined with inputs: leave one of them out")
    return ids_prompt(list(body.input_id), model, "input_id")


def _refuse(given: Parameters) -> None:
    for name, off in (("typical_p", 1), ("watermark", False)):
        if getattr(given, name) not in (None, off):
            raise unsupported(f"parameters.{name}", "is not offered: leave it out")
    if given.max_new_tokens is not None and given.max_new_tokens < 1:
        raise wrong("parameters.max_new_tokens", "must be at least 1")

"""TGI's request bodies, checked and turned into our own types."""

from collections.abc import Iterator, Mapping

from services.gateway.api.tgi.grammar import read_grammar
from services.gateway.api.tgi.markdown_images import split_at_images
from services.gateway.api.tgi.schema import GenerateRequest, Parameters
from services.gateway.decoding.bounds import wrong
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.fields.field_names import fields_named
from services.gateway.reading.fields.unsupported import is_off, unsupported
from services.gateway.reading.generation import Prompt, check_adapter, read_generation
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.prompt_parts import image_part, media_urls, parts_prompt, read_prompt
from services.gateway.reading.sampling.drawn import drawn
from services.gateway.reading.valid_request import ValidRequest
from tessera.preprocess.v1.preprocess_pb2 import Part
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_DEFAULT_NEW_TOKENS = 100
_NAMES: Mapping[str, str] = {
    ours: f"parameters.{theirs}"
    for ours, theirs in {
        "max_tokens": "max_new_tokens",
        "logprobs": "top_n_tokens",
        "truncate_prompt_tokens": "truncate",
        **{
            name: name
            for name in (
                "best_of", "frequency_penalty", "repetition_penalty", "seed", "stop", "temperature", "top_k", "top_p",
            )
        },
    }.items()
}  # fmt: skip


def read_generate(body: GenerateRequest, stream: bool, model: ServedModel) -> ValidRequest:
    """A request to generate. Raises InvalidRequest naming the field, or NotFound."""
    given = body.parameters or Parameters()
    _refuse(given, stream)
    check_adapter("parameters.adapter_id", given.adapter_id, model)
    options = generation_options(body, stream)
    if given.do_sample:
        options.temperature = drawn(options.temperature, model)
    with_details = given.details is True
    if given.top_n_tokens and not with_details:
        raise wrong("parameters.top_n_tokens", "needs details to be true")
    logprobs = given.top_n_tokens or 0 if with_details else None
    prompt, form = _prompt(body, model), read_grammar(given.grammar)
    with fields_named(_NAMES):
        if logprobs is not None and not 0 <= logprobs <= model.max_logprobs:
            raise wrong("logprobs", f"must be between 0 and {model.max_logprobs}")
        count = None if logprobs is None else int(logprobs)
        request = read_generation(options, prompt, ReplyKind.REPLY_KIND_TGI, count, model, form)
    # Not `echo`, which would score the prompt.
    request.reply.prompt_text = prompt.text() if given.return_full_text else ""
    return request


def generation_options(body: GenerateRequest, stream: bool) -> GenerationOptions:
    """The options under our names. As in TGI, nothing is drawn unless a field asks for it, and stop strings stay in the
    text.
    """
    given = body.parameters or Parameters()
    chosen = (given.temperature, given.top_k, given.top_p, given.typical_p)
    draws = given.do_sample is True or any(value is not None for value in chosen)
    # The prompt's log-probabilities stand in the details; a whole text has none there.
    scores = 0 if given.decoder_input_details else None
    wanted = given.max_new_tokens
    return GenerationOptions(
        model=given.adapter_id or body.model,
        stream=stream,
        prompt_logprobs=scores,
        best_of=given.best_of,
        max_tokens=_DEFAULT_NEW_TOKENS if wanted is None else wanted,
        stop=[*(given.stop or ()), *(given.stop_sequences or ())],
        include_stop_str_in_output=True,
        truncate_prompt_tokens=given.truncate,
        seed=given.seed,
        temperature=given.temperature if draws else 0.0,
        top_k=given.top_k,
        top_p=given.top_p,
        repetition_penalty=given.repetition_penalty,
        frequency_penalty=given.frequency_penalty,
    )


def urls(body: GenerateRequest) -> Iterator[str]:
    """The URLs that media are read from, where they stand alone."""
    return media_urls(body.inputs)


def _refuse(given: Parameters, stream: bool) -> None:
    """Raises InvalidRequest for what is not offered, or not together."""
    if not is_off(given.watermark, False):
        raise unsupported("parameters.watermark", "is not offered: leave it out")
    if given.typical_p not in (None, 1):
        raise unsupported(
            "parameters.typical_p", "is not offered: leave it out; top_p and top_k are"
        )
    if given.temperature is not None and not given.temperature > 0:
        raise wrong(
            "parameters.temperature",
            "must be greater than 0: leave it out for the likeliest tokens",
        )
    if given.truncate is not None and given.truncate < 1:
        raise wrong("parameters.truncate", "must be at least 1")
    if given.max_new_tokens is not None and given.max_new_tokens < 1:
        raise wrong("parameters.max_new_tokens", "must be at least 1")
    if given.decoder_input_details and (stream or not given.details):
        raise wrong(
            "parameters.decoder_input_details",
            "needs details to be true, and an answer that is not streamed",
        )


def _prompt(body: GenerateRequest, model: ServedModel) -> Prompt:
    inputs = body.inputs
    if not isinstance(inputs, str):
        return read_prompt(inputs, "inputs", model)
    if "](" not in inputs:
        return read_prompt(inputs, "inputs", model)
    parts = []
    for before, url in split_at_images(inputs, "inputs"):
        if before:
            parts.append(Part(text=before))
        if url is not None:
            parts.append(image_part(url.strip(), "inputs"))
    return parts_prompt(parts, model)

"""Ollama's options, checked and under the names that all APIs share."""

import re

from services.gateway.api.ollama.schema import GeneratingBody, Options
from services.gateway.decoding.bounds import whole, wrong
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.constraint import Constraint
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.structured.spellings import any_object, checked
from services.gateway.reading.unsupported import is_off, unsupported
from shared.errors import NotFound
from shared.lora.modules import BASE

# A model's name without a tag has this one.
_TAG = ":latest"
_NO_LIMIT = (-1, -2)  # without end; until the context is full
# A duration as Go writes it, such as 5m, 1h30m or -1s; or seconds.
_DURATION = re.compile(
    r"[-+]?(?:0|[0-9]+(?:\.[0-9]+)?|(?:[0-9]+(?:\.[0-9]+)?(?:ns|us|µs|ms|s|m|h))+)"
)
_LONGEST_DURATION = 64
_NO_OPTIONS = Options()


def read_name(name: str | None, model: ServedModel) -> str:
    """The name without its tag: the model's, which None means too, what it is called without an adapter, or that of
    one. Raises NotFound for another one."""
    for known in (model.name, BASE, *model.adapters.keys()):
        if name in (None, known, known + _TAG):
            return known
    raise NotFound("MODEL_NOT_FOUND", f"model '{(name or '')[:256]}' not found", field="model")


def read_options(body: GeneratingBody, model: ServedModel) -> GenerationOptions:
    """How to generate, and whether the reply is a stream, which it is unless `stream` is false. Raises InvalidRequest
    naming the field, or NotFound.
    """
    name = read_name(body.model, model)
    _check_body(body)
    options = body.options or _NO_OPTIONS
    _check_off(options)
    whole("options.num_ctx", options.num_ctx, 1, model.max_model_len)
    return GenerationOptions(
        model=name,
        stream=body.stream is not False,
        max_tokens=_num_predict(options, model),
        seed=options.seed,
        stop=options.stop or None,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )


def read_format(body: GeneratingBody) -> Constraint | None:
    """The form that the answer is held to, if there is one. Raises InvalidRequest."""
    if is_off(body.format, ""):
        return None
    if not is_off(body.format, "json"):
        given = bytes(body.format)
        if not given.startswith(b"{"):
            raise wrong("format", 'must be "json" or a JSON schema, as an object')
        return checked(Constraint("format", "json", given))
    return any_object("format")


def _check_body(body: GeneratingBody) -> None:
    for name in ("truncate", "shift"):
        if not is_off(getattr(body, name), False):
            raise unsupported(
                name,
                "asks to shorten what exceeds the model's length, which is not offered: leave it out or send false",
            )
    check_keep_alive(body.keep_alive)


def check_keep_alive(given: str | float | None) -> None:
    """Raises InvalidRequest for what is no duration."""
    if isinstance(given, str) and (
        len(given) > _LONGEST_DURATION or not _DURATION.fullmatch(given)
    ):
        raise wrong("keep_alive", 'must be a duration such as "5m", or a number of seconds')


def _check_off(options: Options) -> None:
    """Raises InvalidRequest for an option that would change the answer in a way that is not offered."""
    if not is_off(options.repeat_last_n, -1):
        raise unsupported(
            "options.repeat_last_n",
            "is not offered: penalties count all of prompt and answer; leave it out or send -1",
        )
    if not is_off(options.mirostat, 0):
        raise unsupported("options.mirostat", "is not offered: leave it out or send 0")
    for name in ("tfs_z", "typical_p"):
        if not is_off(getattr(options, name), 1, 1.0):
            raise unsupported(f"options.{name}", "is not offered: leave it out or send 1")


def _num_predict(options: Options, model: ServedModel) -> int | None:
    name = "options.num_predict"
    count = whole(name, options.num_predict, min(_NO_LIMIT), model.max_model_len)
    if count == 0:
        raise wrong(name, "must be at least 1, or -1 for all that the model's length leaves")
    return None if count in _NO_LIMIT else count

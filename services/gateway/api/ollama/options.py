"""Ollama's options, checked and under the names that all APIs share."""

import re
from typing import NamedTuple

from services.gateway.api.ollama.schema import ChatBody, GeneratingBody, Options
from services.gateway.decoding.bounds import INT32_MAX, whole, wrong
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.constraint import Constraint
from services.gateway.reading.fields.unsupported import is_off, unsupported
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.structured.spellings import any_object, checked
from shared.errors import NotFound
from shared.lora.modules import BASE

# A model's name without a tag has this one.
_TAG = ":latest"
# Above the length of any model.
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
    read_num_ctx(options)
    penalized = _penalties(options, model)
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
        repetition_penalty=penalized.repeat,
        presence_penalty=penalized.presence,
        frequency_penalty=penalized.frequency,
        max_window_size=model.max_model_len if body.truncate else None,
    )


def read_num_ctx(options: Options | None) -> int | None:
    """How much of the model's length is wanted, which may be more than all of it: clients name lengths of their own.
    Raises InvalidRequest."""
    given = None if options is None else options.num_ctx
    return whole("options.num_ctx", given, 1, INT32_MAX)


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
    if body.truncate and not isinstance(body, ChatBody):
        raise unsupported(
            "truncate", "is for conversations: leave it out or send false, and shorten the prompt"
        )
    if not is_off(body.shift, False):
        raise unsupported(
            "shift",
            "asks to forget the beginning where an answer exceeds the model's length, which is not offered: leave it"
            " out or send false",
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
    if not is_off(options.penalize_newline, True):
        raise unsupported("options.penalize_newline", "is not offered: leave it out or send true")
    if not is_off(options.mirostat, 0):
        raise unsupported("options.mirostat", "is not offered: leave it out or send 0")
    for name in ("tfs_z", "typical_p"):
        if not is_off(getattr(options, name), 1, 1.0):
            raise unsupported(f"options.{name}", "is not offered: leave it out or send 1")


class _Penalties(NamedTuple):
    """Those of a request; None is the checkpoint's."""

    repeat: float | None
    presence: float | None
    frequency: float | None


def _penalties(options: Options, model: ServedModel) -> _Penalties:
    """Raises InvalidRequest for penalties that count the last tokens alone."""
    name = "options.repeat_last_n"
    last = whole(name, options.repeat_last_n, -1, INT32_MAX)
    asked = _Penalties(options.repeat_penalty, options.presence_penalty, options.frequency_penalty)
    if last == 0:
        return _Penalties(1.0, 0.0, 0.0)
    repeat = asked.repeat
    if repeat is None:
        repeat = model.defaults.numbers.get("repetition_penalty", 1.0)
    if last not in (None, -1) and (repeat != 1 or asked.presence or asked.frequency):
        raise unsupported(
            name,
            "is not offered beside a penalty: penalties count all of prompt and answer; leave it out, or send -1, or 0"
            " for none",
        )
    return asked


def _num_predict(options: Options, model: ServedModel) -> int | None:
    name = "options.num_predict"
    count = whole(name, options.num_predict, min(_NO_LIMIT), INT32_MAX)
    if count == 0:
        raise wrong(name, "must be at least 1, or -1 for all that the model's length leaves")
    return None if count is None or count in _NO_LIMIT else min(count, model.max_model_len)

"""From a prompt and options to a validated request: what every API that generates has in common."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.gateway.decoding.bounds import INT32_MAX, text, whole, wholes, wrong
from services.gateway.model.pooled_model import Task
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.constraint import Constraint
from services.gateway.reading.conversation import TEMPLATE_TOKENS, conversation_bound
from services.gateway.reading.fields.unsupported import refuse_unsupported, unsupported
from services.gateway.reading.logprob_fields import Logprobs, read_logprobs
from services.gateway.reading.media.media_options import read_media_options
from services.gateway.reading.options import GenerationOptions, StreamOptions
from services.gateway.reading.sampling.sampling import read_sampling, scores_prompt_only
from services.gateway.reading.short_prompts import is_short
from services.gateway.reading.structured.spellings import read_constraint
from services.gateway.reading.valid_request import ValidRequest
from shared.lora.modules import BASE
from shared.queue.token_log import encode_tokens, stride
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest
from tessera.scheduler.v1.queue_pb2 import ReplyFormat, ReplyKind

_LONGEST_USER = 512
_LONGEST_SALT = 512
_LAST_PRIORITY = 1000
# What huggingface_hub's InferenceClient calls the model where its user named none; older ones: tgi.
_NO_MODEL = frozenset({"dummy", "tgi"})
_NO_STREAM_OPTIONS = StreamOptions()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to prepare, an upper bound of its tokens, and how to get its text where it is repeated."""

    prepare: PrepareRequest
    bound: int
    text: Callable[[], str] = str


def conversation_prompt(prepare: PrepareRequest, model: ServedModel) -> Prompt:
    """A chat's prompt."""
    return Prompt(prepare, conversation_bound(prepare.conversation, model))


def text_prompt(prompt: str) -> Prompt:
    """A completion's prompt as text."""
    bound = len(prompt.encode()) + TEMPLATE_TOKENS
    return Prompt(PrepareRequest(text=prompt), bound, lambda: prompt)


def ids_prompt(ids: list[float] | list[int], model: ServedModel, field: str = "prompt") -> Prompt:
    """A completion's prompt as token ids. Raises InvalidRequest naming `field`."""
    if not ids:
        raise wrong(field, "must be a string, or a list of token ids")
    checked = wholes(field, ids, 0, model.vocab_size - 1)
    return Prompt(
        PrepareRequest(token_ids=encode_tokens(checked)),
        len(checked),
        lambda: model.table.text(checked, skip_special_tokens=False),
    )


def mindie_prompt(ids: list[float] | list[int], names: str, model: ServedModel) -> Prompt:
    """A completion's prompt as ids of which some name pictures in shared memory. Raises InvalidRequest."""
    checked = wholes("prompt", ids, -(1 << 63), model.vocab_size - 1)
    data = np.asarray(checked, dtype="<i8").tobytes()
    return Prompt(PrepareRequest(mindie_ids=data, shm_name_save_path=names), len(checked))


def check_model(name: str | None, model: ServedModel) -> None:
    """Raises NotFound for the name of another model, which is none of its adapters. None means this one."""
    read_adapter(name, model)


def read_adapter(name: str | None, model: ServedModel) -> tuple[str, str]:
    """The name and the digest of the adapter that answers where `model` in a body names this; empty for the model
    itself. None is the served name. Raises NotFound for the name of another model."""
    if name is None or (name in _NO_MODEL and name not in model.adapters):
        name = model.name
    return model.adapter_of(name)


def check_adapter(field: str, name: str | None, model: ServedModel) -> None:
    """Raises InvalidRequest unless `name`, of a field of its own, is an adapter's, or that of the model without one.
    None and "" are not given."""
    if name and name != BASE and name not in model.adapters:
        known = ", ".join(map(repr, (BASE, *model.adapters)))
        raise wrong(field, f"must be one of this server's adapters ({known}), not {name[:64]!r}")


def read_generation(
    options: GenerationOptions,
    prompt: Prompt,
    kind: "ReplyKind.ValueType",
    output_logprobs: int | None,
    model: ServedModel,
    form: Constraint | None = None,
) -> ValidRequest:
    """Checks the options and fills in the defaults. `form`: of an API with fields of its own for it.
    Raises InvalidRequest naming the field, or NotFound.
    """
    refuse_unsupported(options)
    if options.thinking_token_budget is not None and not _is_chat(prompt.prepare):
        raise unsupported("thinking_token_budget", "is for chats: leave it out")
    adapter, lora_id = read_adapter(options.model, model)
    model.require(Task.GENERATE)
    if options.stream_options is not None and not options.stream:
        raise wrong("stream_options", "is only allowed when stream is true")
    logprobs = read_logprobs(options, output_logprobs, model.max_logprobs)
    sampling = read_sampling(options, model, logprobs)
    read_media_options(options, prompt.prepare)
    keep = _read_truncation(options, prompt.prepare, sampling.max_tokens, model)
    prepare = _limited(options, prompt.prepare, keep, model)
    return ValidRequest(
        prepare=prepare,
        sampling=sampling,
        reply=_reply_format(options, prompt, kind, logprobs, model),
        stream=options.stream is True,
        user=read_user(options.user),
        prompt_bound=min(
            prompt.bound, keep or prompt.bound, prepare.max_window_size or prompt.bound
        ),
        priority=read_priority(options.priority),
        cache_salt=read_cache_salt(options.cache_salt),
        adapter=adapter,
        lora_id=lora_id,
        has_short_prompt=is_short(prepare),
        constraint=form or _read_form(options),
    )


def _read_form(options: GenerationOptions) -> Constraint | None:
    constraint = read_constraint(options)
    if constraint is not None:
        check_form(options, constraint.field)
    return constraint


def check_form(options: GenerationOptions, field: str) -> None:
    """Raises InvalidRequest for what cannot be asked for beside a form of the answer, which `field` asks for."""
    for name in ("use_beam_search", "ignore_eos"):
        if getattr(options, name):
            text = f"cannot be combined with {field}, which decides where the answer ends"
            raise wrong(name, f"{text}: leave one of them out")


def _reply_format(
    options: GenerationOptions,
    prompt: Prompt,
    kind: "ReplyKind.ValueType",
    logprobs: Logprobs,
    model: ServedModel,
) -> ReplyFormat:
    events = options.stream_options or _NO_STREAM_OPTIONS
    echo = options.echo is True
    # Who wants to see control tokens wants the text as it is; and a completion is not a chat's reply.
    is_raw = options.skip_special_tokens is False or not _is_chat(prompt.prepare)
    return ReplyFormat(
        kind=kind,
        echo=echo,
        prompt_text=prompt.text() if echo else "",
        include_usage=events.include_usage is True,
        continuous_usage=events.continuous_usage_stats is True,
        return_token_ids=options.return_token_ids is True,
        skip_special_tokens=options.skip_special_tokens is not False,
        tokens_as_ids=options.return_tokens_as_token_ids is True,
        prompt_only=scores_prompt_only(options),
        prompt_logprobs=logprobs.shown,
        clean_up=() if is_raw else model.clean_up,
    )


def _is_chat(prepare: PrepareRequest) -> bool:
    return prepare.HasField("conversation") and not prepare.conversation.as_prompt


def _read_truncation(
    options: GenerationOptions, prepare: PrepareRequest, max_tokens: int, model: ServedModel
) -> int:
    """How many tokens of the prompt's end are kept; 0 is all. -1 means as many as leave room for the
    answer.
    """
    name = "truncate_prompt_tokens"
    wanted = whole(name, options.truncate_prompt_tokens, -1, model.max_model_len)
    if wanted is None:
        return 0
    if wanted == 0:
        raise wrong(name, "must be -1 or at least 1")
    if options.echo:
        raise wrong(name, "cannot be combined with echo, which repeats the whole prompt")
    parts = (part for message in prepare.conversation.messages for part in message.content)
    if any(part.WhichOneof("part") != "text" for part in parts):
        raise wrong(name, "cannot be combined with media: shorten the text instead")
    return wanted if wanted > 0 else max(1, model.max_model_len - max(1, max_tokens))


def _limited(
    options: GenerationOptions, prepare: PrepareRequest, keep: int, model: ServedModel
) -> PrepareRequest:
    """The same with how many tokens it may have, how many are kept, its window, and whether special ones are added."""
    prepare.max_prompt_tokens = model.max_model_len - 1
    if options.add_special_tokens is not None:
        prepare.add_special_tokens = options.add_special_tokens
    if (window := read_window(options.max_window_size)) is not None:
        if window and keep:
            raise wrong(
                "truncate_prompt_tokens", "cannot be combined with max_window_size: leave one out"
            )
        prepare.max_window_size = window
    if keep and prepare.token_ids:  # nothing has to be tokenized for it
        prepare.token_ids = prepare.token_ids[-stride(None) * keep :]
    else:
        prepare.keep_last_tokens = keep
    return prepare


def read_window(value: float | None) -> int | None:
    """The field `max_window_size`; 0 for no window. Raises InvalidRequest."""
    return whole("max_window_size", value, 0, INT32_MAX)


def read_user(value: str | None) -> str:
    """The field `user`. Raises InvalidRequest for one that is too long."""
    return text("user", value, _LONGEST_USER)


def read_cache_salt(value: str | None) -> str:
    """The field `cache_salt`; empty if it is not there. Raises InvalidRequest for one that is empty or too long."""
    salt = text("cache_salt", value, _LONGEST_SALT)
    if value is not None and not salt:
        raise wrong("cache_salt", "must not be empty: leave it out to share what is computed")
    return salt


def read_priority(value: float | None) -> int:
    """The field `priority`; 0 if it is not there. Raises InvalidRequest."""
    return whole("priority", value, -_LAST_PRIORITY, _LAST_PRIORITY) or 0

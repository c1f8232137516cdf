"""Prompts that become vectors: their options, and validated requests."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec

from services.gateway.decoding.about import about
from services.gateway.decoding.bounds import at_most, whole, wrong
from services.gateway.decoding.decode import Whole
from services.gateway.model.pooled_model import Floats, PooledModel, Task
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.fields.unsupported import unsupported
from services.gateway.reading.generation import (
    Prompt,
    check_model,
    ids_prompt,
    read_cache_salt,
    read_priority,
    read_user,
    text_prompt,
)
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.short_prompts import is_short
from services.gateway.reading.valid_request import ValidRequest
from shared.queue.token_log import stride
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.scheduler.v1.queue_pb2 import ReplyFormat, ReplyKind

MOST_INPUTS = 2048  # as OpenAI's API

# A text, token ids, several texts, or several lists of ids.
Inputs = str | list[str | Whole | list[Whole]]


class PooledFields(msgspec.Struct, kw_only=True):
    """What the bodies of all APIs may say of prompts that become vectors."""

    model: Annotated[str | None, about("the served name")] = None
    user: Annotated[
        str | None, about("up to 512 characters: the tenant, where no API key is checked")
    ] = None
    truncate_prompt_tokens: Annotated[
        Whole | None,
        about(
            "keeps so many tokens of a text's beginning, the tokenizer's own end tokens among them; -1 what the model"
            " takes; not with `messages`",
            "refuses what is too long",
        ),
    ] = None
    add_special_tokens: Annotated[
        bool | None, about("whether the tokenizer's own tokens go around a text")
    ] = None
    priority: Annotated[Whole | None, about("-1000 to 1000, lower goes first")] = None
    service_tier: Annotated[str | None, about("`flex` waits behind all that is not")] = None
    timeout: Annotated[float | None, about("seconds from arrival to the end")] = None
    cache_salt: Annotated[
        str | None, about("only requests with an equal one share computed prefixes")
    ] = None

    def options(self) -> GenerationOptions:
        """Those of the request that do not shape its answer."""
        return GenerationOptions(service_tier=self.service_tier, timeout=self.timeout)


def read_inputs(
    inputs: Inputs | list[str] | None, model: ServedModel, before: str = "", field: str = "input"
) -> list[Prompt]:
    """A prompt for each input; `before` goes before texts. Raises InvalidRequest naming the entry of `field`."""
    if inputs is None:
        raise wrong(field, "is missing: send a text, a list of texts, or token ids")
    if isinstance(inputs, str):
        return [_prompt(inputs, model, before, field)]
    if not inputs:
        raise wrong(field, "must hold at least one text")
    if not isinstance(inputs[0], str | list):
        return [_prompt(inputs, model, before, field)]
    at_most(field, len(inputs), MOST_INPUTS)
    return [_prompt(one, model, before, f"{field}[{i}]") for i, one in enumerate(inputs)]


def read_pooled_prompt(
    fields: PooledFields, prompt: Prompt, model: ServedModel, pooled: PooledModel
) -> ValidRequest:
    """A prompt that becomes one vector. Raises InvalidRequest naming the field, or NotFound."""
    check_model(fields.model, model)
    prepare = prompt.prepare
    prepare.max_prompt_tokens = model.max_model_len - 1
    prepare.max_window_size = 0  # nothing of a conversation is left out
    if fields.add_special_tokens is not None:
        prepare.add_special_tokens = fields.add_special_tokens
    keep = _truncation(fields, prompt, model)
    if keep and prepare.token_ids:
        prepare.token_ids = prepare.token_ids[: stride(None) * keep]
    else:
        prepare.keep_first_tokens = keep
    return ValidRequest(
        prepare=prepare,
        # Of one token, whose place the vector takes.
        sampling=SamplingParams(n=1, best_of=1, max_tokens=1, top_p=1, repetition_penalty=1),
        reply=ReplyFormat(kind=ReplyKind.REPLY_KIND_POOLED, prompt_only=True),
        stream=False,
        user=read_user(fields.user),
        prompt_bound=min(prompt.bound, keep or prompt.bound),
        priority=read_priority(fields.priority),
        cache_salt=read_cache_salt(fields.cache_salt),
        has_short_prompt=is_short(prepare),
        pooling=pooled.params,
    )


def read_dimensions(value: float | None, pooled: PooledModel) -> int:
    """How many numbers of a vector are kept. Raises InvalidRequest where the model is not made for fewer."""
    count = whole("dimensions", value, 1, pooled.width)
    if count is None or count == pooled.width:
        return pooled.width
    if pooled.matryoshka is None:
        raise unsupported(
            "dimensions",
            f"asks for {count} of {pooled.width} numbers, and config.json does not say that this model's vectors may be"
            " cut (is_matryoshka): leave it out",
        )
    if pooled.matryoshka and count not in pooled.matryoshka:
        listed = ", ".join(map(str, sorted(pooled.matryoshka)))
        raise wrong("dimensions", f"must be one of {listed}, not {count}")
    return count


def finishing(
    pooled: PooledModel, dimensions: float | None, activates: bool | None
) -> Callable[[Floats], Floats]:
    """From a vector as decoders give it to what a reply shows: so many numbers of it, of length 1 or as probabilities.
    Raises InvalidRequest where the model is not made for fewer.
    """
    kept = read_dimensions(dimensions, pooled)
    return partial(pooled.finished, dimensions=kept, activates=activates)


def read_prompt_name(value: str | None, pooled: PooledModel) -> str:
    """The text that goes before others, by the name that the model's files give it. Raises InvalidRequest."""
    if value is None:
        return pooled.default_prompt
    if value not in pooled.prompts:
        known = ", ".join(pooled.prompts) or "it has none"
        raise wrong(
            "prompt_name", f"must be one of this model's prompts ({known}), not {value[:32]!r}"
        )
    return pooled.prompts[value]


def read_task(name: str | None, model: ServedModel) -> Task:
    """The task that a request names; the server's own where it names none. Raises InvalidRequest."""
    if name is None:
        return model.tasks[0]
    known = [task.value for task in Task if task is not Task.GENERATE]
    if name not in known:
        raise wrong("task", f"must be one of {', '.join(known)}, not {name[:32]!r}")
    return Task(name)


def require_messages_alone(inputs: object, prompt_name: str | None) -> None:
    """Raises InvalidRequest for what cannot be sent beside a conversation."""
    for name, value in (("input", inputs), ("prompt_name", prompt_name)):
        if value is not None:
            raise wrong(name, "cannot be combined with messages: leave one of them out")


def joined(query: str, document: str) -> Prompt:
    """A query and a text as one prompt, as the model's tokenizer puts pairs together."""
    prompt = text_prompt(query)
    prompt.prepare.text_pair = document
    return Prompt(prompt.prepare, prompt.bound + text_prompt(document).bound)


def _prompt(given: Any, model: ServedModel, before: str, field: str) -> Prompt:
    if isinstance(given, str):
        if not given:
            raise wrong(field, "must not be empty")
        return text_prompt(before + given)
    if not isinstance(given, list):
        raise wrong(field, "must be a string, or a list of token ids")
    if not {*map(type, given)} <= {int, float}:
        index = next(i for i, item in enumerate(given) if type(item) not in (int, float))
        raise wrong(f"{field}[{index}]", "must be a whole number", "INVALID_TYPE")
    return ids_prompt(given, model, field)


def _truncation(fields: PooledFields, prompt: Prompt, model: ServedModel) -> int:
    """How many tokens of the prompt's beginning are kept; 0 is all. -1 means as many as the model takes."""
    name, most = "truncate_prompt_tokens", model.max_model_len - 1
    wanted = whole(name, fields.truncate_prompt_tokens, -1, most)
    if wanted is None:
        return 0
    if wanted == 0:
        raise wrong(name, "must be -1 or at least 1")
    if prompt.prepare.HasField("conversation"):
        raise wrong(name, "cannot be combined with a conversation: shorten its text instead")
    return most if wanted < 0 else wanted


def texts_of(value: str | Sequence[str] | None, field: str) -> Sequence[str]:
    """One text or several. Raises InvalidRequest naming the entry for an empty one, and for none."""
    if value is None:
        raise wrong(field, "is missing")
    if isinstance(value, str):
        if not value:
            raise wrong(field, "must not be empty")
        return [value]
    if not value:
        raise wrong(field, "must hold at least one text")
    at_most(field, len(value), MOST_INPUTS)
    if "" in value:
        raise wrong(f"{field}[{list(value).index('')}]", "must not be empty")
    return value

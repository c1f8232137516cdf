"""How to generate, under OpenAI's and vLLM's names: what every API turns its requests into."""

from typing import Annotated

import msgspec

from services.gateway.decoding.about import about
from services.gateway.decoding.decode import Whole
from services.gateway.reading.structured.fields import StructuredFields

WINDOW = about(
    "of conversations: keeps the system messages and the newest whole turns with which the prompt has less"
    " tokens than this; 0 keeps all",
    "`--max-window-size`, or the checkpoint's",
    minimum=0,
)


class StreamOptions(msgspec.Struct):
    """What the events of a stream say beside the text."""

    include_usage: Annotated[bool | None, about("a last event with `usage`", "false")] = None
    continuous_usage_stats: Annotated[bool | None, about("`usage` in every event", "false")] = None


class GenerationOptions(StructuredFields, kw_only=True):
    """Types are checked, bounds are not yet; None is the server's default."""

    model: Annotated[
        str | None,
        about(
            "the served name, or an adapter's; `base` is the model without an adapter, `dummy` and `tgi` the served"
            " name",
            "the served one",
        ),
    ] = None
    user: Annotated[
        str | None,
        about(
            "up to 512 characters: the tenant, for fairness, where no API key is checked",
            maxLength=512,
        ),
    ] = None
    stream: Annotated[bool | None, about("true: the answer comes as events", "false")] = None
    stream_options: Annotated[
        StreamOptions | None,
        about("`include_usage`, `continuous_usage_stats`; with `stream` alone"),
    ] = None
    echo: Annotated[bool | None, about("the prompt before each answer", "false")] = None
    add_special_tokens: Annotated[
        bool | None,
        about(
            "whether the tokenizer's own begin and end tokens go around the prompt (not around token ids)",
            "a text's: true; a chat's: as the model's processor",
        ),
    ] = None
    # What the reply shows.
    prompt_logprobs: Annotated[
        Whole | None,
        about(
            "so many of the likeliest tokens at each place of the prompt; up to `--max-logprobs` (20)",
            "none",
            minimum=0,
        ),
    ] = None
    return_token_ids: Annotated[
        bool | None,
        about(
            "`token_ids` in each choice; `prompt_token_ids` where `prompt_logprobs` stand", "false"
        ),
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, about("tokens of log-probabilities are called `token_id:17`", "false")
    ] = None
    skip_special_tokens: Annotated[
        bool | None, about("boolean: special tokens are left out of the text", "true")
    ] = None
    # How many answers.
    n: Annotated[
        Whole | None,
        about(
            "1 to 128 (`--max-choices`). Choice *c* of a seed is the same whatever `n` is",
            "1",
            minimum=1,
        ),
    ] = None
    best_of: Annotated[
        Whole | None,
        about(
            "`n` to 128: candidates of which the likeliest `n` are given, best first",
            "`n`",
            minimum=1,
        ),
    ] = None
    use_beam_search: Annotated[
        bool | None,
        about("`best_of` beams, the best `n` given, as in `transformers`", "false"),
    ] = None
    length_penalty: Annotated[
        float | None, about("-10 to 10; beams only", "1", minimum=-10, maximum=10)
    ] = None
    early_stopping: Annotated[
        bool | str | None,
        about(
            'true, false or "never", as in `transformers`; beams only (gRPC: "never" is `early_stopping_never`)',
            "false",
        ),
    ] = None
    # How long.
    max_completion_tokens: Annotated[
        Whole | None,
        about(
            "1 to the model's length; with the prompt not above it",
            "checkpoint (`max_new_tokens`), at most what is left of the length",
            minimum=1,
        ),
    ] = None
    max_tokens: Annotated[
        Whole | None,
        about(
            "the same under its older name, which `max_completion_tokens` goes before. 0: see *Scoring*",
            "as `max_completion_tokens`",
            minimum=0,
        ),
    ] = None
    min_tokens: Annotated[
        Whole | None,
        about(
            "0 to `max_tokens`: no stop id before", "checkpoint (`min_new_tokens`), or 0", minimum=0
        ),
    ] = None
    thinking_token_budget: Annotated[
        Whole | None,
        about(
            "of chats: at most so many tokens of reasoning, then its end is forced; 0 is no reasoning",
            "none",
            minimum=0,
        ),
    ] = None
    ignore_eos: Annotated[
        bool | None, about("boolean: the model's own ends do not end the answer", "false")
    ] = None
    stop: Annotated[
        str | list[str] | None,
        about(
            "one text or up to 16, of up to 1024 characters", "checkpoint (`stop_strings`), or none"
        ),
    ] = None
    stop_token_ids: Annotated[
        list[Whole] | None, about("ids that end the answer, up to 1024", "none")
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, about("boolean: the stop string stays in the text", "false")
    ] = None
    truncate_prompt_tokens: Annotated[
        Whole | None,
        about(
            "keeps so many tokens of the prompt's end; -1 keeps what leaves room for `max_tokens`; not with media or"
            " `echo`",
            "all",
            minimum=-1,
        ),
    ] = None
    max_window_size: Annotated[Whole | None, WINDOW] = None
    # Which tokens.
    seed: Annotated[
        Whole | None,
        about(
            "-2^63 to 2^64 - 1 (gRPC from 0); -1 is none, as in vLLM; another negative one is the unsigned number of"
            " the same bits",
            "drawn",
            minimum=-(1 << 63),
            maximum=(1 << 64) - 1,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        about(
            "0 to 2; 0 takes the likeliest, of equal ones the lowest id",
            "checkpoint (1)",
            minimum=0,
            maximum=2,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        about("above 0, to 1", "checkpoint (1)", exclusiveMinimum=0, maximum=1),
    ] = None
    top_k: Annotated[Whole | None, about("0 or -1 is off", "checkpoint (off)", minimum=-1)] = None
    min_p: Annotated[float | None, about("0 to 1", "checkpoint (0)", minimum=0, maximum=1)] = None
    repetition_penalty: Annotated[
        float | None,
        about(
            "above 0, to 100; prompt and answer",
            "checkpoint (1)",
            exclusiveMinimum=0,
            maximum=100,
        ),
    ] = None
    presence_penalty: Annotated[
        float | None, about("-2 to 2; the answer alone", "0", minimum=-2, maximum=2)
    ] = None
    frequency_penalty: Annotated[
        float | None, about("-2 to 2; the answer alone", "0", minimum=-2, maximum=2)
    ] = None
    logit_bias: Annotated[dict[str, float] | None, about("token ids to -100 .. 100", "none")] = None
    allowed_token_ids: Annotated[
        list[Whole] | None, about("at least one id; no other is generated", "all")
    ] = None
    bad_token_ids: Annotated[
        list[Whole] | None,
        about("ids that are never generated", "checkpoint (`suppress_tokens`), or none"),
    ] = None
    bad_words: Annotated[
        str | list[str] | None,
        about(
            "up to 256 texts of up to 256 characters; each as the tokenizer cuts it alone and after a space, as in"
            " vLLM",
            "checkpoint (`bad_words_ids`), or none",
        ),
    ] = None
    # Order in the queue, deadline, and with whom computed prefixes are shared.
    priority: Annotated[
        Whole | None,
        about(
            "-1000 to 1000, lower goes first among one tenant's waiting requests",
            "0",
            minimum=-1000,
            maximum=1000,
        ),
    ] = None
    service_tier: Annotated[
        str | None,
        about(
            "`flex` waits behind all that is not (every tenth request taken is one of them); `auto`, `default`,"
            " `priority`, `scale` and `standard_only` are all alike",
            "auto",
        ),
    ] = None
    timeout: Annotated[
        float | None,
        about("seconds from arrival to the end, above 0", "the server's", exclusiveMinimum=0),
    ] = None
    cache_salt: Annotated[
        str | None,
        about(
            "a text of 1 to 512 characters: only requests with an equal one find each other's computed prefixes",
            "none",
            minLength=1,
            maxLength=512,
        ),
    ] = None

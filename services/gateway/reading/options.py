"""How to generate, under OpenAI's and vLLM's names: what every API turns its requests into."""

import msgspec

from services.gateway.decoding.decode import Whole
from services.gateway.reading.structured.fields import StructuredFields


class StreamOptions(msgspec.Struct):
    """What the events of a stream say beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationOptions(StructuredFields, kw_only=True):
    """Types are checked, bounds are not yet; None is the server's default."""

    model: str | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    # What the reply shows.
    prompt_logprobs: Whole | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    # How many answers.
    n: Whole | None = None
    best_of: Whole | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    # How long.
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    min_tokens: Whole | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Whole | None = None
    max_window_size: Whole | None = None
    # Which tokens.
    seed: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Whole] | None = None
    bad_token_ids: list[Whole] | None = None
    bad_words: str | list[str] | None = None
    # Order in the queue, deadline, and with whom computed prefixes are shared.
    priority: Whole | None = None
    service_tier: str | None = None
    timeout: float | None = None
    cache_salt: str | None = None

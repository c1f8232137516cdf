"""Lists of a body with several prompts: each of them gets a copy."""

from services.gateway.decoding.bounds import wrong
from services.gateway.decoding.json_limits import MOST_VALUES
from services.gateway.reading.options import GenerationOptions


def check_copies(options: GenerationOptions, prompts: int) -> None:
    """Each of several prompts is a request of its own, with all lists of the body. Raises InvalidRequest naming the
    longest where they would have too many values together.
    """
    lists = {
        "logit_bias": options.logit_bias,
        "allowed_token_ids": options.allowed_token_ids,
        "bad_token_ids": options.bad_token_ids,
        "stop_token_ids": options.stop_token_ids,
    }
    sizes = {name: len(values) for name, values in lists.items() if values}
    if prompts * sum(sizes.values()) > MOST_VALUES:
        longest = max(sizes, key=lambda name: sizes[name])
        raise wrong(
            longest,
            f"holds too much for {prompts} prompts: lists may have {MOST_VALUES // prompts} entries for each of them;"
            " send several requests",
        )

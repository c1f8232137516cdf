"""Lists and forms of a body with several prompts: each of them gets a copy."""

from collections.abc import Sequence

from services.gateway.decoding.bounds import wrong
from services.gateway.decoding.json_limits import MOST_VALUES
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.valid_request import ValidRequest

_MOST_BYTES = 4 << 20


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


def check_form_copies(requests: Sequence[ValidRequest]) -> None:
    """Each of several prompts is admitted with the grammar of the body's form. Raises InvalidRequest naming it where
    they would have too much together.
    """
    constraint = requests[0].constraint
    if constraint is not None and len(requests) * len(constraint.json) > _MOST_BYTES:
        raise wrong(
            constraint.field,
            f"holds too much for {len(requests)} prompts: it may have {_MOST_BYTES // len(requests)} bytes as JSON;"
            " send several requests",
        )

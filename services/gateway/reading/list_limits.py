"""Limits of the lists in one request, in REST and gRPC alike."""

from services.gateway.reading.bounds import wrong
from services.gateway.reading.json_limits import MOST_VALUES
from services.gateway.reading.options import GenerationOptions

MOST_MESSAGES = 4096
MOST_PARTS = 8192  # in all messages together
MOST_STOP_IDS = 1024
MOST_IDS = 65_536  # of allowed_token_ids, bad_token_ids and logit_bias
MOST_FRAMES = 1024
LONGEST_TEMPLATE_KWARGS = 65_536  # bytes as JSON
LONGEST_TOOLS = 524_288  # bytes as JSON
LONGEST_TOOL_NAME = 256  # characters


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

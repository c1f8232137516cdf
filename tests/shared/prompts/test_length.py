"""One check of a prompt's length, with one text."""

import pytest

from shared.errors import InvalidRequest
from shared.prompts.length import require_answer_fits, require_prompt_fits


@pytest.mark.parametrize(
    ("tokens", "longest", "most", "limit"), [(11, 10, 0, 10), (10, 10, 9, 9), (11, 10, 99, 10)]
)
def test_a_prompt_over_the_limit_of_the_request_or_the_model_is_refused(
    tokens: int, longest: int, most: int, limit: int
) -> None:
    require_prompt_fits(limit, longest, "prompt", most)
    said = (
        f"This model's maximum context length is {longest} tokens. However, prompt resulted in"
        f" {tokens} tokens, and a prompt may have {limit}: shorten it"
    )
    with pytest.raises(InvalidRequest) as caught:
        require_prompt_fits(tokens, longest, "prompt", most)
    assert caught.value.message == said and caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"


def test_an_answer_must_fit_behind_its_prompt() -> None:
    require_answer_fits(6, 4, 10)
    with pytest.raises(InvalidRequest, match=r"requested 11 tokens \(7 in the prompt, 4 in"):
        require_answer_fits(7, 4, 10)

"""Nobody learns from `cached_tokens` what another key has asked, before and after a scheduler's crash."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.support.checkpoints import make_checkpoint
from tests.support.processes.system import System

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

SECRET = "The treasure lies under the third oak behind the mill, two metres deep. " * 3


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen2_vl")
    with System(folder, "--language-model-only", "--api-key", "ann,bob,eve") as running:
        yield running


def cached(system: System, key: str, salt: str | None = None) -> int:
    """How many tokens of the secret had been computed before."""
    more = {} if salt is None else {"cache_salt": salt}
    with OpenAI(base_url=system.base_url, api_key=key, max_retries=0, timeout=120) as client:
        answer = client.completions.create(
            model="tiny", prompt=SECRET, max_tokens=2, extra_body=more
        )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details is not None else 0


def test_only_the_same_key_with_the_same_salt_finds_a_prefix(system: System) -> None:
    assert cached(system, "ann") == 0
    known = cached(system, "ann")
    assert known > 0
    assert cached(system, "bob") == 0
    assert cached(system, "bob") == known
    assert cached(system, "ann", "team") == 0
    assert cached(system, "ann", "team") == known
    assert cached(system, "ann", "other team") == 0
    assert cached(system, "bob", "team") == 0

    # The next scheduler learns from the decoder what is computed, and for whom.
    system.kill("scheduler")
    system.wait_ready()
    assert cached(system, "eve") == 0
    assert cached(system, "eve", "team") == 0
    assert cached(system, "ann", "third team") == 0
    assert cached(system, "ann") == known
    assert cached(system, "bob") == known
    assert cached(system, "ann", "team") == known

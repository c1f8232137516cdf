"""WeMM on a simulated 910B4 in float16, every service a process of its own: the tokens of the reference in float32, for
prompts alone, together with others, and in pieces."""

from pathlib import Path

import pytest

from tests.families.test_wemm import SIZES, TOKENS, messages, picture, turns
from tests.reference_models import wemm
from tests.reference_models.common import IMAGE
from tests.support.processes.answers import ask_all
from tests.support.processes.system import System

SEED = 117  # with which the two largest logits are 0.040 apart or more everywhere: float16 rounds finer than that


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 72 elements, as SigLIP's."""
    path = tmp_path_factory.mktemp("wemm") / "under-test"
    return wemm.write_checkpoint(
        path, seed=SEED, lora_alpha=12, depth=3, vision={"hidden_size": 288}
    )


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "step_tokens", [pytest.param(2048, id="whole"), pytest.param(64, id="in pieces")]
)
def test_answers_are_those_of_the_reference(folder: Path, step_tokens: int) -> None:
    chats = [messages(number) for number in range(len(SIZES))]
    flags = ("--device", "npu", "--dtype", "float16", "--max-num-batched-tokens", str(step_tokens))
    with System(folder, *flags) as system:
        alone = [ask_all(system.base_url, [chat], TOKENS)[0] for chat in chats]
        together = ask_all(system.base_url, chats, TOKENS)
        assert system.log.count("device=npu dtype=float16") == 2  # decoder and encoder
    reference = wemm.Wemm(folder)
    for number, answers in enumerate(zip(alone, together, strict=True)):
        has_picture = IMAGE in turns(number)[0][1]
        ids = reference.prompt_ids(turns(number), [SIZES[number]] if has_picture else [])
        made = reference.generate(ids, [picture(number)] if has_picture else [], TOKENS)
        for prompt, tokens in answers:
            assert prompt == [max(0, token) for token in ids]
            assert tokens == made.tokens

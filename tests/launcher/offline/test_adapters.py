"""Offline prompts that are answered with adapters."""

from pathlib import Path

import pytest

from services.launcher.offline import LLM, LoRARequest, RequestRefused, SamplingParams
from services.launcher.run.command import run_batches
from services.launcher.run.inputs import InputError, read_inputs
from services.launcher.run.settings import RunSettings
from tests.support.preprocess.service import picture

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("offline")]

PROMPT = "The red circle is"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_prompts_and_pictures_are_answered_by_the_adapter_that_they_name(
    llm: LLM, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.png"
    picture(56, 56, 0).save(file)
    kinds = [None, "small", LoRARequest("small", 1, str(adapter))]
    plain, one, same = llm.generate([PROMPT] * 3, GREEDY, lora_request=kinds)
    assert one.outputs[0].token_ids == same.outputs[0].token_ids
    assert one.outputs[0].token_ids != plain.outputs[0].token_ids
    with pytest.raises(RequestRefused, match="other"):
        llm.generate(PROMPT, GREEDY, lora_request="other")
    with pytest.raises(ValueError, match="lora_request"):
        llm.generate(PROMPT, GREEDY, lora_request=["small"] * 2)

    def answered(*flags: str, pairs: str = "") -> str:
        few = ("--max-output-length", "8", "--ignore-eos", "--temperature", "0")
        given = RunSettings.load([*few, *flags], prog="tessera run")
        images = [] if pairs else [file]
        run_batches(llm, read_inputs(images, "What is it?", pairs), given)
        return capsys.readouterr().out

    adapted = answered("--lora-adapter-id", "small")
    assert adapted != answered()
    entry = f'[{{"image": "{file}", "prompt": "What is it?", "adapter": "small"}}]'
    assert answered(pairs=entry) == adapted


def test_an_adapter_that_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="adapter"):
        read_inputs([], "", '[{"image": "a.png", "prompt": "x", "adapter": 7}]')

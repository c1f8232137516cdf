"""Offline prompts that are answered with adapters."""

import shutil
from pathlib import Path

import pytest

from services.launcher.offline import LLM, LoRARequest, RequestRefused, SamplingParams
from services.launcher.offline.engine.flags import engine_flags
from services.launcher.offline.prompts.adapters import Adapter
from services.launcher.offline.requests.path_adapters import PathAdapters
from services.launcher.run.command import run_batches
from services.launcher.run.inputs import InputError, read_inputs
from services.launcher.run.settings import RunSettings
from shared.client import Client
from tests.launcher.offline.conftest import adapted_sizes
from tests.support.lora_folder import write_adapter
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


def test_a_prompt_is_answered_by_the_adapter_in_the_folder_that_it_names(
    llm: LLM, folder: Path, adapter: Path, tmp_path: Path
) -> None:
    """Two of one name, in one call too; what is at a path later, under another number."""
    sizes = adapted_sizes(folder)
    other = write_adapter(tmp_path / "other", 5, sizes=sizes, lora_alpha=2)
    copy = shutil.copytree(adapter, tmp_path / "copy")
    named: list[Adapter] = [
        "small",
        LoRARequest("step", 1, str(copy)),
        LoRARequest("step", 2, str(other)),
    ]
    small, one, two = (
        output.outputs[0].token_ids
        for output in llm.generate([PROMPT] * 3, GREEDY, lora_request=named)
    )
    assert one == small != two
    shutil.rmtree(copy)
    shutil.copytree(other, copy)
    [later] = llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("step", 3, str(copy)))
    assert later.outputs[0].token_ids == two
    conversation = [{"role": "user", "content": PROMPT}]
    by_name, by_path = (
        llm.chat(conversation, GREEDY, lora_request=one)[0].outputs[0].token_ids
        for one in ("small", LoRARequest("again", 4, str(adapter)))
    )
    assert by_name == by_path


def test_what_is_no_adapters_folder_is_refused(llm: LLM, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match="absent"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("x", 1, str(tmp_path / "absent")))
    with pytest.raises(ValueError, match="'small' is the adapter in"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("small", 1, str(tmp_path)))


async def test_an_engine_without_enable_lora_loads_nothing(adapter: Path) -> None:
    adapters = PathAdapters(Client(["http://127.0.0.1:1"]), {"small": adapter}, by_path=False)
    assert await adapters.name_of(LoRARequest("small", 1, str(adapter))) == "small"
    assert await adapters.name_of(LoRARequest("other")) == "other"
    with pytest.raises(ValueError, match="enable_lora=True"):
        await adapters.name_of(LoRARequest("other", 1, str(adapter)))
    with pytest.raises(ValueError, match="contradicts"):
        engine_flags({"enable_lora": False, "lora_modules": {"small": adapter}})
    assert engine_flags({"enable_lora": True}) == {"allowed_adapter_dir": "/"}
    assert engine_flags({"enable_lora": True, "allowed_adapter_dir": "/a"}) == {
        "allowed_adapter_dir": "/a"
    }


def test_an_adapter_that_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="adapter"):
        read_inputs([], "", '[{"image": "a.png", "prompt": "x", "adapter": 7}]')

"""Offline prompts that are answered with adapters."""

from pathlib import Path

import pytest
from safetensors import safe_open

from services.launcher.offline import LLM, LoRARequest, RequestRefused, SamplingParams
from services.launcher.run.command import run_batches
from services.launcher.run.inputs import InputError, read_inputs
from services.launcher.run.settings import RunSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.lora_folder import write_adapter
from tests.support.preprocess.service import picture

pytestmark = pytest.mark.timeout(600)

PROMPT = "The red circle is"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llava")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    modules = {}
    with safe_open(base / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118
            if "vision" not in name and name.endswith(("q_proj.weight", "down_proj.weight")):
                modules[name.removesuffix(".weight")] = tuple(file.get_slice(name).get_shape())
    return write_adapter(base.parent / "adapter", sizes=modules, lora_alpha=2)


def test_prompts_and_pictures_are_answered_by_the_adapter_that_they_name(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.png"
    picture(56, 56, 0).save(file)
    modules = {"small": adapter}
    with LLM(base, dtype="float32", max_model_len=1024, lora_modules=modules) as llm:
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

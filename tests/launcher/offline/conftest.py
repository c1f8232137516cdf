"""One model, with an adapter, for all tests that only ask it. Files that take it are of one `xdist_group`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open

from services.launcher.offline import LLM
from tests.support.checkpoints import make_checkpoint
from tests.support.lora_folder import write_adapter


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small model that takes pictures."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen2_vl")


@pytest.fixture(scope="package")
def adapter(folder: Path) -> Path:
    """Of some of its decoder's layers."""
    return write_adapter(folder.parent / "adapter", sizes=adapted_sizes(folder), lora_alpha=2)


def adapted_sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of these layers, by their modules."""
    modules = {}
    with safe_open(folder / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118
            if "visual" not in name and name.endswith(("q_proj.weight", "down_proj.weight")):
                modules[name.removesuffix(".weight")] = tuple(file.get_slice(name).get_shape())
    return modules


@pytest.fixture(scope="package")
def llm(folder: Path, adapter: Path) -> Iterator[LLM]:
    """It, being served, with the adapter by the name `small`."""
    with LLM(
        folder,
        dtype="float32",
        max_model_len=512,
        lora_modules={"small": adapter},
        enable_lora=True,
    ) as running:
        yield running

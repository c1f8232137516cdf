"""Versions of torch and torch_npu: ranges in pyproject.toml, the tested ones in constraints.txt, pairs with CANN."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from services.launcher.ascend import versions

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def requirement(extra: str, name: str) -> Requirement:
    """What an extra wants of a package."""
    wanted = [Requirement(text) for text in EXTRAS[extra] if not text.startswith("tessera-serve[")]
    return next(one for one in wanted if one.name == name)


def arguments(file: str) -> dict[str, str]:
    """ARG -> default, of a Dockerfile."""
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", (ROOT / file).read_text(), re.MULTILINE))


@pytest.mark.parametrize("extra", ["decoder", "vision-encoder"])
@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_the_tested_version_is_one_that_the_extras_allow(extra: str, name: str) -> None:
    text = (ROOT / "constraints.txt").read_text()
    pinned = re.search(rf"^{name}==(\S+)$", text, re.MULTILINE)
    assert pinned
    assert requirement(extra, name).specifier.contains(pinned[1].replace("*", "0"))


@pytest.mark.parametrize("file", ["Makefile", ".ci/install_libraries"])
def test_whoever_installs_libraries_takes_the_tested_versions(file: str) -> None:
    text = (ROOT / file).read_text()
    installs = [
        line for line in text.splitlines() if re.search(r"install .*\.\[|PIP_INSTALL =", line)
    ]
    assert installs
    for line in installs:
        assert re.search(
            r"-c constraints\.txt|--constraint constraints\.txt|\$\(PIP_INSTALL\)", line
        )


def test_torch_npu_is_no_part_of_what_is_installed_elsewhere() -> None:
    others = [text for extra, wanted in EXTRAS.items() if extra != "npu" for text in wanted]
    assert not any("npu" in text for text in others)
    assert "install torch_npu" not in (ROOT / "Makefile").read_text()


def test_the_image_for_npus_has_versions_that_belong_together() -> None:
    given = arguments("Dockerfile.ascend")
    cann = re.search(r"cann:([\d.]+)", given["CANN"])
    assert cann
    assert versions.CANN_OF[given["TORCH_NPU"]] == cann[1]
    assert versions.belong_together(given["TORCH"], given["TORCH_NPU"])
    assert requirement("npu", "torch_npu").specifier.contains(given["TORCH_NPU"])
    assert requirement("decoder", "torch").specifier.contains(given["TORCH"])


def test_compose_builds_that_image_with_the_same_versions() -> None:
    text = (ROOT / "compose.ascend.yaml").read_text()
    defaults = dict(re.findall(r"^    (\w+): \$\{\w+:?-(.*)\}$", text, re.MULTILINE))
    assert defaults == arguments("Dockerfile.ascend")


def test_every_known_pair_is_one_that_the_extra_allows() -> None:
    allowed = requirement("npu", "torch_npu").specifier
    assert [one for one in versions.CANN_OF if not allowed.contains(one)] == []

"""What the releases of torch_npu ask for that the doctor knows (services/launcher/ascend/versions.py).

`python .ci/npu_releases.py` asks the package index for the metadata of their wheels for x86_64 and aarch64, for Python
3.11: of each wheel some kilobytes, and nothing is installed. A release is right if there are both wheels, if they want
the torch of its own number, and if the libraries of this environment are such as it wants. Of those that want a torch
with the label `+cpu` docs/ascend.md has to say so.

With TORCH_INDEX, an index that has such a torch, it then installs of each torch the newest release, and the one that
Dockerfile.ascend takes, into an environment of its own, and runs tests with it: the decoder's on the CPU, and those of
the simulated NPU. Without, it says that these were left out. The exit status is 1 if something is not right, and 0 also
where no index answers: then it says so.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from services.launcher.ascend.versions import CANN_OF, number  # noqa: E402

ARCHITECTURES = ("x86_64", "aarch64")
PLATFORM = "manylinux_2_28"
ENVIRONMENTS = ROOT / "build" / "npu_releases"
TESTS = ("tests/decoder/devices", "tests/decoder/models/test_tokens.py")
TESTS_ON_NPU = ("tests/ascend/device", "tests/ascend/decoder/test_tokens.py")


def pip(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Runs pip."""
    command = [python, "-m", "pip", *arguments, "--retries=1", "--timeout=15"]
    return subprocess.run(command, capture_output=True, text=True)


def requirements(release: str, architecture: str) -> list[Requirement]:
    """What a wheel wants that is always needed. Raises LookupError with pip's words if there is no such wheel, and
    ConnectionError where no index answers."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = pip(
            *("install", "--dry-run", "--quiet", "--no-deps", "--only-binary=:all:"),
            *("--implementation=cp", "--python-version=3.11", f"--platform={PLATFORM}_{architecture}"),
            # Of a wheel its metadata alone is read.
            *("--use-feature=fast-deps", "--target", folder, "--report", str(report)),
            f"torch_npu=={release}",
        )  # fmt: skip
        if "connection broken by" in done.stderr:
            raise ConnectionError
        if done.returncode:
            raise LookupError(done.stderr.strip().splitlines()[-1])
        [found] = json.loads(report.read_text())["install"]
    wanted = [Requirement(line) for line in found["metadata"].get("requires_dist", [])]
    return [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]


def torch_of(release: str) -> str:
    """The number of the torch that a release belongs to."""
    return ".".join(map(str, number(release)[:3]))


def check(release: str, architecture: str) -> tuple[str, list[str]]:
    """The torch that a wheel wants, and what is not right. Raises ConnectionError."""
    try:
        wanted = requirements(release, architecture)
    except LookupError as error:
        return "", [f"{release}, {architecture}: {error}"]
    torch = next((one for one in wanted if one.name == "torch"), None)
    own = torch_of(release)
    problems = []
    if torch is None or not torch.specifier.contains(f"{own}+cpu"):
        problems.append(f"{release}, {architecture}: wants {torch}, and not torch {own}")
    for one in wanted:
        if one.name != "torch" and not one.specifier.contains(metadata.version(one.name)):
            here = metadata.version(one.name)
            problems.append(f"{release}, {architecture}: wants {one}, and this is {here}")
    return str(torch.specifier) if torch else "", problems


def documented() -> set[str]:
    """The torch numbers of which docs/ascend.md says that torch_npu wants them with the label."""
    said = re.search(r"torch_npu ([\d., and]+) require a torch with the label `\+cpu`",
                     " ".join((ROOT / "docs/ascend.md").read_text().split()))  # fmt: skip
    return set(re.findall(r"\d+\.\d+", said[1])) if said else set()


def run(release: str, index: str) -> bool:
    """Whether tests pass with a release in an environment of its own."""
    folder = ENVIRONMENTS / release
    python = folder / "bin" / "python"
    torch = torch_of(release)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    folder.mkdir(parents=True, exist_ok=True)
    constraints.write_text("\n".join(line for line in lines if not line.startswith("torch==")))
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    installed = pip(
        *("install", "--quiet", "--extra-index-url", index, "--constraint", str(constraints)),
        *("--group", f"{ROOT}/pyproject.toml:dev", "--editable", f"{ROOT}[local]", f"torch=={torch}"),
        python=str(python),
    )  # fmt: skip
    if installed.returncode:
        print(f"torch {torch} cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
        return False
    environment = {
        **os.environ,
        "TESSERA_TEST_TORCH_NPU": release,
        "TESSERA_NPU_BUILD": str(folder / "build"),
    }
    commands = (
        [str(python), "-m", "pytest", "-q", *TESTS],
        [
            *(str(python), "-m", "tests.ascend.environment"),
            *(str(python), "-m", "pytest", "-q", *TESTS_ON_NPU),
        ],
    )
    passed = [
        subprocess.run(command, cwd=ROOT, env=environment).returncode == 0 for command in commands
    ]
    print(f"{release} with torch {torch}: {'tests pass' if all(passed) else 'tests FAIL'}")
    return all(passed)


def to_run() -> list[str]:
    """Of each torch that pyproject.toml takes the newest release, and the one that the image takes."""
    of_image = re.search(r"^ARG TORCH_NPU=(\S+)", (ROOT / "Dockerfile.ascend").read_text(), re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [taken] = map(Requirement, project["optional-dependencies"]["npu"])
    newest: dict[str, str] = {}
    for release in filter(taken.specifier.contains, CANN_OF):
        known = newest.get(torch_of(release), release)
        newest[torch_of(release)] = max(known, release, key=number)
    return sorted({*newest.values(), *([of_image[1]] if of_image else [])}, key=number)


def main() -> None:
    """Prints what was found."""
    asked = [(release, architecture) for release in CANN_OF for architecture in ARCHITECTURES]
    try:
        with ThreadPoolExecutor(4) as threads:
            found = dict(zip(asked, threads.map(lambda pair: check(*pair), asked), strict=True))
    except ConnectionError:
        print("skipped: the package index does not answer")
        return
    problems = [problem for _, wrong in found.values() for problem in wrong]
    labelled = {
        torch_of(release).rpartition(".")[0]
        for (release, _), (torch, _) in found.items()
        if "+cpu" in torch
    }
    for release in CANN_OF:
        torches = dict.fromkeys(found[release, architecture][0] for architecture in ARCHITECTURES)
        print(f"torch_npu {release:<13} wants torch {' and '.join(torches)}", flush=True)
    if not problems and labelled != documented():
        problems.append(
            f"docs/ascend.md names {sorted(documented())}, and these are {sorted(labelled)}"
        )
    if problems:
        sys.exit("\n".join(problems))
    index = os.environ.get("TORCH_INDEX", "")
    if not index:
        print(
            "releases but the one of `make test-npu` were not installed and run: no TORCH_INDEX is given"
        )
        return
    there = pip("index", "versions", "--index-url", index, "torch")
    if there.returncode:
        print(
            f"releases but the one of `make test-npu` were not installed and run: {index} does not answer"
        )
        return
    failed = [release for release in to_run() if not run(release, index)]
    if failed:
        sys.exit(f"not right: {', '.join(failed)}")


if __name__ == "__main__":
    main()

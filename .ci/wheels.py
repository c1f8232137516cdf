"""Whether everything that pyproject.toml names has a wheel for aarch64 Linux, for Python 3.11.

`python .ci/wheels.py [requirement ...]` resolves what the project, its groups and all extras but `train` and `video`
need, and further requirements if given, as pip would on such a machine (glibc 2.31 or newer). It installs nothing. Of
torch and torch_npu, which are large, it only asks whether there is a wheel that fits, of torch the one of
constraints.txt. The exit status is 1 if something has none, and 0 also where no index answers: then it says so.
"""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PYTHON = "3.11"
PLATFORMS = ["manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 32))]
LEFT_OUT = ("train", "video")
ONLY_LOOKED_FOR = ("torch", "torch_npu")
ROOT = Path(__file__).parents[1]
# Markers such as `platform_machine == "x86_64"` ask the machine that pip runs on.
PIP = "import platform, runpy; platform.machine = lambda: 'aarch64'; runpy.run_module('pip', run_name='__main__')"


def requirements() -> list[str]:
    """What pyproject.toml names, but for the project itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    lists = [
        project["project"]["dependencies"],
        *(wanted for extra, wanted in extras.items() if extra not in LEFT_OUT),
        *project["dependency-groups"].values(),
    ]
    own = project["project"]["name"]
    return sorted({name for wanted in lists for name in wanted if not name.startswith(f"{own}[")})


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pip as if on such a machine. Ends this program where no index answers."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON}"]
    options += ["--retries=1", "--timeout=15", *platforms]
    command = [sys.executable, "-c", PIP, *arguments, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "connection broken by" in done.stderr:
        print("skipped: the package index does not answer")
        sys.exit(0)
    return done


def has_wheel(wanted: Requirement) -> bool:
    """Whether the index has a wheel of a version that is wanted, and that constraints.txt allows."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = [Requirement(line) for line in lines if line and not line.startswith("#")]
    allowed = [one.specifier for one in constraints if one.name == wanted.name] + [wanted.specifier]
    there = pip("index", "versions", wanted.name).stdout.partition("Available versions:")[2]
    return any(
        all(specifier.contains(version) for specifier in allowed)
        for version in there.partition("\n")[0].replace(",", " ").split()
    )


def main() -> None:
    """Prints what was found, or pip's words about what was not."""
    wanted = [*requirements(), *sys.argv[1:]]
    looked_for = [one for one in wanted if Requirement(one).name in ONLY_LOOKED_FOR]
    with tempfile.TemporaryDirectory() as folder:
        resolved = pip(
            "install", "--dry-run", "--quiet", "--target", folder,
            *(one for one in wanted if one not in looked_for),
        )  # fmt: skip
    failures = []
    if resolved.returncode:
        failures += [line for line in resolved.stderr.splitlines() if line.startswith("ERROR")]
    failures += [
        f"ERROR: no wheel of {one}" for one in looked_for if not has_wheel(Requirement(one))
    ]
    if failures:
        sys.exit("\n".join(["not to be had as wheels for aarch64:", *failures]))
    resolving = len(wanted) - len(looked_for)
    print(
        f"{resolving} requirements resolve to wheels for aarch64, and there is one of {', '.join(looked_for)}"
    )


if __name__ == "__main__":
    main()

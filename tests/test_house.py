"""Rules of the house that no linter knows."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import services
import shared

ROOT = Path(__file__).parents[1]
LONGEST_FILE = 500  # lines
LONGEST_MAIN = 31


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository, those not committed yet included, ignored ones not."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    try:
        output = subprocess.check_output(command, cwd=ROOT, text=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for line in output.splitlines() if (path := ROOT / line).is_file()]


def test_packages_are_the_repositorys_own() -> None:
    # A foreign top-level package called `shared` or `services` would be picked up silently.
    assert Path(shared.__file__).is_relative_to(ROOT)
    assert Path(services.__file__).is_relative_to(ROOT)


def test_no_generated_code_is_tracked() -> None:
    assert tracked("*_pb2*.py", "*_pb2*.pyi") == []


def test_every_proto_package_is_its_folder() -> None:
    protos = tracked("protos/*.proto")
    assert protos
    for path in protos:
        package = re.search(r"^package ([\w.]+);", path.read_text(), re.MULTILINE)
        folder = path.parent.relative_to(ROOT / "protos")
        assert package, path
        assert package.group(1) == ".".join(folder.parts), path


def test_only_the_settings_read_the_environment() -> None:
    allowed = ROOT / "shared" / "settings.py"
    offenders = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in tracked("services/*.py", "shared/*.py")
        if path != allowed
        for line in environment_reads(ast.parse(path.read_text()))
    ]
    assert offenders == []


def environment_reads(tree: ast.AST) -> list[int]:
    """Lines that name os.environ, os.getenv or os.putenv, imported as they may be."""
    names = {"environ", "environb", "getenv", "putenv"}
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            lines.append(node.lineno)
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in names]
    return sorted(lines)


def test_the_check_of_the_environment_sees_what_it_should() -> None:
    source = "import os\nos.environ['A']\nos.getenv('B')\nfrom os import environ\nx.fine"
    assert environment_reads(ast.parse(source)) == [2, 3, 4]


def test_every_folder_and_file_says_what_it_is() -> None:
    files = tracked("services/*.py", "shared/*.py")
    assert [path for path in files if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_every_main_is_short() -> None:
    mains = tracked("services/*/__main__.py")
    assert mains
    long = {str(p.relative_to(ROOT)): n for p in mains if (n := lines_of(p)) >= LONGEST_MAIN}
    assert long == {}


def test_no_file_holds_two_things() -> None:
    suffixes = {".py", ".proto", ".lua", ".cpp", ".h", ".sh", ".ts", ".tsx", ".css"}
    built = ROOT / "services/gateway/api/tessera/built"  # of services/gateway/page
    files = [
        path for path in tracked() if path.suffix in suffixes and not path.is_relative_to(built)
    ]
    assert files
    long = {str(p.relative_to(ROOT)): n for p in files if (n := lines_of(p)) > LONGEST_FILE}
    assert long == {}


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_compose_needs_no_registry_but_for_python_and_redis() -> None:
    # Each service is built here or is Redis.
    compose = (ROOT / "compose.yaml").read_text()
    services_text = compose.split("\nservices:\n")[1].split("\nvolumes:\n")[0]
    stanzas = re.split(r"^  (?=[\w-]+:$)", services_text, flags=re.MULTILINE)[1:]
    assert {stanza.split(":")[0] for stanza in stanzas} >= {"redis", "gateway", "decoder"}
    for stanza in stanzas:
        image = re.search(r"^    image: (\S+)$", stanza, re.MULTILINE)
        built = re.search(r"^    build:", stanza, re.MULTILINE)
        assert built or (image and image.group(1) == "redis:7-alpine"), stanza.split(":")[0]


@pytest.mark.parametrize(
    ("name", "base"),
    [("Dockerfile", "python:3.11-slim-bookworm"), ("Dockerfile.ascend", "${CANN}")],
)
def test_an_image_starts_from_another_stage_or_one_known_image(name: str, base: str) -> None:
    dockerfile = (ROOT / name).read_text()
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", dockerfile, re.MULTILINE)
    assert len(stages) == len(re.findall(r"^FROM ", dockerfile, re.MULTILINE))
    named = {name for _, name in stages}
    assert {source for source, _ in stages} - named == {base}
    assert "# syntax" not in dockerfile


def test_every_service_has_an_image() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    commands = set(re.findall(r'^CMD \["python", "-m", "services\.(\w+)"\]$', dockerfile, re.M))
    services = {path.parent.name for path in tracked("services/*/__main__.py")}
    assert services - {"launcher", "comparison"} <= commands  # programs that are no services


def test_every_service_that_computes_has_an_image_for_npus() -> None:
    dockerfile = (ROOT / "Dockerfile.ascend").read_text()
    commands = set(re.findall(r'^CMD \["python", "-m", "services\.(\w+)"\]$', dockerfile, re.M))
    assert commands == {"decoder", "vision_encoder"}
    for service in commands:
        assert f"COPY services/{service} services/{service}" in dockerfile
    assert "COPY services/families services/families" in dockerfile


def test_an_image_that_loads_families_has_them() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM .*?(?=^FROM |\Z)", dockerfile, re.MULTILINE | re.DOTALL)
    for stage in stages:
        command = re.search(r'"services\.(\w+)"\]$', stage, re.MULTILINE)
        if command is None:
            continue
        sources = tracked(f"services/{command.group(1)}/*.py")
        asks = any("services.families" in path.read_text() for path in sources)
        assert asks == ("COPY services/families services/families" in stage), command.group(1)


def imports_of(path: Path) -> Iterator[str]:
    """Modules, and names in them, that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def mutual(imports: Mapping[Path, Iterable[str]]) -> list[tuple[str, str]]:
    """Folders that import each other, of these files by what they import; one within the other is none."""
    folders = {".".join(path.parent.parts) for path in imports}
    found: set[tuple[str, str]] = set()
    for path, names in imports.items():
        own = ".".join(path.parent.parts)
        for name in names:
            while name and name not in folders:
                name = name.rpartition(".")[0]
            if name:
                found.add((own, name))
    return sorted(
        (one, other)
        for one, other in found
        if one < other and (other, one) in found and not other.startswith(f"{one}.")
    )


def test_no_two_folders_import_each_other() -> None:
    files = [path.relative_to(ROOT) for path in tracked("services/*.py", "shared/*.py")]
    assert mutual({path: list(imports_of(ROOT / path)) for path in files}) == []


def test_the_check_of_folders_sees_what_it_should() -> None:
    files = {"a/b/c.py": ["a.d.e.Name"], "a/d/e.py": ["a.b"], "a/f.py": ["a.b.c"]}
    assert mutual({Path(path): names for path, names in files.items()}) == [("a.b", "a.d")]


@pytest.mark.full  # as `make lint` does
def test_services_import_only_what_they_may() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr

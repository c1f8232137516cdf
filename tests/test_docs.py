"""Code in the documents is the code."""

import re
from pathlib import Path

import pytest

from tests.support import api_tables, model_table
from tests.test_house import tracked

ROOT = Path(__file__).parents[1]
EXCERPT = re.compile(r"```python\n# (services/\S+\.py)\n(.*?)```", re.DOTALL)


def test_nothing_is_installed_from_an_index_under_our_name() -> None:
    # Nobody has put this project there: whoever owns the name could put anything.
    files = [
        ROOT / "README.md",
        ROOT / "Makefile",
        ROOT / "Dockerfile",
        *(ROOT / "docs").glob("*.md"),
    ]
    files += [*(ROOT / "services").rglob("*.py"), *(ROOT / "shared").rglob("*.py")]
    by_name = re.compile(r"pip install[^`\n&]*tessera")
    found = [f"{path.name}: {line}" for path in files for line in by_name.findall(path.read_text())]
    assert found == []


def test_what_the_first_example_imports_is_said_to_be_installed() -> None:
    before, _, _ = (ROOT / "README.md").read_text().partition("from openai import OpenAI")
    assert "pip install openai" in before


def test_links_between_documents_lead_somewhere() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/README.md"]
    broken = []
    for document in documents:
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            if "://" in name:
                continue
            file = document.parent / name if name else document
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                broken.append(f"{document.name}: {target}")
    assert broken == []


def _anchors(file: Path) -> set[str]:
    """Of a document's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("name", ["add-a-model.md"])
def test_excerpts_stand_in_the_files_they_name(name: str) -> None:
    excerpts = EXCERPT.findall((ROOT / "docs" / name).read_text())
    assert excerpts
    for path, code in excerpts:
        assert code in (ROOT / path).read_text(), path


def test_the_table_of_models_is_that_of_the_records() -> None:
    hint = "run python -m tests.support.model_table"
    assert model_table.FILE.read_text(encoding="utf-8") == model_table.table(), hint


def test_tables_of_fields_are_those_of_their_types() -> None:
    text = api_tables.FILE.read_text(encoding="utf-8")
    assert len(re.findall("<!-- fields (of|by) ", text)) == text.count("<!-- end -->") > 0
    assert api_tables.written(text) == text, "run python -m tests.support.api_tables"


def test_files_that_documents_name_exist() -> None:
    files = [str(path.relative_to(ROOT)) for path in tracked()]
    missing = []
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        for named in re.findall(r"`([\w./-]+\.(?:py|lua|proto|h|cpp|ts))`", text):
            if not any(file == named or file.endswith(f"/{named}") for file in files):
                missing.append(f"{document.name}: {named}")
    assert missing == []


def test_what_a_requests_files_are_said_to_have_is_in_them() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [1-8](?:, [1-8])* \| `([^`]+)` \| (.+) \|$", text, re.MULTILINE)
    assert len(rows) > 20
    wrong = []
    for file, what in rows:
        content = (ROOT / file).read_text(encoding="utf-8")
        for name in re.findall(r"`([A-Za-z_.]+)`", what):
            if "." in name and name.rpartition(".")[2] in ("py", "lua"):
                continue
            parts = [rf"(?:class|def) {part}\b" for part in name.split(".")]
            if not all(re.search(part, content) or name in content for part in parts):
                wrong.append(f"{file}: {name}")
    assert wrong == []

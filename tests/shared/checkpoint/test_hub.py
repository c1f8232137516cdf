"""Models by their names on the hub, from a server with its HTTP API."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from shared.settings import DEMO_MODEL, default_model_name, hub_name
from tests.support.network.hub_server import COMMIT, HubServer
from tests.support.network.ports import closed_port
from tests.support.processes.forks import Forks, forks

NAME = "Example/Tiny-VL-1.5"
Find = Callable[..., str]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """The demo model, beside what nobody reads of a model."""
    folder = tmp_path / "repository"
    shutil.copytree(DEMO_MODEL, folder)
    for name in ("pytorch_model.bin", "model.gguf", "consolidated.safetensors", "README.md"):
        (folder / name).write_text("not this")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_text("nor this")
    with HubServer(NAME, folder) as server:
        yield server


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "hf"


@pytest.fixture(scope="module")
def finders() -> Iterator[Forks]:
    """Of processes that have imported all but the hub's library, which reads its variables when it is imported."""
    root = Path(__file__).parents[3]
    with forks({"PYTHONPATH": f"{root}:{root / 'protos'}"}, "services.families.prepare") as started:
        yield started


@pytest.fixture
def find(finders: Forks) -> Find:
    """What a process of its own finds at an endpoint, with a home."""

    def found(endpoint: str, home: Path, *arguments: str, **variables: str) -> str:
        homes = {"HOME": str(home), "HF_HOME": str(home), "HF_ENDPOINT": endpoint}
        ended = finders.run(
            "tests.support.find_model", *(arguments or (NAME,)), **homes, **variables
        )
        assert "Traceback" not in ended.stderr
        return ended.stdout.splitlines()[-1]

    return found


def test_what_services_read_is_downloaded_once(hub: HubServer, home: Path, find: Find) -> None:
    folder = Path(find(hub.url, home))
    assert folder.name == COMMIT
    expected = sorted(path.name for path in DEMO_MODEL.iterdir())
    assert hub.files() == sorted(path.name for path in folder.iterdir()) == expected
    for name in expected:
        assert (folder / name).read_bytes() == (DEMO_MODEL / name).read_bytes()
    hub.asked.clear()
    assert find(hub.url, home) == str(folder)
    assert hub.asked == []


def test_shards_are_those_that_the_index_names(hub: HubServer, home: Path, find: Find) -> None:
    (hub.folder / "model.safetensors").rename(hub.folder / "part-1.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors"}}
    (hub.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    find(hub.url, home)
    weights = [name for name in hub.files() if name.endswith(".safetensors")]
    assert weights == ["part-1.safetensors"]


def test_a_model_without_safetensors_comes_as_pickled_tensors(
    hub: HubServer, home: Path, find: Find
) -> None:
    (hub.folder / "model.safetensors").unlink()
    torch.save({"a": torch.ones(2)}, hub.folder / "pytorch_model.bin")
    folder = find(hub.url, home)
    assert (Path(folder) / "pytorch_model.bin").exists()
    hub.asked.clear()
    assert find(hub.url, home) == folder
    assert hub.asked == []


def test_an_interrupted_download_is_continued(hub: HubServer, home: Path, find: Find) -> None:
    hub.breaks = 1
    folder = Path(find(hub.url, home))
    whole = (DEMO_MODEL / "model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() == whole
    ranges = [asked for _, path, asked in hub.asked if path.endswith("model.safetensors") and asked]
    assert len(ranges) == 1 and re.fullmatch(r"bytes=[1-9]\d+-", ranges[0])


def test_an_incomplete_model_in_the_cache_does_not_count(
    hub: HubServer, home: Path, find: Find
) -> None:
    folder = Path(find(hub.url, home))
    (folder / "model.safetensors").unlink()
    said = find(hub.url, home, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE forbids downloads" in said
    assert find(hub.url, home) == str(folder)
    assert (folder / "model.safetensors").exists()


def test_offline_the_cache_is_enough(hub: HubServer, home: Path, find: Find) -> None:
    said = find(hub.url, home, HF_HUB_OFFLINE="1")
    assert said.startswith("Unavailable")
    assert f"hf download {NAME} --local-dir FOLDER" in said
    assert hub.asked == []
    folder = find(hub.url, home)
    assert find(hub.url, home, HF_HUB_OFFLINE="1") == folder


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: HubServer, home: Path, find: Find) -> None:
    assert Path(find(hub.url, home, NAME, "v1")).name == COMMIT
    assert Path(find(hub.url, home, NAME, COMMIT)).name == COMMIT
    said = find(hub.url, home, NAME, "v2")
    assert said.startswith("NotFound")
    assert f"{NAME} has no --revision v2" in said


def test_a_token_is_sent_where_one_is_needed(hub: HubServer, home: Path, find: Find) -> None:
    hub.token = "hf_secret"
    for variables in ({}, {"HF_TOKEN": "hf_wrong"}):
        said = find(hub.url, home, **variables)
        assert said.startswith("NotFound")
        assert "HF_TOKEN" in said
        assert "hf_wrong" not in said
    assert Path(find(hub.url, home, HF_TOKEN="hf_secret")).name == COMMIT


def test_an_unknown_model_is_reported(hub: HubServer, home: Path, find: Find) -> None:
    said = find(hub.url, home, "Example/None")
    assert said.startswith("NotFound")
    assert "there is no folder Example/None, and no model of that name at" in said


def test_a_gated_model_is_refused_with_where_to_agree(
    hub: HubServer, home: Path, find: Find
) -> None:
    hub.is_gated = True
    said = find(hub.url, home)
    assert f"agree at {hub.url}/{NAME}" in said


def test_without_network_the_error_explains_the_download_by_hand(home: Path, find: Find) -> None:
    with closed_port() as port:
        said = find(f"http://127.0.0.1:{port}", home)
    assert said.startswith("Unavailable")
    assert f"hf download {NAME} --local-dir FOLDER" in said


def test_of_a_repository_of_gguf_files_it_is_said_how_one_is_had(
    hub: HubServer, home: Path, find: Find
) -> None:
    for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        (hub.folder / name).unlink()
    said = find(hub.url, home)
    assert said.startswith("NotFound") and f"{NAME} has no config.json" in said
    assert f"`hf download {NAME} FILE.gguf --local-dir FOLDER`" in said
    for path in hub.folder.iterdir():  # nothing that is read of a model
        if path.suffix in (".json", ".jinja"):
            path.unlink()
    assert find(hub.url, home) == said


def test_a_model_that_cannot_be_served_is_not_downloaded(
    hub: HubServer, home: Path, find: Find
) -> None:
    config = json.loads((hub.folder / "config.json").read_text())
    (hub.folder / "config.json").write_text(json.dumps({**config, "architectures": ["Novel"]}))
    assert "Novel cannot be served" in find(hub.url, home)
    assert "model.safetensors" not in hub.files()


def test_a_folder_takes_precedence_over_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name(Path("Example/Tiny")) == default_model_name(Path("Example/Tiny"))
    assert hub_name(Path("Example/Tiny")) == "Example/Tiny"
    (tmp_path / "Example" / "Tiny").mkdir(parents=True)
    assert hub_name(Path("Example/Tiny")) == ""
    assert default_model_name(Path("Example/Tiny")) == "Tiny"
    for folder in ("/models/tiny", "tiny", "../Example/Tiny", "a/b/c", "~/tiny"):
        assert hub_name(Path(folder)) == ""

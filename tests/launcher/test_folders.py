"""An instance's folders are its own, and gone when it is."""

import os
from pathlib import Path

import pytest

from services.launcher.state.folders import Folders
from shared.errors import Unavailable


def test_they_are_there_while_it_runs_and_gone_afterwards(tmp_path: Path) -> None:
    with Folders(tmp_path / "state", tmp_path) as folders:
        assert folders.artifacts.stat().st_mode & 0o777 == 0o700
        (folders.artifacts / "decoder" / "x").parent.mkdir()
        folders.socket("decoder").touch()
    assert not folders.artifacts.exists()
    assert not folders.sockets.exists()
    assert folders.state.exists()


def test_a_second_instance_is_refused(tmp_path: Path) -> None:
    with (
        Folders(tmp_path / "state", tmp_path) as first,
        pytest.raises(Unavailable, match="another `tessera serve`"),
        Folders(tmp_path / "state", tmp_path),
    ):
        pass
    assert not first.artifacts.exists()


def test_a_refused_instance_takes_nothing_from_the_first(tmp_path: Path) -> None:
    with Folders(tmp_path / "state", tmp_path) as first:
        with pytest.raises(Unavailable), Folders(tmp_path / "state", tmp_path):
            pass
        assert first.artifacts.exists()
        assert first.sockets.exists()


def test_what_a_killed_instance_left_is_removed(tmp_path: Path) -> None:
    left = Folders(tmp_path / "state", tmp_path)
    (left.artifacts / "old").mkdir(parents=True)
    with Folders(tmp_path / "state", tmp_path) as folders:
        assert list(folders.artifacts.iterdir()) == []


@pytest.mark.parametrize("left", [(), ("lock", "processes.json", "appendonlydir")])
def test_an_open_state_folder_of_ours_is_closed(tmp_path: Path, left: tuple[str, ...]) -> None:
    state = tmp_path / "state"
    state.mkdir()
    for name in left:
        (state / name).touch()
    state.chmod(0o755)
    with Folders(state, tmp_path) as folders:
        assert folders.was_open == 0o755
        assert state.stat().st_mode & 0o777 == 0o700
    with Folders(state, tmp_path) as folders:
        assert folders.was_open == 0


def test_an_open_folder_with_other_files_is_left_as_it_is(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    (state / "thesis.tex").touch()
    refused = pytest.raises(Unavailable, match=r"thesis\.tex: chmod 700 .* --state-dir")
    with refused, Folders(state, tmp_path):
        pass
    assert state.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in state.iterdir()] == ["thesis.tex"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    os.chown(state, 12345, -1)
    refused = pytest.raises(Unavailable, match=r"belongs to user 12345.* --state-dir")
    with refused, Folders(state, tmp_path):
        pass


def test_instances_with_their_own_state_do_not_meet(tmp_path: Path) -> None:
    with Folders(tmp_path / "a", tmp_path) as a, Folders(tmp_path / "b", tmp_path) as b:
        assert a.artifacts != b.artifacts
        assert a.sockets != b.sockets

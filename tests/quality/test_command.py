"""`make bench ARGS=quality` on a folder: its table, and the file that starts read."""

import shutil
from pathlib import Path

import pytest

from benchmarks.quality import quality
from benchmarks.quality.text_model.export import CHECKPOINT
from services.decoder.loading.quality import read_quality
from shared.checkpoint.content import content_digest
from shared.checkpoint.folder import Checkpoint


def test_figures_are_printed_and_written_beside_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "model"))
    told = f"{folder} --tokens 256 --ways bfloat16 int4 --also stored={CHECKPOINT} --write"
    quality.main(told.split())
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line[:1] == "|"]
    kl = {row[0].removeprefix("| "): row[1] for row in rows[2:]}
    assert list(kl) == ["bfloat16", "int4", "stored"]
    written = read_quality(folder, content_digest(Checkpoint(folder)))
    # What is stored in another place says nothing of this folder.
    assert written is not None and written.kl.keys() == {"bfloat16", "int4"}
    assert float(kl["int4"]) == pytest.approx(written.kl["int4"], rel=0.05)
    assert float(kl["stored"]) < float(kl["bfloat16"]) < float(kl["int4"])

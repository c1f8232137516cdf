"""`tessera run`: batches of one size, answers by file, lengths and times, and what is refused."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from services.launcher.offline import LLM
from services.launcher.run import command
from services.launcher.run.command import batches, run_batches
from services.launcher.run.inputs import Input, InputError, read_inputs
from services.launcher.run.settings import RunSettings
from tests.support.preprocess.service import picture

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("offline")]


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    (tmp_path / "in").mkdir()
    files = [tmp_path / "in" / f"{name}.png" for name in "cab"]
    for seed, file in enumerate(files):
        picture(56, 56, seed).save(file)
    (tmp_path / "in" / "notes.txt").write_text("no picture")
    return files


def settings(*arguments: str) -> RunSettings:
    return RunSettings.load(list(arguments), prog="tessera run")


def test_answers_and_times_are_kept_without_the_copies_that_fill_a_batch(
    llm: LLM, pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "predictions.json").write_text(json.dumps({"z": "kept", str(pictures[0]): "old"}))
    given = settings(
        str(tmp_path / "in"), "--input-texts", '["What is it, please?", "and"]', "--max-batch-size", "2",
        "--max-output-length", "5", "--ignore-eos", "--precision-save", "--performance", "--output-dir", str(out),
    )  # fmt: skip
    inputs = read_inputs(given.images, given.input_texts, given.input_dict)
    assert [one.image for one in inputs] == sorted(pictures)
    assert [one.text for one in inputs] == ["What is it, please?", "and", "and"]
    run_batches(llm, inputs, given)
    answers = json.loads((out / "predictions.json").read_text())
    assert list(answers) == sorted([*map(str, pictures), "z"])
    assert answers["z"] == "kept" and answers[str(pictures[0])] != "old"
    printed = capsys.readouterr().out
    assert printed == "".join(f"{one.image}: {answers[str(one.image)]}\n" for one in inputs)
    rows = list(csv.DictReader((out / "performance.csv").read_text().splitlines()))
    assert [row["batch"] for row in rows] == ["2", "2"]
    assert {row["output_len"] for row in rows} == {"5"}
    for row in rows:
        assert int(row["embedding_len"]) > int(row["input_len"]) > 0
        assert 0 < float(row["first_token_time(ms)"]) <= float(row["ResponseTime(ms)"])
        assert float(row["E2E Throughput(tok/s)"]) > 0

    # The likeliest token each time: the same again, one by one and appended.
    one_by_one = settings(
        str(pictures[1]), "--input-texts", "What is it, please?", "--max-output-length", "5", "--ignore-eos",
        "--performance", "--output-dir", str(out),
    )  # fmt: skip
    run_batches(llm, read_inputs(one_by_one.images, one_by_one.input_texts, ""), one_by_one)
    assert capsys.readouterr().out == f"{pictures[1]}: {answers[str(pictures[1])]}\n"
    assert len((out / "performance.csv").read_text().splitlines()) == 4


def test_a_prompt_above_the_input_length_is_refused(llm: LLM, pictures: list[Path]) -> None:
    given = settings(str(pictures[0]), "--max-input-length", "5")
    with pytest.raises(ValueError, match="tokens"):
        run_batches(llm, read_inputs(given.images, "x", ""), given)


def test_a_picture_that_cannot_be_used_costs_itself_alone(
    llm: LLM, pictures: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one, one amid a batch, and the last, whose copies would fill it up."""
    whole = pictures[0].read_bytes()
    for name, content in (("0", b"none"), ("aa", whole[:100]), ("z", b"")):
        (tmp_path / "in" / f"{name}.png").write_bytes(content)
    out = tmp_path / "out"
    out.mkdir()
    given = settings(
        str(tmp_path / "in"), "--max-batch-size", "4", "--max-output-length", "3", "--precision-save",
        "--performance", "--output-dir", str(out),
    )  # fmt: skip
    assert run_batches(llm, read_inputs(given.images, given.input_texts, ""), given) == 3
    told = capsys.readouterr()
    named = [line.partition(".png: ")[0] for line in told.err.splitlines()]
    assert named == [f"tessera run: {tmp_path}/in/{name}" for name in ("0", "aa", "z")]
    assert [line.partition(": ")[0] for line in told.out.splitlines()] == sorted(map(str, pictures))
    assert list(json.loads((out / "predictions.json").read_text())) == sorted(map(str, pictures))
    rows = csv.DictReader((out / "performance.csv").read_text().splitlines())
    assert [row["batch"] for row in rows] == ["4", "4"]
    # Where there is none that can be used.
    alone = settings(str(tmp_path / "in" / "z.png"))
    assert run_batches(llm, read_inputs(alone.images, "x", ""), alone) == 1


def test_the_last_batch_is_filled_up_with_the_last_picture() -> None:
    inputs = [Input(Path(name), name) for name in "abcde"]
    found = list(batches(inputs, 3))
    assert [(["".join(one.text for one in batch)], count) for batch, count in found] == [
        (["abc"], 3),
        (["dee"], 2),
    ]


def test_pairs_name_their_pictures(pictures: list[Path], tmp_path: Path) -> None:
    pairs = [{"image": str(file), "prompt": file.name} for file in pictures]
    assert read_inputs([], "", json.dumps(pairs)) == [Input(f, f.name) for f in pictures]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    assert read_inputs([], "", str(tmp_path / "pairs.json")) == read_inputs(
        [], "", json.dumps(pairs)
    )


@pytest.mark.parametrize(
    ("images", "texts", "pairs", "message"),
    [
        ([], "x", "", "no picture was given"),
        ([Path("/no/such.png")], "x", "", "no file /no/such.png"),
        ("one", '["a", "b"]', "", "input_text length must equal input_images length"),
        ("one", "[1]", "", "a JSON list of texts"),
        ("one", "x", "[]", "names the pictures itself"),
        ([], "", "[{]", "neither a file nor JSON"),
        ([], "", '[{"image": "/no", "prompt": "x"}]', "no file /no"),
        ([], "", '[{"image": "/no", "adapter": "x"}]', "input-dict"),
    ],
)
def test_wrong_inputs_are_refused(
    images: Any, texts: str, pairs: str, message: str, pictures: list[Path]
) -> None:
    given = pictures[:1] if images == "one" else images
    with pytest.raises(InputError, match=message):
        read_inputs(given, texts, pairs)


def test_the_command_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], pictures: list[Path]
) -> None:
    assert command.main([]) == 1
    assert "no picture was given" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([str(pictures[0]), "--max-batch-size", "0"])
    assert "--max-batch-size" in capsys.readouterr().err

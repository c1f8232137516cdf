"""How the text model is made: from pages of packages, and the same whether or not its training was interrupted."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.quality.text_model import train
from benchmarks.quality.text_model.corpus import Document, text_of_page
from benchmarks.quality.text_model.export import CHECKPOINT, HELD_OUT
from benchmarks.quality.text_model.model import CONTEXT, load_tokenizer


def test_a_page_becomes_its_text_without_navigation() -> None:
    page = (
        "<html><head><title>T</title></head><body><div class='navheader'><a>Prev</a></div>"
        "<h1>Rows</h1><p>Two <code>words</code>\n here.<br/></p><pre>a\n  b</pre>"
        "<div class='navfooter'><p>Next</p></div></body></html>"
    )
    assert text_of_page(page) == "Rows\n\nTwo words here.\n\na\n  b\n"


def test_held_out_pages_are_those_that_the_folder_has() -> None:
    names = json.loads(HELD_OUT.read_text("utf-8"))
    assert len(names) > 20 and all(Document(name, "").is_held_out for name in names)


def test_the_shipped_tokenizer_gives_every_text_back() -> None:
    tokenizer = load_tokenizer(CHECKPOINT)
    for text in json.loads(HELD_OUT.read_text("utf-8")).values():
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text and len(ids) < len(text) / 2


def test_a_run_that_goes_on_gives_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    found = []
    for name, stops in (("whole", [3]), ("stopped", [1, 3])):
        run = tmp_path / name
        run.mkdir()
        load_tokenizer(CHECKPOINT).save_pretrained(run)
        tokens = np.random.default_rng(0).integers(1, 4096, 8 * CONTEXT).astype(np.uint16)
        np.save(run / "tokens.npy", tokens)
        (run / "held_out.json").write_text(json.dumps({"page": "a word " * CONTEXT}))
        for stop in stops:
            told = f"{tmp_path} --run {run} --steps 3 --batch 1 --stop {stop}"
            train.main(told.split())
        found.append(torch.load(run / "state.pt", weights_only=True))
    whole, stopped = found
    assert whole["step"] == stopped["step"] == 3
    assert all(torch.equal(one, stopped["model"][name]) for name, one in whole["model"].items())


def test_the_rate_does_not_depend_on_how_many_steps_there_will_be_until_it_falls() -> None:
    assert [train.rate_at(step, 1000) for step in range(750)] == [
        train.rate_at(step, 4000) for step in range(750)
    ]
    assert train.rate_at(999, 1000) == pytest.approx(0.01)

"""The tokens at which answers end: of files, of the tokenizer, of a model's own code, of its chat template."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.gateway.model.served_model import ServedModel
from tests.reference_models import qwen_vl, tiktoken_words, wemm, xcomposer2
from tests.reference_models.text_models import chatglm
from tests.support.checkpoints import make_checkpoint, tokenizer

TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
END, TEXT_END = "<|im_end|>", "<|endoftext|>"


def write(path: Path, **content: Any) -> None:
    """Changes keys of a JSON file; None removes one."""
    found = {**(json.loads(path.read_text()) if path.exists() else {}), **content}
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def stops(folder: Path, chosen: Path | None = None) -> set[str]:
    """The texts of the tokens at which answers end."""
    model = ServedModel.load(folder, "m", chat_template=chosen)
    return {str(model.tokenizer.id_to_token(number)) for number in model.eos_token_ids}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose files name the end of a text, and which has no chat template."""
    made = make_checkpoint(tmp_path, "llama")
    (made / "chat_template.jinja").unlink()
    end = tokenizer().convert_tokens_to_ids(TEXT_END)
    write(made / "config.json", eos_token_id=end)
    write(made / "generation_config.json", eos_token_id=None)
    write(made / "tokenizer_config.json", eos_token=END)
    return made


def test_a_base_model_ends_where_its_files_say(folder: Path) -> None:
    assert stops(folder) == {TEXT_END}


def test_where_the_files_say_nothing_the_tokenizer_does(folder: Path) -> None:
    write(folder / "config.json", eos_token_id=None)
    assert stops(folder) == {END}
    write(folder / "tokenizer_config.json", eos_token=None)
    assert stops(folder) == set()


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        (f"{END}\n", {TEXT_END, END}),
        (f" \n{END}", {TEXT_END, END}),
        (f"{END}<|im_start|>", {TEXT_END, END}),
        ("{{ eos_token }}", {TEXT_END, END}),
        # The files know what ends a turn, if not at once.
        (f"{END}{TEXT_END}", {TEXT_END}),
        ("\n### User:\n", {TEXT_END}),
        ("<tool call>", {TEXT_END}),
        ("", {TEXT_END}),
        ("{% if m['role'] == 'assistant' %}{{ raise_exception('no') }}{% endif %}", {TEXT_END}),
        ("{{ 1 / 0 }}", {TEXT_END}),
        ("{% if", {TEXT_END}),
    ],
)
def test_a_template_says_what_ends_a_turn(folder: Path, behind: str, expected: set[str]) -> None:
    template = folder / "chat_template.jinja"
    template.write_text("{% for m in messages %}" + TURN + behind + "{% endfor %}")
    assert stops(folder) == expected


def test_a_template_of_parts_and_one_that_is_chosen(folder: Path, tmp_path: Path) -> None:
    parts = TURN.replace("m['content']", "m['content'][0]['text']")
    chosen = tmp_path / "chosen.jinja"
    chosen.write_text("{% for m in messages %}" + parts + END + "{% endfor %}")
    assert stops(folder, chosen) == {TEXT_END, END}


def test_qwens_chat_models_end_at_both_marks(tmp_path: Path) -> None:
    folder = qwen_vl.write_checkpoint(tmp_path)
    first = ServedModel.load(folder, "m").eos_token_ids[0]
    places = (tiktoken_words.END_OF_TEXT, tiktoken_words.START, tiktoken_words.END)
    assert ServedModel.load(folder, "m").eos_token_ids == tuple(first + place for place in places)
    write(folder / "generation_config.json", chat_format="raw")
    assert stops(folder) == {TEXT_END}


@pytest.mark.parametrize(
    ("generation", "name", "expected"),
    [
        (2, "THUDM/chatglm2-6b", {"</s>"}),
        (3, "THUDM/chatglm3-6b", {"</s>", "<|user|>", "<|observation|>"}),
        (4, "", {TEXT_END, "<|user|>"}),
    ],
)
def test_chatglm_ends_where_another_turn_begins(
    tmp_path: Path, generation: int, name: str, expected: set[str]
) -> None:
    folder = chatglm.write_checkpoint(tmp_path, generation=generation, _name_or_path=name)
    assert stops(folder) == expected


def test_models_on_internlm2_end_at_the_end_of_a_turn(tmp_path: Path) -> None:
    """Their files name </s> alone."""
    assert stops(wemm.write_checkpoint(tmp_path / "wemm")) == {"</s>", END}
    composer = xcomposer2.write_checkpoint(tmp_path / "xcomposer2")
    assert stops(composer) == {"</s>", xcomposer2.END}
    model = ServedModel.load(composer, "m")
    # The mark is no text of the answer.
    assert model.table.text(list(model.eos_token_ids)) == ""

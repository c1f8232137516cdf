"""Fuyu as its repository is: prompted, answered and stopped as the released code does it.

Facts: a Persimmon below `text_config`, whose class has 2 as its default end (transformers' classes); Llama's tokenizer
class with `|ENDOFTEXT|` as begin and end (the conversion script at transformers @ 052b1dc); outputs end with
`|ENDOFTEXT|` (vLLM's test `fuyu_vllm_to_hf_output`); no chat template, a question ends in a line break (vLLM's
`vision_language.py` @ 005c677); `language_model.…` and `vision_embed_tokens` (the conversion script; parts of layers:
memory). Ids of tokens of pictures: memory.
"""

import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from services.gateway.model.served_model import ServedModel
from tests.support.checkpoints import load_reference, make_checkpoint, reference_inputs
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.pictures import png
from tests.support.processes.answers import ask_all
from tests.support.processes.services_in_process import services_in_process
from tests.support.released_folders import IMAGE, edited, message

END = "|ENDOFTEXT|"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(
        tmp_path_factory.mktemp("fuyu") / "under-test", "fuyu", spelling="old", eos_token_ids=(2,)
    )
    text = json.loads((made / "config.json").read_text())["text_config"]
    edited(made / "config.json", text_config={**text, "bos_token_id": 1, "eos_token_id": 2})
    edited(
        made / "tokenizer_config.json",
        tokenizer_class="LlamaTokenizerFast",
        add_bos_token=True,
        legacy=True,
        bos_token=END,
        eos_token=END,
        unk_token="<unk>",
    )
    return made


def test_prompts_and_answers(folder: Path, redis_url: str) -> None:
    file = png(3, (80, 50))
    talk = [("user", f"{IMAGE}\nWhat is the circle?")]
    with services_in_process(folder, redis_url) as system:
        [(prompt, tokens)] = ask_all(system.base_url, [message(talk, file)], 6)
    picture = Image.open(io.BytesIO(file)).convert("RGB")
    given = reference_inputs(folder, "What is the circle?\n", [picture])
    assert prompt == given["input_ids"][0].tolist()
    with torch.no_grad():
        made = load_reference(folder).generate(
            **given, max_new_tokens=6, do_sample=False, eos_token_id=None,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    expected = made.sequences[0, len(prompt) :].tolist()
    assert_same_up_to_ties(tokens, expected, torch.cat(made.scores))


def test_answers_end_where_the_tokenizer_says(folder: Path) -> None:
    """Whatever the files name beside it."""
    model = ServedModel.load(folder, "m")
    assert {model.tokenizer.id_to_token(number) for number in model.eos_token_ids} == {END, "</s>"}

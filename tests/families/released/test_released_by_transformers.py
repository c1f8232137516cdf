"""BLIP-2, Chameleon and Molmo2 as their repositories are: prompted, answered and stopped as `transformers` does it.

Facts. blip2-opt-2.7b (quoted config.json): `image_token_index`, `use_decoder_only_language_model`, an OPT whose end is
the token of a line break; prompts as in vLLM's `vision_language.py` @ 005c677; no chat template. Chameleon-7b (the
conversion script at transformers @ 0197608): Llama's tokenizer class, no chat template, text behind which the separator
stands; ends 1 and 2 are the class's defaults, which its config.json leaves out. Molmo2 (allenai/molmo2 @ f3cb108
`olmo/hf_model`): `vit_config`, `auto_map`, the tokenizer's begin is its end, ChatML without a default system message, a
picture before the text. Names of tensors: the conversion scripts, which `transformers` writes again.
"""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image

from services.gateway.model.served_model import ServedModel
from tests.support.checkpoints import load_reference, make_checkpoint, reference_inputs, tokenizer
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.pictures import png
from tests.support.processes.answers import ask_all
from tests.support.processes.services_in_process import services_in_process
from tests.support.released_folders import IMAGE, edited, message

# By the code of transformers: released forms of families with code of ours are tried in every run.
pytestmark = pytest.mark.full

PICTURE = png(3, (80, 60))
TALK = [("user", f"{IMAGE}\nWhat is red?"), ("assistant", "A circle."), ("user", "And then?")]
LINE_BREAK = "Ċ"
MOLMO2 = (
    "{% set images = namespace(count=0) %}{% for message in messages %}"
    "{% if message['content'] is not string %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{% set images.count = images.count + 1 %}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if images.count == 1 %}<|image|>{% else %}{% for number in range(images.count) %}"
    "Image {{ number + 1 }}<|image|>{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] != ('user' if loop.index % 2 else 'assistant') %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def blip2(folder: Path) -> None:
    """Changes the files of a folder."""
    config = json.loads((folder / "config.json").read_text())
    end = tokenizer().convert_tokens_to_ids(LINE_BREAK)
    text = {**config["text_config"], "eos_token_id": end, "prefix": "</s>"}
    edited(folder / "config.json", text_config=text, torch_dtype="float32")
    edited(folder / "generation_config.json", eos_token_id=end)
    edited(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")


def chameleon(folder: Path) -> None:
    """Changes the files of a folder."""
    edited(folder / "config.json", without=("eos_token_id", "bos_token_id", "pad_token_id"))
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    edited(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")


def molmo2(folder: Path) -> None:
    """Changes the files of a folder."""
    config = json.loads((folder / "config.json").read_text())
    edited(
        folder / "config.json",
        without=("vision_config",),
        vit_config=config["vision_config"],
        auto_map={"AutoModelForImageTextToText": "modeling_molmo2.Molmo2ForConditionalGeneration"},
        use_frame_special_tokens=True,
    )
    (folder / "chat_template.jinja").write_text(MOLMO2)
    edited(
        folder / "tokenizer_config.json",
        tokenizer_class="Qwen2Tokenizer",
        bos_token="<|im_end|>",
        padding_side="left",
    )


@dataclass(frozen=True)
class Case:
    """`text`: the conversation TALK as the processor gets it. `ends`: tokens that end an answer."""

    release: Callable[[Path], None]
    text: str
    ends: set[str]


CASES = {
    "blip2": Case(blip2, "Question: What is red? Answer: A circle. Question: And then? Answer:",
                  {LINE_BREAK}),
    "chameleon": Case(
        chameleon,
        "<image>What is red?<reserved08706>A circle.<reserved08706>And then?",
        {"<|im_end|>"},
    ),
    "molmo2": Case(
        molmo2,
        "<|image|><|im_start|>user\nWhat is red?<|im_end|>\n<|im_start|>assistant\nA circle.<|im_end|>\n"
        "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n",
        {"<|im_end|>"},
    ),
}  # fmt: skip


@pytest.fixture(
    scope="module",
    params=CASES,
)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(tmp_path_factory.mktemp(case) / "under-test", case)
    CASES[case].release(made)
    return made


def test_prompts_and_answers(case: str, folder: Path, redis_url: str) -> None:
    with services_in_process(folder, redis_url) as system:
        [(prompt, tokens)] = ask_all(system.base_url, [message(TALK, PICTURE)], 6)
    picture = Image.open(io.BytesIO(PICTURE)).convert("RGB")
    given = reference_inputs(folder, CASES[case].text, [picture])
    assert prompt == given["input_ids"][0].tolist()
    with torch.no_grad():
        made = load_reference(folder).generate(
            **given, max_new_tokens=6, do_sample=False, eos_token_id=None,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    assert_same_up_to_ties(tokens, made.sequences[0, -6:].tolist(), torch.cat(made.scores))


def test_answers_end(case: str, folder: Path) -> None:
    model = ServedModel.load(folder, "m")
    ends = {model.tokenizer.id_to_token(number) for number in model.eos_token_ids}
    assert ends == CASES[case].ends

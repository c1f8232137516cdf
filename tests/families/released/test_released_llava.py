"""LLaVA-1.5 and LLaVA-v1.6 as their converted repositories are: prompted, answered and stopped as `transformers` does.

Facts of llava-1.5-7b-hf (quoted dumps of its files): `image_token_index`, `pad_token_id` and `ignore_index` in
config.json, a text part padded by 64 rows, without an end; the template `USER: <image>`, a line break, the text and
`ASSISTANT:`, with pictures first and a blank, not an end, behind an answer. Of llava-v1.6-mistral-7b-hf: ids and
padding, `[INST] <image>`, a line break, the text and `[/INST]` (the conversion script at transformers @ 063b32f). Both:
generation_config.json names 1 and 2 (memory); tensors as the first versions named them (memory); Llama's tokenizer
class, the two tokens behind its 32,000 in `added_tokens_decoder` (the conversion script).
"""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from services.gateway.model.served_model import ServedModel
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.pictures import png
from tests.support.processes.answers import ask_all
from tests.support.processes.services_in_process import services_in_process
from tests.support.released_folders import IMAGE, edited, message
from tests.support.tokenizers import save, sentencepiece_like_tokenizer

PARTS = "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
TEXT = "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
VICUNA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': '}}{% endif %}" + PARTS + "{% if message['role'] != 'assistant' %}"
    + TEXT + "{{ content['text'] + ' '}}{% endfor %}{% else %}" + TEXT
    + "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)  # fmt: skip
MISTRAL = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' }}" + PARTS + TEXT
    + "{{ content['text'] }}{% endfor %}{{ ' [/INST]' }}{% else %}" + TEXT
    + "{{ ' ' + content['text'] + '</s> ' }}{% endfor %}{% endif %}{% endfor %}"
)  # fmt: skip
PICTURE = png(3, (120, 80))
TALKS: list[list[tuple[str, str]]] = [
    [("user", f"{IMAGE}\nWhat is red?")],
    [("user", f"{IMAGE}\nWhat is red?"), ("assistant", "A circle."), ("user", "And then?")],
]
CASES: dict[str, dict[str, Any]] = {
    "llava": {"language": "llama", "template": VICUNA},
    "llava_next": {"language": "mistral", "template": MISTRAL},
}


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = sentencepiece_like_tokenizer()
    size, case = words.get_vocab_size(), CASES[request.param]
    made = make_checkpoint(
        tmp_path_factory.mktemp("llava") / "under-test",
        request.param,
        language=case["language"],
        spelling="old",
        old_rope=True,
        eos_token_ids=(2,),
        text={"vocab_size": size + 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": size + 1},
        config={"image_token_id": size},
    )  # fmt: skip
    (made / "tokenizer.json").unlink()
    save(words, made)
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    listed = {0: "<unk>", 1: "<s>", 2: "</s>", size: IMAGE, size + 1: "<pad>"}
    edited(
        made / "tokenizer_config.json",
        without=(
            "extra_special_tokens",
            "backend",
            "is_local",
            "chat_template",
            "local_files_only",
        ),
        added_tokens_decoder={
            str(index): {"content": text, **flags, "special": True}
            for index, text in listed.items()
        },
        add_bos_token=True,
        add_eos_token=False,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        legacy=False,
        tokenizer_class="LlamaTokenizer",
        processor_class="LlavaProcessor",
    )
    (made / "chat_template.jinja").unlink()
    (made / "chat_template.json").write_text(json.dumps({"chat_template": case["template"]}))
    processor = json.loads((made / "processor_config.json").read_text())
    images = processor.pop("image_processor")
    (made / "preprocessor_config.json").write_text(json.dumps(images))
    (made / "processor_config.json").write_text(json.dumps(processor))
    config = json.loads((made / "config.json").read_text())
    text = config["text_config"]
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        text.pop(key, None)
    edited(
        made / "config.json",
        without=("image_token_id", "image_seq_length"),
        ignore_index=-100,
        image_token_index=size,
        pad_token_id=size + 1,
        text_config=text,
    )
    return made


def test_prompts_and_answers(folder: Path, redis_url: str) -> None:
    processor = AutoProcessor.from_pretrained(folder, use_fast=False, backend="pil")
    picture = Image.open(io.BytesIO(PICTURE)).convert("RGB")
    with services_in_process(folder, redis_url) as system:
        answers = ask_all(system.base_url, [message(talk, PICTURE) for talk in TALKS], 6)
    model = load_reference(folder)
    for talk, (prompt, tokens) in zip(TALKS, answers, strict=True):
        turns = [{"role": role, "content": parts(text)} for role, text in talk]
        shown = processor.apply_chat_template(turns, add_generation_prompt=True)
        given = processor(images=[picture], text=shown, return_tensors="pt")
        assert prompt == given["input_ids"][0].tolist()
        with torch.no_grad():
            made = model.generate(
                **given, max_new_tokens=6, do_sample=False, eos_token_id=None,
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        expected = made.sequences[0, len(prompt) :].tolist()
        assert_same_up_to_ties(tokens, expected, torch.cat(made.scores))


def parts(text: str) -> list[dict[str, Any]]:
    """A turn as transformers' templates take it."""
    rest = text.removeprefix(f"{IMAGE}\n")
    picture = [] if rest == text else [{"type": "image"}]
    return [*picture, {"type": "text", "text": rest}]


def test_answers_end_at_the_end_of_a_text(folder: Path) -> None:
    model = ServedModel.load(folder, "m")
    assert model.eos_token_ids == (2,)

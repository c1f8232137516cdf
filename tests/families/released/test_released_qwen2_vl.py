"""Qwen2-VL and Qwen2.5-VL as their repositories are: prompted, answered and stopped as `transformers` does.

Facts: the language part's keys on top of config.json, `rope_scaling` of the type mrope, `in_chans` of the vision part
(transformers' classes of 4.45 to 4.49, which 5.23 still reads); tensors as `model.…`, `visual.…`, `lm_head.…` (the
same); `min_pixels`, `max_pixels` in preprocessor_config.json (transformers' image processor still reads them); a chat
template with a default system message, in chat_template.json. The tokenizer's `added_tokens_decoder`, and both ends in
generation_config.json: memory.
"""

import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from services.gateway.model.served_model import ServedModel
from tests.support.checkpoints import load_reference, make_checkpoint, qwen2_vl, reference_inputs
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.pictures import png
from tests.support.processes.answers import ask_all
from tests.support.processes.services_in_process import services_in_process
from tests.support.released_folders import IMAGE, edited, message

PICTURE = png(3, (100, 60))
TALK = [("user", f"{IMAGE}\nWhat is red?"), ("assistant", "A circle."), ("user", "And then?")]
TEXT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is red?<|im_end|>\n"
    "<|im_start|>assistant\nA circle.<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(
        tmp_path_factory.mktemp("qwen") / "under-test",
        request.param,
        spelling="old",
        eos_token_ids=(2, 0),
    )
    qwen2_vl.like_older_versions(made)
    (made / "chat_template.jinja").rename(made / "template")
    template = (made / "template").read_text()
    (made / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    added = json.loads((made / "tokenizer.json").read_text())["added_tokens"]
    edited(
        made / "tokenizer_config.json",
        without=("extra_special_tokens", "backend", "is_local"),
        added_tokens_decoder={
            str(token["id"]): {key: token[key] for key in token if key != "id"} for token in added
        },
        add_prefix_space=False,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        tokenizer_class="Qwen2Tokenizer",
    )
    edited(made / "config.json", without=("transformers_version",), torch_dtype="float32")
    return made


def test_prompts_and_answers(folder: Path, redis_url: str) -> None:
    with services_in_process(folder, redis_url) as system:
        [(prompt, tokens)] = ask_all(system.base_url, [message(TALK, PICTURE)], 6)
    picture = Image.open(io.BytesIO(PICTURE)).convert("RGB")
    given = reference_inputs(folder, TEXT, [picture])
    assert prompt == given["input_ids"][0].tolist()
    with torch.no_grad():
        made = load_reference(folder).generate(
            **given, max_new_tokens=6, do_sample=False, eos_token_id=None,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    expected = made.sequences[0, len(prompt) :].tolist()
    assert_same_up_to_ties(tokens, expected, torch.cat(made.scores))


def test_answers_end(folder: Path) -> None:
    model = ServedModel.load(folder, "m")
    ends = {model.tokenizer.id_to_token(number) for number in model.eos_token_ids}
    assert ends == {"<|im_end|>", "<|endoftext|>"}

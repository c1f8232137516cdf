"""Molmo as its repositories are: prompted, answered and stopped as the released code does it.

Facts, read in a copy of Molmo-7B-D's files (maifoundations/LayerCD @ 6812d5b `model_zoo/MolmoD`) unless they say
otherwise: generation_config.json without an end, and config.json without one; the first token is the tokenizer's
`eos_token`, which the caller passes as the string to stop at (README); pictures as their files store them; marks behind
the vocabulary (their ids: memory); no template in the tokenizer's files; sizes of the tower in no file (allenai/molmo
@ 793fa38). Keys of preprocessor_config.json: ChulanZhang/molmo_hf @ b3d737f; of config.json: mlx-vlm.
"""

import io
import json
from pathlib import Path

import PIL.Image
import pytest

from services.gateway.model.served_model import ServedModel
from tests.reference_models.molmo import Molmo, write_checkpoint
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.pictures import png
from tests.support.processes.answers import ask_all
from tests.support.processes.services_in_process import services_in_process
from tests.support.released_folders import IMAGE, edited, message

GENERATION = {"_from_model_config": True, "transformers_version": "4.43.3"}
IMAGES = {
    "_valid_processor_keys": [],
    "auto_map": {
        "AutoImageProcessor": "image_preprocessing_molmo.MolmoImageProcessor",
        "AutoProcessor": "preprocessing_molmo.MolmoProcessor",
    },
    "base_image_input_size": [336, 336],
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_padding_mask": True,
    "image_patch_size": 14,
    "image_processor_type": "MolmoImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_token_length_h": 12,
    "image_token_length_w": 12,
    "max_crops": 12,
    "overlap_margins": [4, 4],
    "processor_class": "MolmoProcessor",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_checkpoint(
        tmp_path_factory.mktemp("molmo") / "under-test",
        auto_map={
            "AutoConfig": "config_molmo.MolmoConfig",
            "AutoModelForCausalLM": "modeling_molmo.MolmoForCausalLM",
        },
        initializer_range=0.02,
        torch_dtype="float32",
        use_cache=True,
    )
    edited(
        made / "tokenizer_config.json",
        add_prefix_space=False,
        auto_map={"AutoProcessor": "preprocessing_molmo.MolmoProcessor"},
        bos_token=None,
        clean_up_tokenization_spaces=False,
        errors="replace",
        pad_token="<|endoftext|>",
        split_special_tokens=False,
        tokenizer_class="Qwen2Tokenizer",
    )
    (made / "generation_config.json").write_text(json.dumps(GENERATION))
    (made / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    return made


def turned(picture: bytes) -> bytes:
    """A JPEG of the picture that says it is to be turned right."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    opened = PIL.Image.open(io.BytesIO(picture)).convert("RGB")
    opened.save(file, "JPEG", quality=95, exif=exif)
    return file.getvalue()


def test_prompts_and_answers(folder: Path, redis_url: str) -> None:
    """With a picture that is wide as it is stored, and high as EXIF says."""
    reference = Molmo(folder)
    file = turned(png(3, (300, 90)))
    talks = [
        [("user", f"{IMAGE}\nWhat is red?")],
        [("user", "What?"), ("assistant", "Dogs."), ("user", "And this?")],
    ]
    with services_in_process(folder, redis_url) as system:
        answers = ask_all(system.base_url, [message(talk, file) for talk in talks], 6)
    picture = PIL.Image.open(io.BytesIO(file)).convert("RGB")
    assert picture.size == (300, 90)
    for talk, shown, (prompt, tokens) in zip(talks, ([picture], []), answers, strict=True):
        asked = [(role, text.replace("\n", "")) for role, text in talk]
        assert prompt == reference.prompt_ids(asked, [one.size for one in shown])
        made = reference.generate(prompt, shown, 6)
        assert_same_up_to_ties(tokens, made.tokens, made.logits)


def test_answers_end_at_the_tokenizers_end(folder: Path) -> None:
    model = ServedModel.load(folder, "m")
    ends = [model.tokenizer.id_to_token(number) for number in model.eos_token_ids]
    assert ends == ["<|endoftext|>"]

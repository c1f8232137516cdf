"""DeepSeek-VL2 as its repositories are: prompted, answered and stopped as the released code does it.

Facts, of deepseek-ai/DeepSeek-VL2 @ ef9f91e unless they say otherwise; "memory" has not been seen in a file:
no `architectures` that can be used (its issue 77); `use_mla` absent in small and base (issue 81), other keys of
`language_config` as the class's defaults; SigLIP so400m at 384 pixels, patch 14, mlp_ratio 3.7362 (mlx-vlm);
`tile_tag` 2D, `global_view_pos` head (memory); keys of processor_config.json (a log of mlx-vlm);
LlamaTokenizerFast, no chat template, no generation_config.json; tokens of padding, pictures, grounding and roles that
the processor adds, in its order (issues 17 and 64 have their ids).
"""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from services.families import registry
from services.gateway.model.served_model import ServedModel
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.text.tokenizer_file import read_tokenizer
from tessera.common.v1.media_pb2 import Modality
from tests.reference_models import words
from tests.reference_models.common import IMAGE
from tests.reference_models.deepseek_vl2 import BEGIN, END, DeepSeekVL2, write_checkpoint
from tests.support.decoder.greedy_reference import assert_same_up_to_ties
from tests.support.pictures import png
from tests.support.processes.answers import ask_all
from tests.support.processes.services_in_process import services_in_process
from tests.support.released_folders import edited, message

PAD = "<｜▁pad▁｜>"
ADDED = (PAD, IMAGE, "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>", "<|User|>",
         "<|Assistant|>")  # fmt: skip
SIDE = 56
SIDES = [[SIDE * a, SIDE * b] for a, b in ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2))]
PROCESSOR = {
    "add_special_token": False,
    "candidate_resolutions": SIDES,
    "downsample_ratio": 2,
    "ignore_id": -100,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_token": IMAGE,
    "mask_prompt": False,
    "normalize": True,
    "pad_token": PAD,
    "patch_size": 14,
    "processor_class": "DeepseekVLV2Processor",
    "sft_format": "deepseek",
}
PICTURE, SIZE = png(3, (100, 60)), (100, 60)
TALKS: list[list[tuple[str, str]]] = [
    [("user", f"{IMAGE}\nWhat is red?")],
    [
        ("system", " Be brief.\n"),
        ("user", f"{IMAGE}\nWhat is red?"),
        ("assistant", " A circle. "),
        ("user", "And then?"),
        ("assistant", "Nothing"),
        ("user", " Why?\n"),
    ],
]


def write_words(path: Path) -> None:
    """A byte-level vocabulary whose last entries are BEGIN and END, its only added tokens."""
    content = json.loads(words.byte_level_words({}).to_str())
    vocabulary = content["model"]["vocab"]
    if IMAGE in vocabulary:
        vocabulary["<unused>"] = vocabulary.pop(IMAGE)
    content["added_tokens"] = []
    content["model"]["vocab"] |= {BEGIN: len(vocabulary), END: len(vocabulary) + 1}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (BEGIN, END)])
    tokenizer.save(str(path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("deepseek") / "under-test", side=SIDE)
    write_words(path / "tokenizer.json")
    edited(
        path / "tokenizer_config.json",
        tokenizer_class="LlamaTokenizerFast",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        legacy=True,
        sp_model_kwargs={},
        bos_token={"__type": "AddedToken", "content": BEGIN, "normalized": True},
        eos_token={"__type": "AddedToken", "content": END, "normalized": True},
    )
    (path / "processor_config.json").write_text(json.dumps(PROCESSOR))
    edited(path / "config.json", without=("architectures",), torch_dtype="bfloat16")
    language = json.loads((path / "config.json").read_text())["language_config"]
    for key in ("bos_token_id", "eos_token_id", "use_mla", "rms_norm_eps", "rope_theta"):
        del language[key]
    edited(path / "config.json", language_config={**language, "torch_dtype": "bfloat16"})
    vision = {"layers": 2, "mlp_ratio": 1.5, "model_name": "siglip_so400m_patch14_384",
              "model_type": "vision", "patch_size": 14, "width": 48, "image_size": SIDE,
              "heads": 4}  # fmt: skip
    edited(path / "config.json", vision_config=vision)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> DeepSeekVL2:
    """Of the same folder with a tokenizer to which the tokens were added as the processor does, and with the defaults
    of the configuration's class."""
    path = tmp_path_factory.mktemp("reference")
    for file in folder.iterdir():
        (path / file.name).symlink_to(file)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for token in ADDED:
        tokenizer.add_special_tokens([AddedToken(token, normalized=False)])
    (path / "tokenizer.json").unlink()
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config["language_config"] |= {"use_mla": True, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(config))
    return DeepSeekVL2(path)


def test_tokens_that_the_processor_adds_have_its_ids(folder: Path, reference: DeepSeekVL2) -> None:
    ours = read_tokenizer(folder / "tokenizer.json").ids()
    assert {token: ours[token] for token in ADDED} == {
        token: reference.tokenizer.token_to_id(token) for token in ADDED
    }
    named = edited(folder / "tokenizer_config.json", pad_token=END)
    assert PAD not in read_tokenizer(folder / "tokenizer.json").ids()
    edited(named, without=("pad_token",))


def test_prompts_and_answers(folder: Path, reference: DeepSeekVL2, redis_url: str) -> None:
    with services_in_process(folder, redis_url) as system:
        answers = ask_all(system.base_url, [message(talk, PICTURE) for talk in TALKS], 8)
    for talk, (prompt, tokens) in zip(TALKS, answers, strict=True):
        assert prompt == reference.prompt_ids(talk, [SIZE])
        made = reference.generate(prompt, [Image.open(io.BytesIO(PICTURE)).convert("RGB")], 8)
        assert_same_up_to_ties(tokens, made.tokens, made.logits)


def test_answers_end_at_the_tokenizers_end(folder: Path, tmp_path: Path) -> None:
    """Whatever the text model's configuration says: `inference.py` passes the tokenizer's."""
    end = read_tokenizer(folder / "tokenizer.json").ids()[END]
    assert ServedModel.load(folder, "m").eos_token_ids == (end,)
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    config["language_config"]["eos_token_id"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ServedModel.load(tmp_path, "m").eos_token_ids == (3, end)


@pytest.mark.parametrize(
    ("change", "tokens"),
    [({"candidate_resolutions": SIDES[:1]}, 4 + 2 + 1 + 4 + 2), ({"patch_size": 7}, None)],
)
def test_the_processors_own_settings_count(
    folder: Path, tmp_path: Path, change: dict[str, Any], tokens: int | None
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({**PROCESSOR, **change}))
    checkpoint = Checkpoint(tmp_path)
    family = registry.find(checkpoint)
    if tokens is None:
        with pytest.raises(InvalidRequest, match=r"patch_size is 14, in processor_config.json 7"):
            family.largest(checkpoint, Modality.MODALITY_IMAGE)
    else:
        assert family.largest(checkpoint, Modality.MODALITY_IMAGE).tokens == tokens

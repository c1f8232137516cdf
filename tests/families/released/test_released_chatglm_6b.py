"""ChatGLM-6B in the two forms that it is released in.

Read in a copy of the repository with its history: the first (revision d11c6aa: ids begin behind 20,000 of
pictures, the code puts control tokens, tabs, blanks and bytes behind the pieces of ice_text.model, config.json
names neither masks nor `num_image_tokens`) and the slim one (from 36b7f2d on: all are pieces of the file, no
ids of pictures, config.json names the masks); config.json, tokenizer_config.json, no generation_config.json;
prompts, `process_response`; the end is the one of config.json.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from tests.families.released.served import Released, assert_served, write_json
from tests.reference_models.common import Turn, read_json
from tests.reference_models.text_models import chatglm_6b
from tests.shared.text.test_reply_cleaning import processed
from tests.support.tokenizers import SENTENCES, trained_sentencepiece

_MODEL: Any = sentencepiece_model_pb2  # its classes are made when it is imported
CONTROL = ["[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>"]
SPACES = ["<|tab|>", *(f"<|blank_{size}|>" for size in range(2, 81))]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHATS: list[list[Turn]] = [
    [("user", "What is\tred?\n")],
    [("user", "图中   有什么"), ("assistant", "A circle."), ("user", "And then?")],
]
KEYS = {"mask_token_id": "[MASK]", "gmask_token_id": "[gMASK]", "bos_token_id": "<sop>"}
NAMES = {
    "gmask_token": "[gMASK]",
    "mask_token": "[MASK]",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
FORMS: dict[str, dict[str, Any]] = {
    "first": {"eos_token": "</s>", "eop_token": "<eop>"},
    "slim": {"eos_token": "<eop>", "end_token": "</s>", "num_image_tokens": 0},
}


@pytest.mark.parametrize("form", FORMS)
def test_served_as_released(tmp_path: Path, redis_url: str, form: str) -> None:
    folder = tmp_path / "under-test"
    folder.mkdir()
    words, offset = pieces(folder / "ice_text.model", form)
    ids = {token: words.piece_to_id(token) + offset for token in CONTROL}
    named = {key: ids[token] for key, token in {**KEYS, "eos_token_id": "<eop>"}.items()}
    chatglm_6b.write_checkpoint(folder, vocab_size=offset + words.vocab_size(), **named)
    reference = chatglm_6b.ChatGlm6B(folder)
    (folder / "tokenizer.json").unlink()
    config = read_json(folder / "config.json")
    if form == "first":
        del config["mask_token_id"], config["gmask_token_id"], config["pad_token_id"]
    write_json(folder / "config.json", config)
    settings = {"bos_token": "<sop>", "tokenizer_class": "ChatGLMTokenizer", **NAMES, **FORMS[form]}
    settings |= {"remove_space": False, "do_lower_case": False, "padding_side": "left"}
    write_json(folder / "tokenizer_config.json", settings)

    def encode(text: str) -> list[int]:
        for plain, token in chatglm_6b.REPLACEMENTS:
            text = text.replace(plain, token)
        return [number + offset for number in words.encode(text)]

    def prompt_ids(turns: Sequence[Turn]) -> list[int]:
        return [*encode(reference.prompt(turns)), ids["[gMASK]"], ids["<sop>"]]

    drawn = encode("图,!\n a")
    ends = [ids["<eop>"]]
    model = Released(folder, prompt_ids, reference.generate, ends, drawn, processed)
    assert_served(model, CHATS, redis_url)


def pieces(path: Path, form: str) -> tuple[sentencepiece.SentencePieceProcessor, int]:
    """The tokenizer that the code has, and what it adds to each id; its file is written."""
    inside = [*CONTROL, *SPACES] if form == "slim" else []
    options: dict[str, Any] = {
        "model_type": "unigram",
        "remove_extra_whitespaces": False,
        "byte_fallback": form == "slim",
        "vocab_size": 800 if form == "slim" else 420,
        "user_defined_symbols": ["<n>", *inside],
        "pad_id": 3,
    }
    words = trained_sentencepiece(path, [*SENTENCES, ",!?:;"] * 20, **options)
    if form == "slim":
        return words, 0
    model = _MODEL.ModelProto.FromString(path.read_bytes())
    for kind, texts in ((3, [*CONTROL, "<ENC>", "<dBLOCK>"]), (4, SPACES), (6, BYTES)):
        for text in texts:
            model.pieces.add(piece=text, score=0.0, type=kind)
    model.trainer_spec.byte_fallback = True
    whole = model.SerializeToString()
    return sentencepiece.SentencePieceProcessor(model_proto=whole), 20_000

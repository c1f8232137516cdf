"""ChatGLM-6B's first release: its code puts control tokens, tabs, blanks and bytes behind the pieces of the file."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from services.preprocess.prompt.tokenizer import PromptTokenizer
from shared.text.text_fold import TokenBytes
from tests.support.tokenizers import SENTENCES, trained_sentencepiece

_MODEL: Any = sentencepiece_model_pb2  # its classes are made when it is imported
OFFSET = 20_000  # ids of pictures, which no text has
# As in tokenization_chatglm.py of the first revision (d11c6aa).
CONTROL = ["[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>", "<ENC>", "<dBLOCK>"]


@pytest.fixture
def theirs(tmp_path: Path) -> sentencepiece.SentencePieceProcessor:
    """The tokenizer that the code makes of the file."""
    path = tmp_path / "ice_text.model"
    options = {"remove_extra_whitespaces": False, "user_defined_symbols": ["<n>"]}
    trained_sentencepiece(path, SENTENCES * 20, model_type="unigram", **options)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "chatglm"}))
    model = _MODEL.ModelProto.FromString(path.read_bytes())
    spaces = ["<|tab|>", *(f"<|blank_{size}|>" for size in range(2, 81))]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    for kind, texts in ((3, CONTROL), (4, spaces), (6, bytes_)):
        for text in texts:
            model.pieces.add(piece=text, score=0.0, type=kind)
    model.trainer_spec.byte_fallback = True
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def test_the_first_releases_file_is_completed(
    tmp_path: Path, theirs: sentencepiece.SentencePieceProcessor
) -> None:
    ours = PromptTokenizer(tmp_path)
    table = TokenBytes.from_tokenizer_json(tmp_path / "tokenizer.json")
    for text in [*SENTENCES, "a\n\n\tb     c", "x" + " " * 85 + "y", "🙂 𝕊"]:
        seen = text.replace("\n", "<n>").replace("\t", "<|tab|>")
        for size in range(80, 1, -1):
            seen = seen.replace(" " * size, f"<|blank_{size}|>")
        ids = [index + OFFSET for index in theirs.encode(seen)]
        assert ours.encode(text, False).tolist() == ids, text
        behind = [theirs.piece_to_id(token) + OFFSET for token in ("[gMASK]", "<sop>")]
        assert ours.encode(text, True).tolist() == [*ids, *behind]
    assert [ours.token_id(text) for text in CONTROL[:3]] == [
        theirs.piece_to_id(text) + OFFSET for text in CONTROL[:3]
    ]
    assert table.text(ours.encode("a\n\tb   c", False).tolist()) == "a\n\tb   c"

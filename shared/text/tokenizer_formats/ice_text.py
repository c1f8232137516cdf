"""ChatGLM-6B's `ice_text.model`: line breaks, tabs and runs of blanks are pieces of their own. Standard library only.

Those of the first release are read here as its `tokenization_chatglm.py` (revision d11c6aa) makes them.
"""

from dataclasses import replace

from shared.text.tokenizer_formats.content import Content, added, around
from shared.text.tokenizer_formats.sentencepiece import sentencepiece
from shared.text.tokenizer_formats.sentencepiece_file import Kind, Piece, SentencePieceModel

_LONGEST_BLANK = 80
_BLANKS = {" " * size: f"<|blank_{size}|>" for size in range(_LONGEST_BLANK, 1, -1)}
# Texts and the pieces that stand for them in the model's input.
_WRITTEN = {"\n": "<n>", "\t": "<|tab|>"} | _BLANKS
_CONTROL = ("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>")
# Of the first release; its code puts them, tabs, blanks and bytes behind the pieces of the file.
_FIRST_CONTROL = (
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<unused_0>",
    "<sop>",
    "<eop>",
    "<ENC>",
    "<dBLOCK>",
)
_BEHIND_A_TEXT = ("[gMASK]", "<sop>")


def ice_text(model: SentencePieceModel, offset: int) -> Content:
    """`offset` is added to every id. Raises ValueError for pieces that cannot be had."""
    made = sentencepiece(_completed(model), written=_WRITTEN, offset=offset)
    vocabulary = made["model"]["vocab"]
    places = (
        vocabulary
        if isinstance(vocabulary, dict)
        else {entry[0]: index for index, entry in enumerate(vocabulary)}
    )
    known = {token["content"] for token in made["added_tokens"]}
    made["added_tokens"] += [
        added(token, places[token]) for token in _CONTROL if token in places and token not in known
    ]
    ids = {token["content"]: token["id"] for token in made["added_tokens"]}
    behind = {name: ids[name] for name in _BEHIND_A_TEXT if name in ids}
    return {**made, "post_processor": around({}, behind)}


def _completed(model: SentencePieceModel) -> SentencePieceModel:
    if any(piece.text == _BEHIND_A_TEXT[0] for piece in model.pieces):
        return model
    more = [Piece(text, 0.0, Kind.CONTROL) for text in _FIRST_CONTROL]
    blanks = [_BLANKS[" " * size] for size in range(2, _LONGEST_BLANK + 1)]
    more += [Piece(text, 0.0, Kind.USER_DEFINED) for text in (_WRITTEN["\t"], *blanks)]
    more += [Piece(f"<0x{byte:02X}>", 0.0, Kind.BYTE) for byte in range(256)]
    return replace(model, pieces=[*model.pieces, *more], byte_fallback=True)

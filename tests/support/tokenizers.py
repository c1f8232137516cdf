"""Small real tokenizers, trained in the test on a few mixed sentences."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SENTENCES = [
    "The red circle stands left of the blue square.",
    "What is in the picture? There are two small dogs and a cat.",
    "图中有一个红色的圆形和一个蓝色的正方形。",
    "请描述这张图片：天空是蓝色的，海是绿色的。",
    "Emoji: 😀 👩‍👩‍👧 🇨🇳 naïve café — „quoted“ text",
    "  spaces   and\ttabs\nand lines END of STOP text. ",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"]


def byte_level_tokenizer(vocab_size: int = 480) -> Tokenizer:
    """GPT-2 / Qwen / Llama-3 style: byte-level BPE with added special tokens and one plain added
    token.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return tokenizer


def sentencepiece_like_tokenizer() -> Tokenizer:
    """Llama-2 style: ▁ for spaces, byte fallback, one leading space stripped."""
    words = "".join(sorted({c for s in SENTENCES[:3] for c in s if c != " "}))
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *words]
    merges: list[tuple[str, str]] = []
    for left, right in [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "T"), ("i", "s"), ("▁", "is")]:
        pieces.append(left + right)
        merges.append((left, right))
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def regex_replace_tokenizer() -> Tokenizer:
    """A decoder that has no table of bytes."""
    tokenizer = sentencepiece_like_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("_+"), " "), decoders.Fuse()])
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the tokenizer has."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    """Writes tokenizer.json and returns its path."""
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def trained_sentencepiece(
    path: Path, sentences: Sequence[str] = (), **options: Any
) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece model with some of its trainer's options, written to `path`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences or SENTENCES * 20),
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        **{"vocab_size": 420, "character_coverage": 0.99, **options},
    )
    path.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())

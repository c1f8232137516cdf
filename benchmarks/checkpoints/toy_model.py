"""A two-layer language model with random weights: so small that what is measured is everything around it."""

import itertools
import json
import string
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 4_096


def make(folder: Path, vocabulary: int = VOCABULARY) -> Path:
    """Writes a Llama checkpoint: hidden 256, 2 layers, 8 heads over 4 KV heads, float32, 3 M parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    folder.mkdir(parents=True, exist_ok=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(vocabulary)))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<eos>",
                "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
            }
        )
    )
    return folder


def _tokenizer(vocabulary: int) -> dict[str, object]:
    """Byte-level BPE without merges: every byte is a token, the other ids are words of letters with a space before."""
    printable = [chr(b) for b in range(256) if chr(b).isprintable() and not chr(b).isspace()]
    if "\xad" in printable:
        printable.remove("\xad")
    known = {ord(c) for c in printable}
    alphabet = printable + [
        chr(256 + n) for n, _ in enumerate(b for b in range(256) if b not in known)
    ]
    words = ("Ġ" + "".join(w) for w in itertools.product(string.ascii_lowercase, repeat=4))
    tokens = ["<bos>", "<eos>", *alphabet]
    tokens += itertools.islice(words, vocabulary - len(tokens))
    special = [
        {
            "id": i,
            "content": name,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, name in enumerate(tokens[:2])
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [],
        },
    }

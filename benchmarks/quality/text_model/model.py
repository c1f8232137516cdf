"""The text model's shape and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 4096
END = "<|endoftext|>"  # between documents, and before the first
CONTEXT = 512  # tokens of a training example


def build_model(seed: int) -> Qwen2ForCausalLM:
    """4.2 million parameters in float32. Its heads of 64 and biases are those of the small Qwen2 models, and its sizes
    are multiples of 256, so that every size of groups divides them."""
    torch.manual_seed(seed)
    make: Any = Qwen2Config  # untyped there
    config = make(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="eager",  # for training; the checkpoint does not have it
    )
    return Qwen2ForCausalLM(config)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCABULARY` tokens, the end of a document first."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(END, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    core.train_from_iterator(texts, trainer)
    make: Any = PreTrainedTokenizerFast  # untyped there
    tokenizer: PreTrainedTokenizerFast = make(
        tokenizer_object=core,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    return tokenizer


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint folder."""
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return loaded

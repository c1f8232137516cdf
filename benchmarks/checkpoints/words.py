"""A tokenizer of any size: byte-level BPE trained on generated text, the rest of the vocabulary filled with words that
text never becomes but that every id can be turned back into.
"""

import itertools
import json
import random
import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from benchmarks.load.words import COMMON_WORDS

END_OF_TEXT, START, END, IMAGE = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"
_TRAINED = 3_000  # entries at most that text becomes
_SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu th er on an st en at or"
# Qwen2's way to cut text before merging (its published tokenizer.json), which converters know by name.
_CUT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE_MARK\n{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(
    vocab_size: int, extra: tuple[str, ...] = (), image_mark: str = IMAGE
) -> PreTrainedTokenizerFast:
    """Exactly `vocab_size` ids; the special ones are the last: `extra`, then the three of ChatML."""
    special = [*extra, END_OF_TEXT, START, END]
    trained = json.loads(_train(min(_TRAINED, vocab_size - len(special))).to_str())
    vocabulary = trained["model"]["vocab"]
    letters = itertools.product(string.ascii_lowercase, repeat=5)
    fill = ("Ġ" + "".join(word) for word in letters)
    missing = vocab_size - len(special) - len(vocabulary)
    known = set(vocabulary)
    for word in itertools.islice((word for word in fill if word not in known), missing):
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer.from_str(json.dumps(trained))
    tokenizer.add_special_tokens(special)
    words = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    words.chat_template = CHAT_TEMPLATE.replace("IMAGE_MARK", image_mark)
    assert len(words) == vocab_size
    return words


def save_tokenizer(words: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes tokenizer.json and its configuration, the chat template also where older programs look for it."""
    words.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text())
    content["chat_template"] = words.chat_template
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(content, indent=2) + "\n")


def _train(size: int) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CUT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(), trainer)
    return tokenizer


def _text() -> list[str]:
    """Sentences of invented words and of those that load generators send."""
    draw = random.Random(0)
    invented = [
        "".join(draw.choices(_SYLLABLES.split(), k=draw.randint(1, 4))) for _ in range(3_000)
    ]
    every = COMMON_WORDS.split() * 5 + invented
    return [" " + " ".join(draw.choices(every, k=12)) + "." for _ in range(4_000)]

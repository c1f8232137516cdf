"""Fuyu: patches of a picture through one linear layer, before a Persimmon."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from PIL.Image import Image
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import Unigram
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.fuyu.image_processing_pil_fuyu import FuyuImageProcessorPil
from transformers.models.fuyu.processing_fuyu import FuyuProcessor

from tests.support.checkpoints.options import CheckpointOptions, text_sizes
from tests.support.tokenizers import SENTENCES, token_id

PATCH = 10
SIZE = {"height": 60, "width": 90}
_FIRST = "|ENDOFTEXT|"
_TOKENS = (_FIRST, "|SPEAKER|", "|NEWLINE|")


class Parts:
    """Image processor and tokenizer, as the files of a released checkpoint."""

    def __init__(self, images: dict[str, Any], words: PreTrainedTokenizerFast) -> None:
        self._images = images
        self._words = words

    def save_pretrained(self, folder: Path) -> None:
        """Writes both."""
        self._words.save_pretrained(folder)
        settings = {"processor_class": "FuyuProcessor", **self._images}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece's unigrams. A space begins every text, and tokens of pictures are words like others: one goes
    before them as well. A text alone gets one more token before that."""
    letters = sorted({letter for sentence in SENTENCES for letter in sentence} - {" "})
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{byte:02X}>", 0.0) for byte in range(256)]
    pieces += [(token, 0.0) for token in _TOKENS]
    pieces += [("▁", -3.0), ("▁the", -4.0), ("▁is", -4.0), ("▁What", -4.0)]
    pieces += [(letter, -5.0) for letter in letters]
    made = Tokenizer(Unigram(pieces, unk_id=0, byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>", "<0x04>"])
    made.post_processor = TemplateProcessing(
        single=f"{_FIRST} $A", special_tokens=[(_FIRST, token_id(made, _FIRST))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=_FIRST, eos_token=_FIRST)


def build(
    chosen: CheckpointOptions, words: PreTrainedTokenizerFast
) -> tuple[PreTrainedModel, Parts]:
    """With a tokenizer of its own, without a chat template, as released."""
    words = tokenizer()
    sizes = text_sizes(chosen, words)
    del sizes["num_key_value_heads"]
    config = hf.FuyuConfig(
        text_config={"model_type": "persimmon", **sizes, "pad_token_id": 0},
        patch_size=PATCH,
        image_token_id=words.convert_tokens_to_ids("|SPEAKER|"),
        **chosen.config,
    )
    images = FuyuImageProcessorPil(
        size=SIZE, patch_size={"height": PATCH, "width": PATCH}, **chosen.images
    )
    return hf.FuyuForCausalLM(config), Parts(images.to_dict(), words)


def inputs(folder: Path, text: str, images: Sequence[Image]) -> dict[str, torch.Tensor]:
    """What `generate` takes, from a rendered prompt: by the processor of transformers."""
    processor = _processor(folder)
    options: dict[str, Any] = {"return_mm_token_type_ids": False}
    if not images:
        made = processor(text=text, return_tensors="pt", **options)
        return {"input_ids": made["input_ids"]}
    made = processor(images=list(images), text=text, return_legacy_image_output=False, **options)
    values = made["pixel_values"].to(torch.float32)
    return {"input_ids": made["input_ids"], "pixel_values": values[None]}


def _processor(folder: Path) -> Any:
    """With an image processor for Pillow, whose patches are numpy's: this processor takes them for torch's."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    pictures: Any = FuyuImageProcessorPil.from_dict(settings)
    cut = pictures.patchify_image
    pictures.patchify_image = lambda image, patch_size: torch.from_numpy(
        cut(image.numpy(), patch_size)
    )[None]
    unchecked = {"check_argument_for_proper_class": lambda self, name, part: type(part)}
    kind: Any = type("FuyuProcessor", (FuyuProcessor,), unchecked)
    return kind(pictures, hf.TokenizersBackend.from_pretrained(folder))


def respelt(name: str, spelling: str) -> str:
    """Names of the text model moved below `model.` with the class's modules."""
    if spelling != "new" or name.startswith(("model.", "lm_head.")):
        return name
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    return "model." + name.replace("language_model.model.", "language_model.", 1)

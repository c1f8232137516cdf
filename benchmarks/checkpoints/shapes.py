"""The checkpoints: weights drawn as models are initialised, everything else as in real folders."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from benchmarks.checkpoints.large_text import write_qwen2
from benchmarks.checkpoints.words import END, END_OF_TEXT, IMAGE, make_tokenizer, save_tokenizer

_QWEN2_VOCABULARY = 151_936
_VISION_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def text(folder: Path) -> None:
    """Qwen2 0.5B: hidden 896, 24 layers, 14 heads over 2, vocabulary 151,936 tied, bfloat16 (0.99 GB)"""
    words = make_tokenizer(_QWEN2_VOCABULARY)
    config = Qwen2Config(**_qwen2_half_billion(), **_special(words))
    _save(folder, _random(Qwen2ForCausalLM, config, torch.bfloat16), words)


def text_7b(folder: Path) -> None:
    """Qwen2.5 7B: hidden 3584, 28 layers, 28 heads over 4, vocabulary 152,064, bfloat16 (15 GB, shard by shard)"""
    config = Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-6,
    )
    write_qwen2(folder, config)


def llava(folder: Path) -> None:
    """LLaVA of that model and a SigLIP B/16 tower at 336 px: 441 tokens an image, bfloat16 (1.2 GB)

    21 x 21 patches, so that a picture and a short question make a prompt of about 480 tokens.
    """
    words = make_tokenizer(_QWEN2_VOCABULARY, (IMAGE,))
    tower = SiglipVisionConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        image_size=336,
        patch_size=16,
        vision_use_head=False,
    )
    config = LlavaConfig(
        vision_config=tower,
        text_config=Qwen2Config(**_qwen2_half_billion(), **_special(words)),
        image_token_id=words.convert_tokens_to_ids(IMAGE),
        image_seq_length=441,
        vision_feature_select_strategy="full",
        vision_feature_layer=-2,
        tie_word_embeddings=True,
    )
    _save(folder, _random(LlavaForConditionalGeneration, config, torch.bfloat16), words)
    _name_as_published(folder / "model.safetensors")
    LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size={"height": 336, "width": 336}),
        tokenizer=words,
        patch_size=16,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=words.chat_template,
    ).save_pretrained(folder)
    save_tokenizer(words, folder)


def qwen2_vl(folder: Path) -> None:
    """Qwen2-VL, small: hidden 512, 8 layers, a tower of 8 layers, any resolution, bfloat16 (0.11 GB)"""
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    words = make_tokenizer(32_000, _VISION_MARKS, mark)
    ids = dict(zip(_VISION_MARKS, words.convert_tokens_to_ids(list(_VISION_MARKS)), strict=True))
    config = Qwen2VLConfig(
        text_config={
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "vocab_size": len(words),
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "mrope_section": [8, 12, 12],
            },
            "tie_word_embeddings": True,
            **_special(words),
        },
        vision_config={
            "depth": 8,
            "embed_dim": 512,
            "hidden_size": 512,
            "num_heads": 8,
            "mlp_ratio": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    _save(folder, _random(Qwen2VLForConditionalGeneration, config, torch.bfloat16), words)
    Qwen2VLImageProcessorPil().save_pretrained(folder)


def toy(folder: Path) -> None:
    """Llama of two layers, hidden 64, vocabulary 32,000, float32 (17 MB): what stands around a model"""
    words = make_tokenizer(32_000)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        **_special(words),
    )
    _save(folder, _random(LlamaForCausalLM, config, torch.float32), words)


SHAPES: dict[str, Callable[[Path], None]] = {
    "text-0.5b": text,
    "text-7b": text_7b,
    "llava-0.5b": llava,
    "qwen2-vl-small": qwen2_vl,
    "toy": toy,
}


def _qwen2_half_billion() -> dict[str, object]:
    """As Qwen2-0.5B-Instruct's config.json says."""
    return {
        "vocab_size": _QWEN2_VOCABULARY,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }


def _special(words: PreTrainedTokenizerFast) -> dict[str, int]:
    start, end = words.convert_tokens_to_ids([END_OF_TEXT, END])
    return {"bos_token_id": start, "pad_token_id": start, "eos_token_id": end}


def _random(kind: type[PreTrainedModel], config: object, dtype: torch.dtype) -> PreTrainedModel:
    """The same for equal shapes."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return kind(config)
    finally:
        torch.set_default_dtype(before)


def _save(folder: Path, model: PreTrainedModel, words: PreTrainedTokenizerFast) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    ids = _special(words)
    model.generation_config = GenerationConfig(**ids, do_sample=False)
    model.save_pretrained(folder)
    save_tokenizer(words, folder)


def _name_as_published(file: Path) -> None:
    """Gives the tower's tensors the names that published checkpoints have and every server knows."""
    tensors = load_file(file)
    longer = {
        name.replace("vision_tower.", "vision_tower.vision_model."): t
        for name, t in tensors.items()
    }
    save_file(longer, file, {"format": "pt"})

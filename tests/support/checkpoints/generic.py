"""Checkpoints that no family of ours serves, whose prompt and encoder are transformers' own code. Tiny towers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL.Image import Image
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

from services.families import registry
from services.families.family import GENERIC_ENCODER, GENERIC_PROMPT, Family
from services.families.molmo2.image_processor import Molmo2ImageProcessor
from services.preprocess.prompt.tokenizer import Ids
from services.vision_encoder.generic import image_features
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import SPAN_IDS, build_processor, picture_tensors, placeholder_ids
from tests.support.checkpoints.options import CheckpointOptions, text_config, text_sizes
from tests.support.tokenizers import SPECIAL

Built = tuple[PreTrainedModel, "Parts"]
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
_CODES = 24  # of a picture
_TEMPLATE = (
    "{{% for message in messages %}}<|im_start|>{{{{ message['role'] }}}}\n"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for content in message['content'] %}}{{% if content['type'] == 'image' %}}{marker}"
    "{{% elif content['type'] == 'text' %}}{{{{ content['text'] }}}}{{% endif %}}{{% endfor %}}{{% endif %}}"
    "<|im_end|>\n{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)


class Parts:
    """Processor settings, image processor and tokenizer, as the files of a released checkpoint."""

    def __init__(
        self, name: str, images: Any, words: PreTrainedTokenizerFast, **settings: Any
    ) -> None:
        self._name = name
        self._images = images
        self._words = words
        self._settings = settings

    def save_pretrained(self, folder: Path) -> None:
        """Writes all."""
        import json

        self._images.save_pretrained(folder)
        self._words.save_pretrained(folder)
        (folder / "processor_config.json").write_text(
            json.dumps({"processor_class": self._name, **self._settings})
        )


def idefics3(chosen: CheckpointOptions, words: PreTrainedTokenizerFast) -> Built:
    """Squares of 28 pixels with markers of rows and columns; a Llama."""
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    own = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *places]
    _add(words, own, "<image>")
    vision = {**_SIGLIP, "model_type": "idefics3_vision", "patch_size": 7}
    vision.pop("vision_use_head")
    config = hf.Idefics3Config(
        text_config=text_config(chosen.language, chosen, words),
        vision_config={**vision, **chosen.vision},
        image_token_id=words.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        **{"tie_word_embeddings": False, **chosen.config},
    )
    images = hf.Idefics3ImageProcessorPil(
        size={"longest_edge": 84}, max_image_size={"longest_edge": 28}, **chosen.images
    )
    return hf.Idefics3ForConditionalGeneration(config), Parts(
        "Idefics3Processor", images, words, image_seq_len=4
    )


def llava_onevision(chosen: CheckpointOptions, words: PreTrainedTokenizerFast) -> Built:
    """Up to four squares of 28 pixels; a Qwen2."""
    _add(words, ["<video>"], "<image>\n")
    pins = [[28, 28], [28, 56], [56, 28], [56, 56]]
    config = hf.LlavaOnevisionConfig(
        text_config=text_config("qwen2", chosen, words),
        vision_config={**_SIGLIP, **chosen.vision},
        image_token_index=words.convert_tokens_to_ids("<image>"),
        video_token_index=words.convert_tokens_to_ids("<video>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_grid_pinpoints=pins,
        **chosen.config,
    )
    images = hf.LlavaOnevisionImageProcessorPil(
        size={"height": 28, "width": 28}, image_grid_pinpoints=pins, **chosen.images
    )
    settings = {"num_image_tokens": 4, "vision_feature_select_strategy": "full"}
    return hf.LlavaOnevisionForConditionalGeneration(config), Parts(
        "LlavaOnevisionProcessor", images, words, **settings
    )


def gemma3(chosen: CheckpointOptions, words: PreTrainedTokenizerFast) -> Built:
    """Squares of 28 pixels, four rows each, whose tokens see each other; windows of 20 tokens in half of the layers."""
    own = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    _add(words, list(own.values()), "<start_of_image>")
    words = _named(words, own)
    text = {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        **text_sizes(chosen, words),
    }
    image, start, end = words.convert_tokens_to_ids(list(own.values()))
    config = hf.Gemma3Config(
        text_config=text,
        vision_config={**_SIGLIP, **chosen.vision},
        mm_tokens_per_image=4,
        image_token_index=image,
        boi_token_index=start,
        eoi_token_index=end,
        **chosen.config,
    )
    images = hf.Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, **chosen.images)
    return hf.Gemma3ForConditionalGeneration(config), Parts(
        "Gemma3Processor", images, words, image_seq_length=4
    )


def qwen3_vl(chosen: CheckpointOptions, words: PreTrainedTokenizerFast) -> Built:
    """Patches of 8 pixels, at most 40 rows an image, deepstack rows for two layers, positions of three axes."""
    own = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    _add(words, own, "<|vision_start|><|image_pad|><|vision_end|>")
    start, end, image, video = words.convert_tokens_to_ids(own)
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {
        "head_dim": 16,
        "rope_parameters": {**rope, "rope_theta": 10_000.0},
        **text_sizes(chosen, words),
    }
    vision = {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    config = hf.Qwen3VLConfig(
        text_config=text,
        vision_config={**vision, **chosen.vision},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        **chosen.config,
    )
    images = hf.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 16 * 16, "longest_edge": 16 * 16 * 40},
        patch_size=8,
        merge_size=2,
        **chosen.images,
    )
    return hf.Qwen3VLForConditionalGeneration(config), Parts("Qwen3VLProcessor", images, words)


def chameleon(chosen: CheckpointOptions, words: PreTrainedTokenizerFast) -> Built:
    """64 codes of a picture of 32 pixels, which stand for rows of the embedding table."""
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    codes = [f"IMGIMG{str(number).translate(letters)}Z" for number in range(_CODES)]
    own = ["<racm3:break>", "<eoss>", "<reserved08706>", *codes]
    _add(words, own, "<image>")
    words.sep_token = "<reserved08706>"
    config = hf.ChameleonConfig(
        **text_sizes(chosen, words),
        vocabulary_map={name: words.convert_tokens_to_ids(name) for name in ("<image>", *codes)},
        vq_config={
            "embed_dim": 16,
            "num_embeddings": _CODES,
            "latent_channels": 16,
            "resolution": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 2],
            "num_res_blocks": 1,
            **chosen.vision,
        },
        **chosen.config,
    )
    images = hf.ChameleonImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, **chosen.images
    )
    return hf.ChameleonForConditionalGeneration(config), Parts(
        "ChameleonProcessor", images, words, image_seq_length=64
    )


def molmo2(chosen: CheckpointOptions, words: PreTrainedTokenizerFast) -> Built:
    """A picture of 56 pixels and up to four crops of it, in cells of 2 x 2 patches of 14 pixels; the tokens that stand
    for them have an embedding and no output."""
    words.add_tokens([f"<unused{i}>" for i in range(-len(words) % 16)])
    known = len(words)
    own = ["<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<im_low>"]
    _add(words, [*own, "<frame_start>", "<frame_end>", "<|image|>", "<|video|>"], "<|image|>")
    start, end, patch, _, low = words.convert_tokens_to_ids(own[:5])
    text = {
        "model_type": "molmo2_text",
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        **text_sizes(chosen, words),
        "vocab_size": known,
        "additional_vocab_size": 16,
    }
    tower = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = hf.Molmo2Config(
        text_config=text,
        vision_config={
            **tower,
            "intermediate_size": 32,
            "num_hidden_layers": 3,
            "image_size": [56, 56],
            **chosen.vision,
        },
        adapter_config={
            **tower,
            "intermediate_size": 48,
            "vision_feature_layer": [2, 1],
            "text_hidden_size": text["hidden_size"],
        },
        image_start_token_id=start,
        low_res_image_start_token_id=low,
        image_end_token_id=end,
        image_patch_id=patch,
        frame_start_token_id=words.convert_tokens_to_ids("<frame_start>"),
        frame_end_token_id=words.convert_tokens_to_ids("<frame_end>"),
        **chosen.config,
    )
    images = Molmo2ImageProcessor(
        size={"height": 56, "width": 56}, max_crops=4, overlap_margins=[1, 1], **chosen.images
    )
    return hf.Molmo2ForConditionalGeneration(config), Parts("Molmo2Processor", images, words)


def ovis2(chosen: CheckpointOptions, words: PreTrainedTokenizerFast) -> Built:
    """A square of 28 pixels and up to four tiles, four rows each, between indicator tokens; a Qwen2."""
    own = ["<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
    _add(words, own, "<image>")
    atom, *indicators = words.convert_tokens_to_ids(own)
    text = text_config("qwen2", chosen, words)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 7,
        "hidden_stride": 2,
        "vocab_size": 40,
    }
    config = hf.Ovis2Config(
        text_config=text,
        vision_config={**vision, **chosen.vision},
        image_token_id=atom,
        visual_indicator_token_ids=indicators,
        vocab_size=len(words),
        hidden_size=text["hidden_size"] if isinstance(text, dict) else text.hidden_size,
        **{"tie_word_embeddings": False, **chosen.config},
    )
    images = hf.Ovis2ImageProcessorPil(
        size={"height": 28, "width": 28}, crop_to_patches=True, max_patches=4, **chosen.images
    )
    return hf.Ovis2ForConditionalGeneration(config), Parts(
        "Ovis2Processor", images, words, image_seq_length=4
    )


def ernie4_5_vl_moe(chosen: CheckpointOptions, words: PreTrainedTokenizerFast) -> Built:
    """Patches of 14 pixels, at most 24 rows an image; experts of their own for the tokens of pictures."""
    own = {
        f"{kind}{part}_token": f"<|{kind.upper()}{part.upper()}|>"
        for kind in ("image", "video")
        for part in ("", "_start", "_end")
    }
    marker = "".join(own[f"image{part}_token"] for part in ("_start", "", "_end"))
    _add(words, list(own.values()), f"Picture:{marker}")
    words = _named(words, own)
    ids = {f"{name}_id": words.convert_tokens_to_ids(text) for name, text in own.items()}
    rope = {"rope_type": "default", "mrope_section": [3, 3, 2], "rope_theta": 10_000.0}
    text = {
        **text_sizes(chosen, words),
        "rope_parameters": rope,
        "moe_intermediate_size": [32, 16],
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        **chosen.text,
    }
    vision = {"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32}
    config = hf.Ernie4_5_VLMoeConfig(
        text_config=text, vision_config={**vision, **chosen.vision}, **ids, **chosen.config
    )
    images = hf.Ernie4_5_VLMoeImageProcessorPil(
        size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 24}, **chosen.images
    )
    return hf.Ernie4_5_VLMoeForConditionalGeneration(config), Parts(
        "Ernie4_5_VLMoeProcessor", images, words
    )


def mllama(chosen: CheckpointOptions, words: PreTrainedTokenizerFast) -> Built:
    """Up to four tiles of 28 pixels in 4 patches and a class token each; two of five layers attend to them. The
    picture's token has an embedding and no output."""
    known = len(words)
    words.add_special_tokens({"extra_special_tokens": [*SPECIAL, "<|image|>"]})
    words.chat_template = "{{ bos_token }}" + _TEMPLATE.format(marker="<|image|>")
    assert words.convert_tokens_to_ids("<|image|>") == known
    text = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        **text_sizes(chosen, words),
        "vocab_size": known,
        "num_hidden_layers": 5,
        "cross_attention_layers": [1, 3],
        **chosen.text,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "intermediate_layers_indices": [0, 2],
        "vision_output_dim": 48,
    }
    config = hf.MllamaConfig(
        text_config=text,
        vision_config={**vision, **chosen.vision},
        image_token_index=known,
        **chosen.config,
    )
    images = hf.MllamaImageProcessorPil(size={"height": 28, "width": 28}, **chosen.images)
    return hf.MllamaForConditionalGeneration(config), Parts("MllamaProcessor", images, words)


BUILDERS: dict[str, Callable[[CheckpointOptions, PreTrainedTokenizerFast], Built]] = {
    "idefics3": idefics3,
    "llava_onevision": llava_onevision,
    "gemma3": gemma3,
    "qwen3_vl": qwen3_vl,
    "chameleon": chameleon,
    "molmo2": molmo2,
    "ovis2": ovis2,
    "ernie4_5_vl_moe": ernie4_5_vl_moe,
    "mllama": mllama,
}
# How many pictures a prompt may have, where not any number.
MOST_IMAGES = {"molmo2": 1}


def processor(folder: Path) -> ProcessorMixin:
    """The checkpoint's processor."""
    checkpoint = Checkpoint(folder)
    return build_processor(checkpoint, registry.find(checkpoint).processor_config(checkpoint))


def row_ids(folder: Path) -> list[int]:
    """The ids of a picture's tokens that take an embedding row."""
    checkpoint = Checkpoint(folder)
    if registry.find(checkpoint).takes_all_rows:
        config = checkpoint.config
        if indicators := config.get("visual_indicator_token_ids"):
            return [config["image_token_id"], *indicators]
        return list(processor(folder).image_token_ids)
    return placeholder_ids(checkpoint)


def item_tensors(folder: Path, made: Any) -> dict[str, np.ndarray[Any, Any]]:
    """What an item of preprocess has, of what a processor has made of one picture."""
    tensors = picture_tensors(made)
    if registry.find(Checkpoint(folder)).takes_all_rows:
        ids = np.asarray(made["input_ids"])[0]
        tensors[SPAN_IDS] = ids[np.isin(ids, row_ids(folder))]
    return tensors


def inputs(folder: Path, text: str, images: Sequence[Image]) -> dict[str, torch.Tensor]:
    """What `generate` takes, from a rendered prompt."""
    made = processor(folder)(
        text=[text],
        images=list(images) or None,
        return_tensors="pt",
        add_special_tokens=False,
    )
    return {name: made[name] for name in made if name != "attention_mask"}


def with_overrides(architecture: str, **overrides: str) -> Family:
    """A record of such a model that overrides parts."""
    return Family(
        (architecture,), prompt=GENERIC_PROMPT, encoder=GENERIC_ENCODER, overrides=overrides
    )


def doubled_features(model: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """As an override of "features"."""
    return 2 * image_features(model, tensors)


def one_more(ids: Ids, checkpoint: Checkpoint) -> Ids:
    """As an override of "finish"."""
    return np.append(ids, np.int32(checkpoint.config["image_token_id"] + 1))


def _named(words: PreTrainedTokenizerFast, own: dict[str, str]) -> PreTrainedTokenizerFast:
    """A tokenizer that knows some of its tokens by names."""
    return PreTrainedTokenizerFast(
        tokenizer_object=words.backend_tokenizer,
        bos_token=words.bos_token,
        eos_token=words.eos_token,
        pad_token=words.pad_token,
        chat_template=words.chat_template,
        extra_special_tokens=own,
    )


def _add(words: PreTrainedTokenizerFast, tokens: list[str], marker: str) -> None:
    words.add_special_tokens({"extra_special_tokens": [*SPECIAL, *tokens]})
    words.chat_template = _TEMPLATE.format(marker=marker)

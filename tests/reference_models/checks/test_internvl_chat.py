"""The InternVLChat reference against transformers' InternVL; tiles, prompt, generation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import InternVLConfig, InternVLForConditionalGeneration, Qwen2Config
from transformers import InternVLVisionConfig as VisionConfig
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from tests.reference_models.common import Draw, below, noise
from tests.reference_models.internvl_chat import InternVLChat, tile_counts, write_checkpoint

ASK = [("system", "You see."), ("user", "<image>\nWhat?")]
RENAMED = {
    "attn.proj": "attention.projection_layer",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "attn.q_norm": "attention.q_norm",
    "attn.k_norm": "attention.k_norm",
}
MODERN = {"norm_type": "rms_norm", "qk_normalization": True, "qkv_bias": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> InternVLChat:
    return InternVLChat(write_checkpoint(tmp_path_factory.mktemp("internvl")))


def vision_weights(model: InternVLChat) -> dict[str, torch.Tensor]:
    """The tower's tensors by the names of transformers."""
    ours = below(model.tensors, "vision_model.")
    weights = {
        "embeddings.cls_token": ours["embeddings.class_embedding"],
        "embeddings.position_embeddings": ours["embeddings.position_embedding"],
    }
    for kind in ("weight", "bias"):
        renamed = f"embeddings.patch_embeddings.projection.{kind}"
        weights[renamed] = ours[f"embeddings.patch_embedding.{kind}"]
    for layer in range(3):
        part, name = below(ours, f"encoder.layers.{layer}."), f"encoder.layer.{layer}."
        weights |= {f"{name}lambda_1": part["ls1"], f"{name}lambda_2": part["ls2"]}
        for kind in ("weight", "bias"):
            for old, new in RENAMED.items():
                if f"{old}.{kind}" in part:
                    weights[f"{name}{new}.{kind}"] = part[f"{old}.{kind}"]
            if f"attn.qkv.{kind}" in part:
                for letter, rows in zip("qkv", part[f"attn.qkv.{kind}"].chunk(3), strict=True):
                    weights[f"{name}attention.{letter}_proj.{kind}"] = rows
    return weights


def renamed_model(model: InternVLChat) -> InternVLForConditionalGeneration:
    """transformers' InternVL with the same weights."""
    vision = model.config["vision_config"]
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    vision_config = VisionConfig(
        **{key: vision[key] for key in sizes},
        image_size=[56, 56],
        patch_size=[14, 14],
        norm_type=vision["norm_type"],
        use_qk_norm=vision["qk_normalization"],
        attention_bias=vision["qkv_bias"],
    )
    unused = ("architectures", "model_type", "rope_theta", "rope_scaling")
    llm = {key: value for key, value in model.config["llm_config"].items() if key not in unused}
    rope = {"rope_type": "default", "rope_theta": 1_000_000}
    theirs = InternVLForConditionalGeneration(
        InternVLConfig(
            vision_config=vision_config,
            text_config=Qwen2Config(**llm, rope_parameters=rope),
            image_token_id=model.context,
            image_seq_length=4,
            vision_feature_layer=model.config["select_layer"],
            tie_word_embeddings=False,
        )
    ).eval()
    projector = {"mlp1.0": "layer_norm", "mlp1.1": "linear_1", "mlp1.3": "linear_2"}
    weights = {f"model.vision_tower.{n}": tensor for n, tensor in vision_weights(model).items()}
    for old, new in projector.items():
        for kind in ("weight", "bias"):
            renamed = f"model.multi_modal_projector.{new}.{kind}"
            weights[renamed] = model.tensors[f"{old}.{kind}"]
    language = below(model.tensors, "language_model.")
    weights["lm_head.weight"] = language.pop("lm_head.weight")
    for name, tensor in language.items():
        weights[f"model.language_model.{name.removeprefix('model.')}"] = tensor
    theirs.load_state_dict(weights)
    return theirs


@pytest.mark.parametrize("changes", [{}, {"vision": MODERN}, {"select_layer": -2}])
def test_the_whole_is_transformers_internvl(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = InternVLChat(write_checkpoint(tmp_path, **changes))
    picture = noise(90, 60)
    ids = model.prompt_ids(ASK, [picture.size])
    theirs = renamed_model(model)
    ours = model.logits(ids, [model.embed_image(picture)])
    with torch.no_grad():
        expected = theirs(
            input_ids=torch.tensor([ids]), pixel_values=model.pixel_values(picture)
        ).logits[0]
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("size", [(56, 56), (90, 60), (60, 90), (300, 40), (200, 210)])
def test_tiles_are_those_of_transformers_processor(
    model: InternVLChat, size: tuple[int, int]
) -> None:
    columns, rows = tile_counts(*size, model.config)
    theirs = get_optimal_tiled_canvas(size[::-1], (56, 56), 1, 6)
    assert (columns, rows) == tuple(theirs)
    tiles = columns * rows + (columns * rows > 1)
    assert model.pixel_values(noise(*size)).shape == (tiles, 3, 56, 56)
    assert model.prompt_ids(ASK, [size]).count(model.context) == 4 * tiles
    assert len(model.embed_image(noise(*size))) == 4 * tiles


def test_the_first_version_of_the_shuffle_lists_cells_by_columns(model: InternVLChat) -> None:
    x = Draw(3).weight(16, 64)
    second = model.shuffle(x)
    model.config["ps_version"] = "v1"
    first = model.shuffle(x)
    model.config["ps_version"] = "v2"
    assert torch.equal(first, second[[0, 2, 1, 3]])
    assert torch.equal(second[1], x[[2, 3, 6, 7]].flatten())


def test_the_prompt_follows_the_template(model: InternVLChat, tmp_path: Path) -> None:
    text = (
        "<|im_start|>system\nYou see.{0}<|im_start|>user\n<image>\nWhat?{0}<|im_start|>assistant\n"
    )
    assert model.prompt(ASK) == text.format("<|im_end|>\n")
    older = InternVLChat(write_checkpoint(tmp_path, language="InternLM2"))
    assert older.prompt(ASK) == text.format("<|im_end|>")
    assert older.prompt_ids(ASK, [(56, 56)])[0] == 1


@pytest.mark.parametrize("language", ["Qwen2", "Llama", "InternLM2"])
def test_images_matter_to_what_is_generated(tmp_path: Path, language: str) -> None:
    model = InternVLChat(write_checkpoint(tmp_path, language=language))
    picture = noise(60, 60)
    ids = model.prompt_ids(ASK, [picture.size])
    result = model.generate(ids, [picture], 2)
    other = model.generate(ids, [noise(60, 60, seed=1)], 1)
    assert (result.logits[0] - other.logits[0]).abs().max() > 0.1

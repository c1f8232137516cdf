"""Vision parts (mmproj) of GGUF models: what is made of them, which one is taken, and what is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from safetensors.torch import load_file

from services.families.check import require_servable
from services.launcher import check
from shared.checkpoint.content import content_digest
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.gguf.prepared import prepared_folder
from shared.checkpoint.gguf.vision.beside import find_projector
from shared.errors import InvalidRequest
from shared.text.templates.template_file import read_template
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.gguf_files import Edit, Types
from tests.support.checkpoints.mmproj_files import (
    PLAIN,
    numbers_of,
    said,
    without,
    write_language,
    write_mmproj,
    write_pair,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llava": {},
    "llava_next": {"language": "qwen2"},
    "internvl_chat": {"language": "qwen2", "vision": {"use_qk_norm": True}},
    "qwen2_vl": {},
    "qwen2_5_vl": {"vision": {"window_size": 112}},
}
VISION = (
    "vision_tower.",
    "multi_modal_projector.",
    "image_newline",
    "vision_model.",
    "mlp1.",
    "visual.",
)
# Of vision_config, what tells how a tower computes.
TOLD = {
    "llava": (
        "hidden_size intermediate_size num_attention_heads image_size patch_size hidden_act"
        " layer_norm_eps"
    ),
    "llava_next": "hidden_size image_size patch_size",
    "internvl_chat": (
        "hidden_size intermediate_size num_attention_heads num_hidden_layers image_size patch_size qkv_bias"
        " qk_normalization norm_type layer_norm_eps"
    ),
    "qwen2_vl": (
        "depth embed_dim hidden_size mlp_ratio num_heads patch_size spatial_merge_size in_channels"
        " temporal_patch_size hidden_act"
    ),
    "qwen2_5_vl": (
        "depth hidden_size out_hidden_size intermediate_size num_heads patch_size window_size"
        " spatial_merge_size temporal_patch_size fullatt_block_indexes tokens_per_second hidden_act"
    ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that are prepared are the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        family: make_checkpoint(folder / family, family, **options)
        for family, options in FAMILIES.items()
    }


@pytest.fixture(scope="module")
def pairs(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Folders of two files, with the tokenizer beside them, which takes less time than to make it."""
    folder = tmp_path_factory.mktemp("pairs")
    for family, checkpoint in checkpoints.items():
        write_pair(folder / family, checkpoint)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(checkpoint / name, folder / family)
    return {family: folder / family for family in FAMILIES}


@pytest.fixture
def pair(pairs: dict[str, Path], tmp_path: Path) -> Path:
    """A LLaVA of the test's own."""
    return Path(shutil.copytree(pairs["llava"], tmp_path / "pair"))


@pytest.mark.parametrize("family", FAMILIES)
def test_two_files_become_one_checkpoint(
    family: str, checkpoints: dict[str, Path], pairs: dict[str, Path]
) -> None:
    folder = prepared_folder(pairs[family])
    assert prepared_folder(folder) == folder == prepared_folder(pairs[family])
    alone = require_servable(prepared_folder(pairs[family], "none"), device="cpu")
    assert alone.vision_config is None and alone.architecture.endswith("ForCausalLM")
    made, original = require_servable(folder, device="cpu"), Checkpoint(checkpoints[family])
    assert made.architecture == original.architecture
    assert made.vision_config is not None and original.vision_config is not None
    for key in TOLD[family].split():
        assert made.vision_config[key] == original.vision_config[key], key
    for key, value in original.config.items():
        if key.endswith("_token_id") or key in ("image_grid_pinpoints", "downsample_ratio"):
            assert made.config[key] == value, key
    expected = {
        name: tensor
        for name, tensor in load_file(checkpoints[family] / "model.safetensors").items()
        if name.startswith(VISION)
    }
    prefix = "vision_tower.vision_model."
    stored = {name.replace(prefix, "vision_tower."): name for name in made.names()}
    names = {name for name in stored if name.startswith(VISION)}
    # Of a CLIP tower only the layers that pictures go through are in the file.
    assert {name for name in expected.keys() - names if "tower.encoder.layers.2" not in name} <= {
        f"vision_tower.post_layernorm.{end}" for end in ("weight", "bias")
    }
    for name in names:
        assert torch.equal(made.tensor(stored[name]), expected[name]), name


def test_pictures_are_prepared_as_the_released_processors_do(
    checkpoints: dict[str, Path], pairs: dict[str, Path]
) -> None:
    made = Checkpoint(prepared_folder(pairs["llava"])).image_processor_config
    original = Checkpoint(checkpoints["llava"]).image_processor_config
    for key in ("size", "crop_size", "image_mean", "image_std", "do_center_crop", "resample"):
        assert made[key] == original[key], key
    made = Checkpoint(prepared_folder(pairs["qwen2_vl"])).image_processor_config
    assert made["size"] == {"shortest_edge": 3136, "longest_edge": 12_845_056}
    original = Checkpoint(checkpoints["qwen2_vl"]).image_processor_config
    for key in ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std"):
        assert made[key] == original[key], key


@pytest.mark.parametrize(
    ("types", "name"),
    [
        ({"": Kind.F16}, "F16"),
        ({"": Kind.BF16}, "BF16"),
        ({"attn_q": Kind.F16, "": Kind.Q8_0}, "F32"),
        ({"": Kind.Q4_0}, "F32"),
    ],
    ids=["F16", "BF16", "Q8_0", "Q4_0"],
)
def test_numbers_are_those_that_the_file_stands_for(
    types: Types, name: str, checkpoints: dict[str, Path], pairs: dict[str, Path], tmp_path: Path
) -> None:
    path = write_mmproj(tmp_path / "mmproj.gguf", checkpoints["qwen2_vl"], types)
    folder = prepared_folder(pairs["qwen2_vl"], str(path))
    made = Checkpoint(folder)
    for tensor, numbers in numbers_of(path, checkpoints["qwen2_vl"]).items():
        assert torch.equal(made.tensor(tensor).float(), numbers), tensor
    # Queries, keys and values are one layer, of one type.
    assert made.dtype("visual.blocks.0.attn.qkv.weight") == name


def test_the_digest_of_the_weights_covers_the_vision_part(
    pair: Path, checkpoints: dict[str, Path]
) -> None:
    before = content_digest(Checkpoint(prepared_folder(pair)))
    assert content_digest(Checkpoint(prepared_folder(pair, "none"))) != before
    file = pair / "mmproj-model.gguf"

    def change(writer: GGUFWriter) -> None:
        writer.tensors[0]["mm.2.bias"].tensor = np.full(64, 3, np.float32)

    file.unlink()
    write_mmproj(file, checkpoints["llava"], PLAIN, change)
    assert content_digest(Checkpoint(prepared_folder(pair))) != before


def test_which_file_is_taken(pair: Path, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    file, projector = pair / "model.gguf", pair / "mmproj-model.gguf"
    assert find_projector(file, None, "") == projector
    assert find_projector(file, None, "none") is None
    assert Checkpoint(prepared_folder(pair)).architecture == "LlavaForConditionalGeneration"
    assert Checkpoint(prepared_folder(pair, "none")).architecture == "LlamaForCausalLM"
    # Elsewhere, by a path; in a folder of nothing else by what it says.
    apart = projector.rename(tmp_path / "eyes.gguf")
    assert Checkpoint(prepared_folder(pair)).architecture == "LlamaForCausalLM"
    assert Checkpoint(prepared_folder(pair, str(apart))).vision_config is not None
    apart = apart.rename(pair / "eyes.gguf")
    assert find_projector(file, None, "") is None
    assert find_projector(file, None, "eyes.gguf") == apart
    assert Checkpoint(prepared_folder(pair)).vision_config is not None
    write_mmproj(pair / "mmproj-F16.gguf", checkpoints["llava"], {"": Kind.F16})
    with pytest.raises(InvalidRequest, match=r"several vision parts, eyes\.gguf, mmproj-F16\.gguf"):
        prepared_folder(pair)
    assert Checkpoint(prepared_folder(pair, "mmproj-F16.gguf")).vision_config is not None
    with pytest.raises(InvalidRequest, match=r"--mmproj: no file mmproj-F8\.gguf, nor one in "):
        prepared_folder(pair, "mmproj-F8.gguf")
    with pytest.raises(InvalidRequest, match="is no GGUF file of a language model"):
        prepared_folder(checkpoints["llava"], "mmproj-F16.gguf")
    with pytest.raises(InvalidRequest, match=r"'llama': it is no vision part \(mmproj\)"):
        prepared_folder(pair, str(file))
    with pytest.raises(InvalidRequest, match=r"vision part of a model \(mmproj\); give the file"):
        prepared_folder(pair / "mmproj-F16.gguf")


def test_a_model_for_text_alone_gets_a_placeholder_and_a_template(
    pair: Path, checkpoints: dict[str, Path]
) -> None:
    """As files have it that were made before `<image>` was a token."""
    (pair / "chat_template.jinja").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (pair / name).read_text().replace("<image>", "<other>")
        (pair / name).write_text(text)
    folder = prepared_folder(pair)
    made = require_servable(folder, device="cpu")
    number = made.text_config["vocab_size"]
    assert made.config["image_token_id"] == number
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert {token["content"]: token["id"] for token in tokens}["<image>"] == number
    assert "ASSISTANT:" in (read_template(folder) or "")


def test_a_template_for_text_alone_is_not_that_of_qwen_vl(
    pairs: dict[str, Path], tmp_path: Path
) -> None:
    pair = Path(shutil.copytree(pairs["qwen2_vl"], tmp_path / "pair"))
    (pair / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert "<|vision_start|>" in (read_template(prepared_folder(pair)) or "")


def text_key(name: str, value: str) -> Edit:
    return said(name, value, GGUFWriter.add_string)


def number(name: str, value: int) -> Edit:
    return said(name, value, GGUFWriter.add_uint32)


def added(name: str, *shape: int) -> Edit:
    return lambda writer: writer.add_tensor(name, np.ones(shape, np.float32))


def replaced(name: str, *shape: int) -> Edit:
    def change(writer: GGUFWriter) -> None:
        without(name)(writer)
        writer.add_tensor(name, np.ones(shape, np.float32))

    return change


@pytest.mark.parametrize(
    ("family", "change", "why"),
    [
        (
            "llava",
            text_key("clip.projector_type", "ldpv2"),
            "projector_type is 'ldpv2'; mlp, inter",
        ),
        ("llava", without("clip.projector_type"), "clip.projector_type is None; mlp, inter"),
        ("llava", without("v.class_embd"), r"it lacks v\.class_embd \[32\]"),
        ("llava", without("mm.2.weight"), r"it lacks mm\.2\.weight, a matrix"),
        ("llava", without("v.blk.1.ffn_up.bias"), r"it lacks v\.blk\.1\.ffn_up\.bias \[32\]"),
        (
            "llava",
            added("model.image_newline", 64),
            r"model\.image_newline has no place in a visio",
        ),
        ("llava", added("v.blk.2.ln1.weight", 32), r"v\.blk\.2\.ln1\.weight has no place"),
        ("llava", number("clip.vision.block_count", 3), r"it lacks v\.blk\.2\."),
        ("llava", number("clip.vision.block_count", 1 << 20), "block_count is 1,048,576"),
        ("llava", number("clip.vision.embedding_length", 64), r"v\.class_embd is \[32\], and by i"),
        ("llava", number("clip.vision.feed_forward_length", 0), "feed_forward_length is 0"),
        ("llava", number("clip.vision.attention.head_count", 5), "head_count is 5, which does not"),
        ("llava", number("clip.vision.image_size", 57), "image_size is 57, no multiple of patches"),
        ("llava", without("clip.vision.image_mean"), r"it has no key clip\.vision\.image_mean"),
        (
            "llava",
            said("clip.vision.image_std", [1.0], GGUFWriter.add_array),
            r"image_std is a list of 1, \(1\.0,\)",
        ),
        (
            "llava",
            said("clip.vision.feature_layer", [7], GGUFWriter.add_array),
            r"feature_layer is \[7\], of 2 layers",
        ),
        (
            "llava",
            said("clip.vision.attention.layer_norm_epsilon", 1e300, GGUFWriter.add_float64),
            r"layer_norm_epsilon is 1e\+300",
        ),
        (
            "llava_next",
            text_key("clip.vision.mm_patch_merge_type", "flat"),
            "mm_patch_merge_type is 'flat'; spatial_unpad is read",
        ),
        (
            "llava_next",
            said("clip.vision.image_grid_pinpoints", [56, 57], GGUFWriter.add_array),
            "image_grid_pinpoints has an edge that is no multiple of 56",
        ),
        (
            "llava_next",
            said("clip.vision.image_grid_pinpoints", [56], GGUFWriter.add_array),
            "image_grid_pinpoints has 1 numbers",
        ),
        ("llava_next", without("model.image_newline"), r"it lacks model\.image_newline \[64\]"),
        ("internvl_chat", without("mm.model.mlp.3.weight"), r"it lacks mm\.model\.mlp\.3\.wei"),
        ("internvl_chat", without("v.blk.2.attn_k_norm.weight"), r"it lacks v\.blk\.2\.attn_k_no"),
        ("internvl_chat", number("clip.vision.preproc_min_tiles", 9), "preproc_min_tiles is 9 and"),
        ("internvl_chat", number("clip.vision.projector.scale_factor", 3), "image_size is 56, no"),
        (
            "llava",
            replaced("mm.2.weight", 32, 32),
            r"the tensor mm\.0\.weight is \[64, 32\], and by its keys \[32, 32\]",
        ),
        ("qwen2_vl", without("v.patch_embd.weight.1"), r"it lacks v\.patch_embd\.weight\.1 \["),
        ("qwen2_vl", number("clip.vision.spatial_merge_size", 3), r"mm\.0\.weight is \[128, 128\]"),
        ("qwen2_vl", said("clip.use_gelu", True, GGUFWriter.add_bool), "its activation is gelu; a"),
        ("qwen2_5_vl", without("clip.vision.n_wa_pattern"), "no key clip.vision.n_wa_pattern"),
        ("qwen2_5_vl", without("v.blk.0.ffn_gate.weight"), r"it lacks v\.blk\.0\.ffn_gate\.weight"),
    ],
)
def test_a_vision_part_that_is_not_whole_is_refused_by_key_or_tensor(
    family: str,
    change: Edit,
    why: str,
    checkpoints: dict[str, Path],
    pairs: dict[str, Path],
    tmp_path: Path,
) -> None:
    file = write_mmproj(tmp_path / "mmproj.gguf", checkpoints[family], PLAIN, change)
    with pytest.raises(InvalidRequest, match=rf"mmproj\.gguf cannot be used: .*{why}"):
        prepared_folder(pairs[family], str(file))


def other_sections(writer: GGUFWriter) -> None:
    writer.kv_data[0].pop("qwen2vl.rope.dimension_sections")
    writer.add_rope_dimension_sections([1, 1, 1, 0])


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (
            lambda files, pairs, at: (pairs["qwen2_vl"] / "model.gguf", files["llava"]),
            "no vision part of model.gguf: it stands before llama and qwen2, and model.gguf is 'qwen2vl'",
        ),
        (
            lambda files, pairs, at: (
                write_language(
                    at / "wide.gguf",
                    make_checkpoint(at / "wide", "llava", text={"hidden_size": 96}),
                ),
                files["llava"],
            ),
            "makes rows of 64 elements, and wide.gguf takes 96; give the right one, --mmproj FILE",
        ),
        (
            lambda files, pairs, at: (
                write_language(at / "turned.gguf", files["qwen2_vl"].parent, PLAIN, other_sections),
                files["qwen2_vl"],
            ),
            r"qwen2vl.rope.dimension_sections is \(1, 1, 1, 0\); pictures need how the freq",
        ),
    ],
    ids=["architecture", "size", "sections"],
)
def test_files_that_do_not_belong_together_are_refused(
    write: Callable[[dict[str, Path], dict[str, Path], Path], tuple[Path, Path]],
    why: str,
    checkpoints: dict[str, Path],
    pairs: dict[str, Path],
    tmp_path: Path,
) -> None:
    files = {}
    for family in ("llava", "qwen2_vl"):
        checkpoint = shutil.copytree(checkpoints[family], tmp_path / family)
        files[family] = write_mmproj(Path(checkpoint) / "eyes.gguf", Path(checkpoint))
    language, projector = write(files, pairs, tmp_path)
    with pytest.raises(InvalidRequest, match=why):
        prepared_folder(language, str(projector))


def test_a_vision_part_that_ends_early_is_refused_and_said_by_check(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = pair / "mmproj-model.gguf"
    whole = file.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 300, 3):
        file.write_bytes(whole[:length])
        with pytest.raises(InvalidRequest, match=r"mmproj-model\.gguf cannot be used"):
            prepared_folder(pair)
    assert check.main([str(pair)]) == 1
    assert "mmproj-model.gguf cannot be used" in capsys.readouterr().out
    assert check.main([str(pair), "--mmproj", "none"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out

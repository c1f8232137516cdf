"""Which family serves a checkpoint, and how an installed package brings one."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from services.families import generic, registry
from services.families.family import load_part
from services.families.molmo2 import FAMILY as molmo2_family
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from shared.model_config.decoder import refuse_quantization

ROOT = Path(__file__).parents[2]
RECORD = """
from services.families.family import Family
FAMILY = Family(
    architectures=("{architecture}",),
    text_types=("{text_type}",),
    decoder="novel_decoder:Decoder",
    config="services.families.llama.config:read",
)
"""


def checkpoint(folder: Path, **config: Any) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint(folder)


def installed(site: Path, package: str, architecture: str = "NovelForCausalLM") -> None:
    """A distribution in a folder as an installer leaves it, with the record of one family."""
    (site / f"{package}.py").write_text(RECORD.format(architecture=architecture, text_type=package))
    information = site / f"{package}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[tessera.families]\nnovel = {package}:FAMILY\n")


def test_every_family_has_all_that_its_record_names() -> None:
    families = registry.in_tree()
    assert families
    for family in families:
        parts = (family.prompt, family.encoder, family.decoder, family.config, family.sizes)
        assert all(load_part(name) for name in parts if name)
        assert bool(family.decoder) == bool(family.config) == bool(family.text_types)
        media = (family.prompt, family.encoder, family.sizes, family.encoder_tensors)
        assert {bool(part) for part in media} == {family.takes_media}
    served = [
        (name, family.config_keys)
        for family in families
        for name in (*family.architectures, *family.text_types)
    ]
    assert max(Counter(served).values()) == 1


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen2_vl",
        "qwen2_5_vl",
        "glm",
        "glm4",
        "chatglm",
        "internlm2",
        "qwen",
    ],
)
def test_a_checkpoint_without_model_type_has_its_own_decoder(tmp_path: Path, family: str) -> None:
    own = next(f for f in registry.in_tree() if family in f.text_types)
    found = checkpoint(tmp_path, architectures=list(own.architectures))
    assert registry.find_decoder(found) == registry.find(found) == own


def test_the_decoder_goes_by_the_text_model_and_the_encoder_by_the_architecture(
    tmp_path: Path,
) -> None:
    config = {"architectures": ["LlavaNextForConditionalGeneration"]}
    composite = checkpoint(tmp_path, **config, text_config={"model_type": "qwen3"})
    assert (
        registry.find(composite).encoder == "services.families.llava_next.encoder:LlavaNextEncoder"
    )
    assert registry.find_decoder(composite).architectures == ("Qwen3ForCausalLM",)
    unnamed = checkpoint(tmp_path, **config, text_config={"hidden_size": 64})
    assert registry.find_decoder(unnamed).architectures == ("LlamaForCausalLM",)


def test_an_installed_family_is_found_without_torch_and_the_tree_goes_first(
    tmp_path: Path,
) -> None:
    installed(tmp_path, "novel_model")
    (tmp_path / "other").mkdir()
    installed(tmp_path / "other", "novel_llama", "LlamaForCausalLM")
    (tmp_path / "model").mkdir()
    script = """
import json, sys
from pathlib import Path
from services.families import generic, registry
from shared.checkpoint.folder import Checkpoint
folder = Path(sys.argv[1])
for architecture in ("NovelForCausalLM", "LlamaForCausalLM"):
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    found = Checkpoint(folder)
    print(registry.find_decoder(found).decoder, registry.decoder_config(found).vocab_size)
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    paths = [tmp_path, tmp_path / "other", ROOT, ROOT / "protos"]
    said = subprocess.check_output(
        [sys.executable, "-c", script, str(tmp_path / "model")],
        env={"PYTHONPATH": ":".join(map(str, paths))},
        text=True,
    )
    assert said.splitlines() == [
        "novel_decoder:Decoder 32000",
        "services.decoder.models.llama:Llama 32000",
        "[]",
    ]


def test_two_packages_for_one_architecture_are_refused_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "first_novel")
    installed(tmp_path, "second_novel")
    monkeypatch.syspath_prepend(tmp_path)
    found = checkpoint(tmp_path, architectures=["NovelForCausalLM"])
    with pytest.raises(InvalidRequest, match=r"of the package first_novel and by .* second_novel"):
        registry.find(found)


def test_a_package_that_cannot_be_imported_is_named_where_nothing_else_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "broken_novel")
    (tmp_path / "broken_novel.py").write_text("import no_such_module_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.find(checkpoint(tmp_path, architectures=["LlamaForCausalLM"]))
    with pytest.raises(InvalidRequest, match=r"broken_novel.*no_such_module_anywhere"):
        registry.find(checkpoint(tmp_path, architectures=["NovelForCausalLM"]))


def test_a_named_family_goes_before_what_the_files_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = {"architectures": ["CompanyForCausalLM"], "model_type": "company"}
    tall = Checkpoint(checkpoint(tmp_path, **unknown, vision_config={}).folder, "qwen2_vl")
    assert registry.find(tall).architectures == ("Qwen2VLForConditionalGeneration",)
    assert registry.find_decoder(tall) is registry.find(tall)
    assert registry.find_decoder(tall, ModelBackend.TRANSFORMERS) is generic.GENERIC
    # A family without a decoder leaves that to the text model.
    checkpoint(tmp_path, **unknown, text_config={"model_type": "qwen3"})
    llava = Checkpoint(tmp_path, "llava")
    assert registry.find(llava).architectures == ("LlavaForConditionalGeneration",)
    assert registry.find_decoder(llava).architectures == ("Qwen3ForCausalLM",)
    # A package's, by the name of its entry point.
    installed(tmp_path, "first_novel")
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint(tmp_path, architectures=["LlamaForCausalLM"])
    assert registry.find(Checkpoint(tmp_path, "novel")).decoder == "novel_decoder:Decoder"


def test_a_family_that_there_is_not_is_refused_with_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Checkpoint(checkpoint(tmp_path, architectures=["LlamaForCausalLM"]).folder, "lava")
    with pytest.raises(InvalidRequest, match=r"--family lava: .* no such family; .*, llava, "):
        registry.find(found)
    installed(tmp_path, "first_novel")
    installed(tmp_path, "second_novel")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidRequest, match=r"--family novel is .*first_novel and .*second_novel"):
        registry.find(Checkpoint(tmp_path, "novel"))


def test_what_no_family_has_is_for_the_code_of_transformers(tmp_path: Path) -> None:
    novel = checkpoint(tmp_path, architectures=["Gemma2ForCausalLM"], model_type="gemma2")
    assert registry.find_decoder(novel) is generic.GENERIC
    with pytest.raises(InvalidRequest, match="Gemma2ForCausalLM cannot be served; these can"):
        registry.find_decoder(novel, ModelBackend.NATIVE)
    tower = checkpoint(
        tmp_path,
        architectures=["LlavaForConditionalGeneration"],
        text_config={"model_type": "gemma2"},
    )
    assert registry.find(tower).takes_media and registry.find_decoder(tower) is generic.GENERIC
    llama = checkpoint(tmp_path, architectures=["LlamaForCausalLM"], model_type="llama")
    assert registry.find_decoder(llama) is not generic.GENERIC
    assert registry.find_decoder(llama, ModelBackend.TRANSFORMERS) is generic.GENERIC
    # A class may be anything, whatever its configuration is called.
    other = checkpoint(tmp_path, architectures=["OtherForCausalLM"], model_type="llama")
    assert registry.find_decoder(other) is generic.GENERIC


def test_layers_that_are_known_may_have_another_head_or_none(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path, architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    assert not registry.is_for_vectors(whole)
    for name in ("Qwen3Model", "Qwen3ForSequenceClassification"):
        other = checkpoint(tmp_path, architectures=[name], model_type="qwen3")
        assert registry.find(other) is registry.find(whole)
        assert registry.find_decoder(other) is registry.find_decoder(whole)
        assert registry.is_for_vectors(other)
    for name in ("ChatGLMModel", "QWenLMHeadModel"):  # which generate, whatever they end with
        assert not registry.is_for_vectors(checkpoint(tmp_path, architectures=[name]))


@pytest.mark.parametrize("vision", ["vision_config", "vit_config"])
def test_molmo2_is_known_by_either_name_of_its_vision_part(tmp_path: Path, vision: str) -> None:
    molmo2 = checkpoint(
        tmp_path,
        architectures=["Molmo2ForConditionalGeneration"],
        text_config={"model_type": "molmo2_text"},
        **{vision: {"image_size": [56, 56]}},
    )
    assert registry.find(molmo2) is molmo2_family and molmo2_family.takes_media
    assert registry.find_decoder(molmo2) is generic.GENERIC
    with pytest.raises(InvalidRequest, match="molmo2_text"):
        registry.find_decoder(molmo2, ModelBackend.NATIVE)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["BertLMHeadModel"], "type_vocab_size": 2}, "it is an encoder"),
        ({"architectures": ["BertModel"]}, "no model that generates text"),
        ({"architectures": ["Gemma2ForSequenceClassification"]}, "no model that generates text"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "seq2seq"),
        ({"architectures": ["BartForCausalLM"], "encoder_layers": 2}, "decoder of a seq2seq"),
        ({"architectures": ["MambaForCausalLM"], "state_size": 16}, "recurrent.*state_size"),
        (
            {"architectures": ["Qwen3NextForCausalLM"], "layer_types": ["linear_attention"]},
            "it has layers of linear_attention",
        ),
        ({"architectures": ["NovelForCausalLM"]}, "transformers that is installed has no such"),
        (
            {
                "architectures": ["Gemma2ForCausalLM"],
                "quantization_config": {"quant_method": "hqq"},
            },
            "hqq: of quantized checkpoints those of",
        ),
    ],
)
def test_what_transformers_cannot_run_here_is_refused_by_config_json(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        registry.text_sizes(checkpoint(tmp_path, **config))


def test_codes_that_are_not_read_are_refused_for_what_transformers_runs_too(
    tmp_path: Path,
) -> None:
    experts = checkpoint(tmp_path, architectures=["Qwen3MoeForCausalLM"], num_experts=4)
    described = {"model.layers.0.mlp.experts.0.up_proj.weight": "W4A4_DYNAMIC"}
    (tmp_path / "quant_model_description.json").write_text(json.dumps(described))
    with pytest.raises(InvalidRequest, match=r"experts\.0\.up_proj\.weight is 'W4A4_DYNAMIC'"):
        registry.text_sizes(experts)


def test_an_encoder_that_is_quantized_by_itself_is_read_by_ours_alone(tmp_path: Path) -> None:
    said = {"quantization_config": {"quant_method": "fp8"}, "model_type": "siglip_vision_model"}
    found = checkpoint(
        tmp_path, architectures=["Gemma3ForConditionalGeneration"], vision_config=said
    )
    with pytest.raises(InvalidRequest, match=r"vision_config\.quantization_config says that the"):
        refuse_quantization(found, ModelBackend.TRANSFORMERS)
    refuse_quantization(found, ModelBackend.NATIVE)


@pytest.mark.parametrize("names", [{"architectures": ["DeepseekVLV2ForCausalLM"]}, {}])
def test_a_model_is_known_by_its_keys_and_not_by_its_text_model(
    tmp_path: Path, names: dict[str, Any]
) -> None:
    text = {"model_type": "deepseek_v2", "hidden_act": "gelu"}
    keys = {"projector_config": {}, "candidate_resolutions": [[384, 384]]}
    named = {"model_type": "deepseek_vl_v2", "auto_map": {"AutoConfig": "c.C"}, **names}
    known = checkpoint(tmp_path, language_config=text, **keys, **named)
    assert registry.find(known) is registry.find_decoder(known)
    assert registry.find(known).takes_media
    with pytest.raises(InvalidRequest, match=r"language_config\.hidden_act 'gelu'"):
        registry.text_sizes(known)
    with pytest.raises(InvalidRequest):
        registry.find(checkpoint(tmp_path, language_config=text, **named))


def test_code_of_the_checkpoint_is_run_only_if_it_is_trusted(tmp_path: Path) -> None:
    brought = {"auto_map": {"AutoModelForCausalLM": "modeling.Novel"}}
    novel = checkpoint(tmp_path, architectures=["NovelForCausalLM"], vocab_size=7, **brought)
    assert registry.text_sizes(novel).vocab_size == 7
    with pytest.raises(InvalidRequest, match="--trust-remote-code") as refused:
        generic.require_trusted(novel, False)
    assert refused.value.reason == "REMOTE_CODE"
    generic.require_trusted(novel, True)
    # What transformers has itself needs no trust.
    known = checkpoint(tmp_path, architectures=["Gemma2ForCausalLM"], **brought)
    generic.require_trusted(known, False)

"""The encoder of models without one of their own: rows of their transformers class, tensors of its half alone."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.families import registry
from services.families.check import Parts, require_servable
from services.families.family import ItemSize
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.generic import GenericEncoder
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import BadPixels, Item
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import SPAN_IDS, run_processor
from shared.errors import InvalidRequest
from tests.support.checkpoints import GENERIC, generic, load_reference, make_checkpoint
from tests.support.checkpoints.bitsandbytes import BitsAndBytes
from tests.support.checkpoints.coded import EVERY_LINEAR, write_layers
from tests.support.checkpoints.options import load_config
from tests.support.preprocess.service import picture

SIZES = [(28, 28), (100, 70), (31, 300), (640, 33), (250, 251)]
# The encoder, and the embedding table that its rows are of, inside the class's language part.
INSIDE: dict[str, tuple[str, ...]] = {"chameleon": ("model.vqmodel.", "model.embed_tokens.")}
LEVELS = {"qwen3_vl": 2}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> GenericEncoder:
    model = load_encoder(Checkpoint(folder), CpuDevice(dtype))
    assert isinstance(model, GenericEncoder)
    return model


def items_of(folder: Path) -> list[Item]:
    """What preprocess makes of random pictures."""
    processor: Any = generic.processor(folder)
    made = [
        run_processor(processor, [picture(*size, seed=i)], processor.image_token)
        for i, size in enumerate(SIZES)
    ]
    return [Item(generic.item_tensors(folder, one)) for one in made]


def reference_rows(folder: Path, item: Item) -> torch.Tensor:
    model: Any = load_reference(folder)
    if not hasattr(model, "get_image_features"):
        return attended_rows(model, item)
    known = inspect.signature(model.get_image_features).parameters
    tensors = {n: torch.from_numpy(values) for n, values in item.tensors.items() if n in known}
    with torch.inference_mode():
        made = model.get_image_features(**tensors, return_dict=True)

    def flat(rows: Any) -> torch.Tensor:
        parts = rows if isinstance(rows, list | tuple) else [rows]
        return torch.cat([part.flatten(0, -2) for part in parts])

    return torch.cat(
        [flat(rows) for rows in (made.pooler_output, *made.get("deepstack_features", ()))], 1
    )


def attended_rows(model: Any, item: Item) -> torch.Tensor:
    """What the language layers of a class are given of a picture to attend to."""
    given: dict[str, Any] = {}
    language = model.model.language_model
    language.register_forward_pre_hook(lambda _, __, named: given.update(named), with_kwargs=True)
    tensors = {name: torch.from_numpy(values) for name, values in item.tensors.items()}
    with torch.inference_mode():
        model(input_ids=torch.tensor([[model.config.image_token_id]]), **tensors)
    rows: torch.Tensor = given["cross_attention_states"].flatten(0, -2)
    return rows


@pytest.mark.parametrize("family", GENERIC)
def test_rows_are_those_of_the_class(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family)
    model, items = load(folder), items_of(folder)
    assert model.hidden_size == 64 * (1 + LEVELS.get(family, 0))
    together = model.encode(items)
    for item, rows in zip(items, together, strict=True):
        assert model.cost(item) > 0 and rows.shape[1] == model.hidden_size
        assert torch.equal(model.encode([item])[0], rows)
        if SPAN_IDS in item.tensors:  # separators take rows too: tests/families
            config = load_config(folder)
            placeholder = config.get("image_patch_id", config.get("image_token_id"))
            rows = rows[torch.from_numpy(item.tensors[SPAN_IDS] == placeholder)]
        torch.testing.assert_close(rows, reference_rows(folder, item), rtol=1e-5, atol=1e-5)
    assert model.encode([model.sample(ItemSize(224, 224))])[0].shape[1] == model.hidden_size
    with pytest.raises(BadPixels):
        model.cost(Item({}))


@pytest.mark.parametrize("family", GENERIC)
@pytest.mark.parametrize("tied", [False, True])
def test_only_its_own_tensors_are_loaded(family: str, tied: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, config={"tie_word_embeddings": tied})
    reference = load_reference(folder)
    language = {
        id(p)
        for part in (reference.get_decoder(), reference.get_output_embeddings())
        for p in part.parameters()
    }
    inside = INSIDE.get(family, ())
    expected = {
        name
        for name, p in reference.named_parameters()
        if id(p) not in language or name.startswith(inside)
    }
    found = dict(load(folder)._model.named_parameters())
    assert found.keys() == expected
    assert all(torch.equal(found[name], reference.get_parameter(name)) for name in found)


def test_bfloat16(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "idefics3")
    model, item = load(folder, torch.bfloat16), items_of(folder)[1]
    (rows,) = model.encode([item])
    expected = reference_rows(folder, item)
    assert rows.dtype == torch.bfloat16
    assert (rows.float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_an_encoder_that_does_not_fit_its_processor_is_refused_at_start(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "idefics3")
    settings = {"processor_class": "Idefics3Processor", "image_seq_len": 5}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    with pytest.raises(InvalidRequest, match="placeholders"):
        load(folder)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(tmp_path, "idefics3")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.connector.modality_projection.proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidRequest, match=r"lacks model\.connector\.modality_projection"):
        load(folder)


def test_a_record_may_override_how_rows_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, "idefics3")
    items = items_of(folder)
    plain = load(folder).encode(items)
    own = generic.with_overrides(
        "Idefics3ForConditionalGeneration",
        features="tests.support.checkpoints.generic:doubled_features",
    )
    monkeypatch.setattr(registry, "in_tree", lambda: (own,))
    for rows, before in zip(load(folder).encode(items), plain, strict=True):
        assert torch.equal(rows, 2 * before)


@pytest.mark.parametrize("family", ["mllama", pytest.param("idefics3", marks=pytest.mark.full)])
def test_layers_of_codes_are_their_numbers(tmp_path: Path, family: str) -> None:
    how = BitsAndBytes("nf4", nested=True, block=16)
    dense = make_checkpoint(tmp_path / "dense", family)
    numbers = write_layers(tmp_path / "coded", dense, how.stored, how.config(), EVERY_LINEAR)
    assert any("vision" in name for name in numbers)
    require_servable(tmp_path / "coded", parts=Parts.WEIGHTS, device="cpu")
    found, expected = (load(tmp_path / name) for name in ("coded", "dense"))
    item = expected.sample(ItemSize(64, 48))
    assert torch.equal(found.encode([item])[0], expected.encode([item])[0])

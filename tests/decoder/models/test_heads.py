"""Embedding and output matrix as transformers pairs them, whatever flags stand beside them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import LlamaConfig, LlamaForCausalLM

from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.models.generic.decoder import GenericDecoder
from services.families import registry
from services.families.family import load_part
from shared.checkpoint.folder import Checkpoint
from tests.support.checkpoints import load_reference, make_checkpoint

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def edited(folder: Path, top: bool | None, text: bool | None, without: str) -> Path:
    """Sets the flags of the whole and of its language part, and leaves a tensor out."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    for part, flag in ((config.get("text_config", config), text), (config, top)):
        part.pop("tie_word_embeddings", None)
        if flag is not None:
            part["tie_word_embeddings"] = flag
    path.write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    kept = {k: v for k, v in tensors.items() if not without or not k.endswith(without)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("family", "top", "text", "without", "warns"),
    [
        ("llava", True, False, "", True),
        ("llava", False, True, "", True),
        ("llava", True, None, "", True),
        ("llava", False, None, "", False),
        ("llava", False, True, HEAD, False),
        ("llava", True, False, HEAD, False),
        ("llava_next", True, False, "", True),
        ("llava_next", True, False, HEAD, False),
        ("qwen2_vl", False, True, HEAD, False),
        ("qwen2_vl", True, True, "", True),
        ("llama", True, True, "", True),
        ("llama", True, True, HEAD, False),
        ("llama", True, True, EMBEDDING, False),
    ],
)
def test_pairs_are_those_of_transformers(
    tmp_path: Path, family: str, top: bool | None, text: bool | None, without: str, warns: bool
) -> None:
    folder = edited(make_checkpoint(tmp_path, family), top, text, without)
    reference = load_reference(folder)
    checkpoint = Checkpoint(folder)
    with capture_logs() as logs:
        model_class = load_part(registry.find_decoder(checkpoint).decoder)
        model = model_class.load(checkpoint, CpuDevice(torch.float32).ops, 64)
    hidden = torch.randn(3, 64)
    ids = torch.tensor([5, 77, 301])
    with torch.no_grad():
        logits = reference.get_output_embeddings()(hidden)
        rows = reference.get_input_embeddings()(ids)
    torch.testing.assert_close(model.logits(hidden), logits)
    torch.testing.assert_close(model.embed(ids, [], []), rows)
    warnings = [line for line in logs if line["log_level"] == "warning"]
    assert bool(warnings) is warns
    assert all("lm_head.weight" in line["event"] for line in warnings)


def test_tokens_without_an_output_are_a_part_of_the_vocabulary_and_never_chosen() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **layers)).eval().requires_grad_(False)
    model.set_input_embeddings(torch.nn.Embedding(72, 32).requires_grad_(False))
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        decoder = GenericDecoder.checked(model, CpuDevice(torch.float32).ops)
        rows = decoder.embed(torch.tensor([63, 71]), [], [])
        logits, (chosen, _) = decoder.logits(rows), decoder.largest(rows)
    assert decoder.config.vocab_size == 72 and logits.shape == (2, 72)
    assert (logits[:, 64:] == float("-inf")).all() and logits[:, :64].isfinite().all()
    assert chosen.tolist() == logits.argmax(-1).tolist()

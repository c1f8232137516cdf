"""Every causal language model that transformers registers, in tiny: which of them its code runs over our cache."""

import copy
import re
import signal
import warnings
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.models.generic.attention import NotServed
from services.decoder.models.generic.decoder import GenericDecoder
from services.decoder.models.generic.linears.linear import pack_children
from services.decoder.models.generic.loading import require_served
from services.families import generic
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tests.support.model_table import REASONS
from tests.support.tiny_configs import tiny_config

# One of each kind of layers that the others do not have.
_KINDS = (
    "modernbert-decoder",  # its output matrix is called decoder
    "jetmoe",  # experts among its attention's matrices
    "diffllama",  # each layer attends twice
    "hrm_text",  # each layer runs several times
    "gemma3n_text",  # embeddings for each layer, keys and values of earlier layers
)
# Of a reason: names of keys, numbers, messages of other code.
_DETAILS = r" \(\w.* in config.json\)| by \S+ standard deviations.*|(?<=Error): .*"
_MOST_PARAMETERS = 20_000_000
_MOST_S = 60


def try_type(kind: str) -> tuple[str, str]:
    """A model type, and "served" or why it is not."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings(), _limited(_MOST_S):
        warnings.simplefilter("ignore")
        try:
            _build_and_compare(kind)
        except (InvalidRequest, NotServed) as error:
            said = str(error).rpartition("cannot be served: ")[2].partition("\n")[0]
            return kind, re.sub(_DETAILS, "", said)
        except Exception:
            return kind, "no small model of it can be built by the means of this test"
    return kind, "served"


def _build_and_compare(kind: str) -> None:
    config = tiny_config(CONFIG_MAPPING[kind])
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    model_class = getattr(transformers, name if isinstance(name, str) else name[0])
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    with torch.device("meta"):
        empty = model_class._from_config(config)
    if sum(parameter.numel() for parameter in empty.parameters()) > _MOST_PARAMETERS:
        raise ValueError("not tiny")
    model = model_class._from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * 0.15)
            else:
                parameter.add_(noise * 0.02)
    with TemporaryDirectory() as folder:
        config.architectures = [model_class.__name__]
        config.save_pretrained(folder)
        checkpoint = Checkpoint(Path(folder))
        generic.read(checkpoint)
        require_served(checkpoint, model_class, config)
    with torch.inference_mode():
        GenericDecoder.checked(model.eval(), CpuDevice(torch.float32, threads=1).ops)


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"over {seconds} s of processor time")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@pytest.mark.parametrize("kind", _KINDS)
def test_a_kind_of_layers_is_served(kind: str) -> None:
    _build_and_compare(kind)


def test_sparse_attention_is_refused_since_only_short_prompts_look_right() -> None:
    """While a prompt has no more tokens than a layer looks at, its logits are those of full attention."""
    prompt = torch.arange(23)[None] * 5 % 127 + 1
    found = {}
    for most in (4, 23, 512):
        torch.manual_seed(0)
        config = tiny_config(CONFIG_MAPPING["deepseek_v32"])
        config.index_topk = most
        model = transformers.DeepseekV32ForCausalLM._from_config(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
        with torch.inference_mode():
            found[most] = model(prompt, use_cache=False).logits[0]
    assert torch.equal(found[23], found[512])
    torch.testing.assert_close(found[4][:4], found[512][:4])
    assert (found[4][8:].argmax(-1) != found[512][8:].argmax(-1)).any()
    assert "indexed_attention" in try_type("deepseek_v32")[1]


def test_decoders_of_seq2seq_models_are_refused_since_they_need_an_encoder() -> None:
    config = tiny_config(CONFIG_MAPPING["whisper"])
    model = transformers.WhisperForCausalLM._from_config(config).eval()
    prompt = torch.arange(9)[None] + 3
    sound = torch.randn(1, 12, config.d_model, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        alone = model(prompt, use_cache=False).logits
        given = model(prompt, encoder_outputs=(sound,), use_cache=False).logits
    assert (alone - given).abs().max() > 0.1 * given.std()
    assert "seq2seq" in try_type("whisper")[1]


def test_layers_of_the_same_input_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries with keys and values, gates with what they gate: four products a layer, with the bits of seven."""
    ops, products = CpuDevice(torch.float32, threads=1).ops, 0
    config = tiny_config(CONFIG_MAPPING["qwen2"])
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM._from_config(config, dtype=torch.float32).eval()
    layer = copy.deepcopy(model.model.layers[0].mlp)
    x = torch.randn(1, 5, config.hidden_size)
    with torch.inference_mode():
        stacked = GenericDecoder(model, ops)._base.layers[0].mlp
        pack_children(layer, "", ops, {})
        linear = ops.linear

        def counted(rows: torch.Tensor, packed: Any) -> torch.Tensor:
            nonlocal products
            products += 1
            return linear(rows, packed)

        monkeypatch.setattr(ops, "linear", counted)
        expected, apart = layer(x), products
        assert torch.equal(stacked(x), expected)
    assert (apart, products - apart) == (3, 2)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_registered_type() -> None:
    """REASONS is the table of docs/models.md: which types are served, and why others are not."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found = dict(pool.map(try_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for kind in sorted(found):
        reasons[found[kind]].append(kind)
    lines = [f"{reason}: {' '.join(reasons[reason])}\n" for reason in sorted(reasons)]
    assert "".join(lines) == REASONS.read_text(encoding="utf-8")

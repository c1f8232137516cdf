"""Every causal language model that transformers registers, in tiny: which of them its code runs over our cache."""

import signal
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.models.generic.decoder import GenericDecoder
from services.decoder.models.generic.loading import require_served
from services.families import generic
from shared.checkpoint.folder import Checkpoint
from tests.support.tiny_configs import tiny_config

_SERVED = Path(__file__).with_name("generic_types.txt")
_MOST_PARAMETERS = 6_000_000
_MOST_S = 60


def try_type(kind: str) -> tuple[str, str]:
    """A model type, and why it is not served: nothing if it is."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings(), _limited(_MOST_S):
        warnings.simplefilter("ignore")
        try:
            _build_and_compare(kind)
        except Exception as error:
            return kind, f"{type(error).__name__}: {str(error)[:300]}"
    return kind, ""


def _build_and_compare(kind: str) -> None:
    config = tiny_config(CONFIG_MAPPING[kind])
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    model_class = getattr(transformers, name if isinstance(name, str) else name[0])
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
        raise TimeoutError(f"over {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_no_type_is_lost() -> None:
    """`generic_types.txt` lists those that are served; what is new is printed."""
    listed = set(_SERVED.read_text().split())
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        reasons = dict(pool.map(try_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    served = {kind for kind, reason in reasons.items() if not reason}
    for kind in sorted(reasons):
        print(f"{kind}: {reasons[kind] or 'served'}")
    if new := sorted(served - listed):
        print("served now; to be added to generic_types.txt:", *new)
    lost = {kind: reasons.get(kind, "no longer registered") for kind in listed - served}
    assert not lost, lost

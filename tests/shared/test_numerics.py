"""What decoders and encoders say of their bits."""

from collections.abc import Callable, Iterator

import pytest
import torch

from services.decoder.devices.cpu.device import CpuDevice
from services.vision_encoder.devices.cpu.device import CpuDevice as EncoderDevice
from shared import numerics
from shared.cpu_kernels import binding
from shared.cpu_kernels.arithmetic import ARITHMETIC_VERSION
from tests.support.decoder import instruction_sets

RUNNABLE = [known.name for known in instruction_sets.RUNNABLE]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Asks for an instruction set as a user does."""

    def ask(name: str) -> None:
        binding.load_kernels.cache_clear()
        monkeypatch.setenv("TESSERA_CPU_INSTRUCTIONS", name)

    yield ask
    binding.load_kernels.cache_clear()


@pytest.mark.parametrize("name", RUNNABLE)
def test_kernels_are_named_by_their_instructions_and_the_version_of_their_arithmetic(
    asked: Callable[[str], None], name: str
) -> None:
    asked(name)
    decoder, encoder = CpuDevice(torch.bfloat16), EncoderDevice(torch.bfloat16)
    known = next(each for each in instruction_sets.RUNNABLE if each.name == name)
    expected = f"{known.arithmetic.lower()}-{ARITHMETIC_VERSION}"
    assert decoder.numerics() == encoder.numerics(uses_ops=True) == expected
    assert CpuDevice(torch.float32, threads=2).numerics() == expected
    # Layers by modules of torch have its arithmetic as well.
    assert decoder.numerics(by_torch=True).startswith(f"{expected}/torch-")


def test_without_kernels_it_is_torchs(asked: Callable[[str], None]) -> None:
    asked("none")
    found = CpuDevice(torch.float32).numerics()
    assert found == CpuDevice(torch.float32).numerics(by_torch=True)
    version = torch.__version__.replace("+", "-")
    assert found == f"torch-{version}-{torch.backends.cpu.get_cpu_capability().lower()}"
    for dtype, uses_ops, varies in (
        (torch.float32, True, False),
        (torch.bfloat16, True, True),
        (torch.bfloat16, False, False),
    ):
        assert numerics.vary(EncoderDevice(dtype).numerics(uses_ops)) == varies


def test_a_request_has_those_of_its_decoder_and_of_its_encoders() -> None:
    gpu = numerics.of_accelerator("cuda", "NVIDIA H100+ 80GB HBM3")
    assert gpu == "cuda-nvidia-h100-80gb-hbm3"
    both = numerics.joined("avx2-1", numerics.varying(gpu))
    assert (numerics.of_decoder(both), numerics.of_encoder(both)) == ("avx2-1", f"{gpu}~")
    assert numerics.vary(numerics.of_encoder(both)) and not numerics.vary(gpu)
    text = numerics.joined("avx2-1", None)
    assert (text, numerics.of_decoder(text), numerics.of_encoder(text)) == ("avx2-1", "avx2-1", "")
    assert numerics.vary("")

"""A whole system on a GPU, where there is one."""

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.cuda.device import CudaDevice
from services.decoder.devices.cuda.ops import CudaOps
from services.decoder.loading.load import load
from services.decoder.steps.step import Step
from services.decoder.worker.worker import Worker
from shared.hardware.devices import cuda_fault
from shared.weights.linear_weight import as_codes
from tests.support.checkpoints import make_checkpoint
from tests.support.decoder.adapted_layer import NAMES, STACKED, Drawn, DrawnLayer, check_added
from tests.support.decoder.coded_weights import FORMS, Form
from tests.support.decoder.drafted_run import require_equal_with_drafts
from tests.support.decoder.mixed_samples import (
    KINDS,
    MASK,
    PENALTY,
    Kind,
    generate,
    require_each_as_alone,
    settings,
    tokens_of,
)
from tests.support.decoder.packs import require_packs_ask
from tests.support.processes.demo_question import ask, unseen
from tests.support.processes.system import System

needs_gpu = pytest.mark.skipif(bool(cuda_fault()), reason="there is no CUDA device here")


@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_picture_is_answered_from_a_gpu(dtype: str) -> None:
    with System(None, "--device", "cuda", "--dtype", dtype) as system:
        answer = ask(system.base_url)
        assert unseen(answer) == [], answer


@needs_gpu
def test_each_pack_on_a_gpu_asks_whether_weights_are_quantized() -> None:
    require_packs_ask(CudaDevice(torch.bfloat16).ops)


@needs_gpu
@pytest.mark.parametrize("name", ["int8", "int8g128", "int8-fast", "int4"])
def test_codes_that_are_made_at_load_are_computed_by_kernels_on_a_gpu(
    name: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "llama", "llama")
    told = settings(folder, "cuda").model_copy(update={"quantization": name, "dtype": "bfloat16"})
    with capture_logs() as logs:
        worker = load(told).worker
        tokens = tokens_of(generate(worker, {slot: {} for slot in range(3)}))
    events = [line["event"] for line in logs]
    assert "quantized weights" in events and not [e for e in events if "by torch alone" in e]
    assert tokens


@needs_gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_product_with_a_quantized_weight_on_a_gpu_is_that_of_the_reference(form: Form) -> None:
    weight = as_codes(form.make(64, 256), torch.linspace(-1, 1, 64))
    ops, plain = CudaDevice(torch.float32).ops, BaseOps(torch.device("cpu"), torch.float32)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    found = ops.linear(x.to(ops.device), ops.pack(weight)).cpu()
    torch.testing.assert_close(found, plain.linear(x, plain.pack(weight)), rtol=1e-4, atol=1e-4)


@needs_gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.float16, 0.01), (torch.bfloat16, 0.04)],
    ids=str,
)
@pytest.mark.parametrize("name", [*NAMES, *STACKED])
def test_a_gpu_adds_to_linear_layers_what_the_reference_adds(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    """One segment, and three that have rows in common."""
    layer, ops = DrawnLayer(), CudaOps(torch.device("cuda"), dtype)
    rows = [(0, 1, 4, 5, 6), (0, 3, 4, 9), (0, 5, 9, 11)]
    several = [Drawn.of(name, some, i, rank=4 + i) for i, some in enumerate(rows)]
    with torch.inference_mode():
        check_added(layer, ops, [Drawn.of(name, (0, 2, 4, 5, 6, 9), 0)], tolerance)
        check_added(layer, ops, several, tolerance)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    """Of a small decoder in float32."""
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
    return load(settings(folder, "cuda")).worker


@needs_gpu
@pytest.mark.parametrize("kinds", KINDS)
def test_masks_and_penalties_on_a_gpu_leave_the_others_in_the_step_as_they_are(
    on_gpu: Worker, kinds: list[Kind]
) -> None:
    require_each_as_alone(on_gpu, kinds)


@needs_gpu
@pytest.mark.parametrize("kind", [{}, MASK, PENALTY, {"temperature": 0.9}], ids=str)
def test_drafts_on_a_gpu_change_no_token(on_gpu: Worker, kind: Kind) -> None:
    require_equal_with_drafts(on_gpu, kind)


@needs_gpu
def test_graphs_on_a_gpu_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "llama", "llama")
    worker = load(settings(folder, "cuda").model_copy(update={"graphs": "on"})).worker
    graphs = worker.graphs
    assert graphs is not None
    replay, sizes = graphs.run, list[int]()

    def spy(step: Step) -> torch.Tensor:
        sizes.append(len(step.ids))
        return replay(step)

    monkeypatch.setattr(graphs, "run", spy)
    for count, size in ((1, 1), (3, 4)):
        kinds: dict[int, Kind] = {slot: {} for slot in range(count)}
        worker.graphs = graphs
        replayed = tokens_of(generate(worker, kinds))
        assert sizes == [size] * (len(replayed) - 1)  # all but the prompts
        worker.graphs = None
        assert tokens_of(generate(worker, kinds)) == replayed
        sizes.clear()

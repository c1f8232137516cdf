"""torch_npu's own sanitizer, which raises where streams use one tensor in no order, over the simulated device."""

import pytest

from tests.ascend.environment import npu_environment
from tests.ascend.support import run_new_python

_TWO_STREAMS = """
import torch, torch_npu
from torch_npu import npu

def double(in_order):
    x, side = torch.zeros(1024, device="npu"), npu.Stream()
    x.add_(1)
    if in_order:
        side.wait_stream(npu.current_stream())
    with npu.stream(side):
        y = x * 2
    npu.current_stream().wait_stream(side)
    y.record_stream(npu.current_stream())
    return y.sum().item()

print("in order:", double(True))
try:
    double(False)
except Exception as error:
    print("without order:", error)
"""


@pytest.mark.full
def test_streams_without_order_are_found() -> None:
    output = run_new_python(_TWO_STREAMS, npu_environment(sanitize=True))
    assert "in order: 2048.0" in output
    assert "without order: detected 1 errors" in output


@pytest.mark.full
@pytest.mark.parametrize("file", ["decoder/test_blocks.py", "decoder/test_steady_step.py"])
def test_steps_of_the_decoder_keep_their_streams_in_order(file: str) -> None:
    tests = ["-q", "-x", "-p", "no:cacheprovider", f"tests/ascend/{file}"]
    code = f"import pytest, sys; sys.exit(pytest.main({tests}))"
    assert "passed" in run_new_python(code, npu_environment(sanitize=True), timeout=280)

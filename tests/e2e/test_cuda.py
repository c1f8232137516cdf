"""A whole system on a GPU, where there is one."""

import pytest

from shared.devices import cuda_fault
from tests.support.processes.demo_question import ask, unseen
from tests.support.processes.system import System


@pytest.mark.skipif(bool(cuda_fault()), reason="there is no CUDA device here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_picture_is_answered_from_a_gpu(dtype: str) -> None:
    with System(None, "--device", "cuda", "--dtype", dtype) as system:
        answer = ask(system.base_url)
        assert unseen(answer) == [], answer

"""torch's ops on the simulated device give what they give on the CPU."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ascend.simulator import counters
from tests.ascend.simulator.errors import Refused
from tests.ascend.support import random


def causal_attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


X, W = random(6, 16, dtype=torch.float32), random(32, 16, seed=1, dtype=torch.float32)
CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w),
    "softmax": lambda x, w: (x @ w.t()).softmax(-1),
    "views": lambda x, w: x.view(2, 3, 16).transpose(0, 1).reshape(3, 32)[:, 1::3] + 1,
    "in place on a view": lambda x, w: x.clone().index_fill_(
        1, torch.tensor([2], device=x.device), 0.5
    ),
    "index_put": lambda x, w: x.clone().index_put_(
        (torch.tensor([0, 3], device=x.device),), x[1:3]
    ),
    "where and masks": lambda x, w: torch.where(x > 0, x, -x).masked_fill(x < -1, 2),
    "topk": lambda x, w: x.topk(3, -1).values,
    "sort and gather": lambda x, w: x.gather(1, x.argsort(-1)),
    "cumsum": lambda x, w: x.cumsum(-1),
    "cat and chunk": lambda x, w: torch.cat(x.chunk(3, 0), 1),
    "embedding": lambda x, w: F.embedding(torch.tensor([[1, 5]], device=x.device), w),
    "layer_norm": lambda x, w: F.layer_norm(x, (16,)),
    "conv2d": lambda x, w: F.conv2d(x.view(1, 1, 8, 12), w.view(32, 1, 4, 4)),
    "attention": lambda x, w: causal_attention(x.view(1, 2, 3, 16)),
    "float16": lambda x, w: (x.half() @ w.half().t()).float(),
    "dtype and strides change": lambda x, w: x.t().to(torch.bfloat16).float(),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_cpu(name: str) -> None:
    expected = CASES[name](X, W)
    found = CASES[name](X.to("npu"), W.to("npu"))
    assert found.device.type == "npu"
    torch.testing.assert_close(found.cpu(), expected)


def test_a_module_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    monkeypatch.setattr(
        torch.backends.mha, "get_fastpath_enabled", lambda: False
    )  # one op without a kernel
    with torch.inference_mode():
        expected = layer(X[None])
        found = layer.to("npu")(X[None].to("npu"))
    torch.testing.assert_close(found.cpu(), expected)


def test_a_tensor_of_the_cpu_among_arguments_is_refused() -> None:
    with pytest.raises((Refused, RuntimeError), match="device"):
        torch.ones(4, device="npu") + torch.ones(4)


def test_nine_dimensions_are_refused() -> None:
    with pytest.raises(Refused, match="dimensions"):
        torch.ones(1, 1, 1, 1, 1, 1, 1, 1, 2, device="npu").add(1)


@pytest.mark.finds_faults
def test_an_op_without_a_kernel_is_counted() -> None:
    torch.special.i1(torch.ones(4, device="npu"))
    assert dict(counters.fallbacks) == {"special_i1": 1}

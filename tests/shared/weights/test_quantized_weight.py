"""Weights as codes: what they mean, and that cuts, stacks and orders of them are those of their numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shared.errors import InvalidRequest
from shared.weights.linear_weight import (
    LinearWeight,
    StackedWeight,
    as_codes,
    in_memory,
)
from shared.weights.quantized_weight import QuantizedWeight
from shared.weights.stacked_codes import require_alike
from tests.support.decoder.coded_weights import FORMS, Form

OUT, INPUTS = 24, 384

# What models do to a weight before they pack it.
CHANGES: dict[str, Callable[[LinearWeight], LinearWeight]] = {
    "as it is": lambda weight: weight,
    "outputs": lambda weight: weight.shard("out", [(2, 5), (20, 24)]),
    "reordered": lambda weight: weight.reordered([*range(7, 24), *range(7)]),
    "spread outputs": lambda weight: weight.spread("out", range(3, 27), 30),
    # By powers of two, which no rounding tells from numbers that were scaled first.
    "scaled": lambda weight: weight.scaled(torch.tensor([0.5, 1.0, 4.0] * 8)).shard(
        "out", [(1, 9)]
    ),
    "stacked": lambda weight: StackedWeight([weight, weight.shard("out", [(4, 9)])]),
    "a rank's gates and ups": lambda weight: StackedWeight([weight, weight]).shard(
        "out", [(12, 24), (36, 48)]
    ),
    "stacked, reordered, cut, spread": lambda weight: (
        StackedWeight([weight, weight.reordered(list(reversed(range(24))))])
        .reordered([*range(30, 48), *range(30)])
        .shard("out", [(3, 9), (40, 44)])
        .spread("out", [0, 1, 2, 4, 5, 6, 7, 8, 11, 12], 13)
    ),
}
# Inputs are cut at borders of groups: of 128 columns each of 32, 64 or 128 has one.
OF_INPUTS: dict[str, Callable[[LinearWeight], LinearWeight]] = {
    "a rank's inputs": lambda weight: weight.shard("in", [(128, 384)]),
    "inputs in another order": lambda weight: weight.shard("in", [(256, 384), (0, 128)]),
    "a cut of a cut": lambda weight: (
        weight.shard("in", [(0, 256)]).shard("out", [(1, 9)]).shard("in", [(128, 256)])
    ),
}
SPREAD: dict[str, Callable[[LinearWeight], LinearWeight]] = {
    # Heads of 48 in heads of 64, each half at the begin of a half; groups are torn apart.
    "heads": lambda weight: weight.spread(
        "in", [s + i for s in range(0, 512, 32) for i in range(24)], 512
    ),
    # In the place of every other group of 128.
    "groups": lambda weight: weight.spread(
        "in", [s + i for s in range(0, 768, 256) for i in range(128)], 768
    ),
    "a rank's heads": lambda weight: weight.shard("in", [(0, 128)]).spread(
        "in", [s + i for s in range(0, 256, 64) for i in range(32)], 256
    ),
}


def require_equal(weight: LinearWeight) -> QuantizedWeight:
    """The codes are those of the numbers, bit for bit, in each type."""
    found = weight.quantized()
    assert found is not None and (len(found.scales), found.inputs) == (weight.out, weight.inputs)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours, theirs = found.dequantize(dtype), weight.dense(dtype)
        assert torch.equal(ours, theirs)
        assert torch.equal(ours.signbit(), theirs.signbit())
    return found


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_codes_are_numbers_as_the_formula_says(form: Form) -> None:
    weight = form.make(5, 160)
    found = weight.dequantize(torch.float32)
    column = list(range(160)) if weight.order is None else weight.order.tolist()
    for row, place in ((0, 0), (1, 31), (2, 32), (3, 100), (4, 159)):
        code = weight.unpacked()[row, place].item()
        group = place // form.group if form.group else 0
        scale = weight.scales[row, group].float()
        if weight.factors is not None:
            scale = scale * weight.factors[row, group].float()
        if weight.codebook is not None:
            value = torch.tensor(float(weight.codebook[int(code)])) * scale
        elif weight.minima is not None:
            least = weight.minima[row, group].float()
            if weight.minimum_factors is not None:
                least = least * weight.minimum_factors[row, group].float()
            value = torch.tensor(float(code)) * scale + least
        else:
            zero = 2 ** (form.bits - 1) if weight.zeros is None else weight.zeros[row, group].item()
            value = torch.tensor(float(code - zero)) * scale
        assert found[row, column[place]] == value


def test_of_four_bits_the_even_column_is_the_lower_half() -> None:
    codes = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)
    weight = QuantizedWeight(codes, torch.ones(1, 1), 4, 0)
    assert weight.unpacked().tolist() == [[1, 2, 3, 4]]
    assert weight.dequantize(torch.float32).tolist() == [[-7.0, -6.0, -5.0, -4.0]]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_codes_survive_what_models_do_to_outputs(form: Form, change: str) -> None:
    codes = form.make(OUT, INPUTS)
    weight = CHANGES[change](as_codes(codes, torch.arange(float(OUT))))
    found = require_equal(weight)
    assert (found.bits, found.group) == (form.bits, form.group)
    assert found.codes.nbytes == weight.out * codes.codes.shape[1]
    dense = CHANGES[change](in_memory(codes.dequantize(torch.float32), torch.arange(float(OUT))))
    assert torch.equal(dense.dense(torch.float32), weight.dense(torch.float32))
    assert dense.bias is not None and weight.bias is not None
    assert torch.equal(dense.bias, weight.bias)


@pytest.mark.parametrize("form", [form for form in FORMS if not form.order], ids=str)
@pytest.mark.parametrize("change", OF_INPUTS)
def test_codes_survive_cuts_of_inputs_between_groups(form: Form, change: str) -> None:
    codes = form.make(OUT, INPUTS)
    weight = OF_INPUTS[change](as_codes(codes))
    found = require_equal(weight)
    assert (found.group, found.order) == (form.group, None)
    dense = OF_INPUTS[change](in_memory(codes.dequantize(torch.float32)))
    assert torch.equal(dense.dense(torch.float32), weight.dense(torch.float32))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("change", SPREAD)
def test_inputs_of_zeros_come_between_those_of_codes(form: Form, change: str) -> None:
    if form.order and change == "a rank's heads":
        pytest.skip("a cut that is refused")
    codes = form.make(OUT, INPUTS)
    weight = SPREAD[change](as_codes(codes))
    require_equal(weight)
    dense = SPREAD[change](in_memory(codes.dequantize(torch.float32)))
    assert torch.equal(dense.dense(torch.float32), weight.dense(torch.float32))


def test_an_order_is_kept_by_cuts_of_outputs_and_undone_by_whole_rows() -> None:
    form = Form(group=0, order=True)
    weight = as_codes(form.make(OUT, INPUTS))
    assert require_equal(weight.shard("out", [(3, 9)])).order is not None
    assert require_equal(weight.shard("in", [(3, 9)])).order is None


@pytest.mark.parametrize(
    "form, ranges",
    [
        (Form(group=128), [(0, 192)]),
        (Form(group=128), [(64, 192)]),
        (Form(group=32, zeros=True), [(0, 32), (48, 80)]),
        (Form(bits=4, group=128, zeros=True), [(96, 384)]),
        (Form(bits=4, group=32, order=True), [(0, 192)]),
        (Form(bits=8, group=64, order=True), [(7, 90), (200, 203)]),
    ],
    ids=str,
)
def test_a_cut_inside_a_group_makes_smaller_groups(
    form: Form, ranges: list[tuple[int, int]]
) -> None:
    weight = as_codes(form.make(OUT, INPUTS))
    cut = require_equal(weight.shard("in", ranges))
    assert cut.inputs == sum(last - first for first, last in ranges)
    require_equal(weight.shard("in", ranges).shard("out", [(3, 9)]))


@pytest.mark.parametrize(
    "form, ranges",
    [
        (Form(group=128), [(0, 200)]),
        (Form(group=32, zeros=True), [(0, 32), (56, 88)]),
        (Form(bits=4, group=32), [(24, 192)]),
    ],
    ids=str,
)
def test_a_cut_that_no_groups_allow_is_refused(form: Form, ranges: list[tuple[int, int]]) -> None:
    codes = form.make(OUT, INPUTS)
    weight = as_codes(codes, name="layers.3.mlp.down_proj").shard("in", ranges)
    said = rf"layers\.3\.mlp\.down_proj .* inputs are cut inside a group of {form.group} "
    with pytest.raises(InvalidRequest, match=said):
        weight.quantized()


def test_what_has_no_code_for_zero_is_not_filled_up() -> None:
    form = Form(bits=4, group=32, minima=True)
    weight = as_codes(form.make(OUT, 80), name="w")  # the last group is half a one
    with pytest.raises(InvalidRequest, match="has no code for zero"):
        weight.spread("in", range(80), 96).quantized()
    beyond = Form(bits=4, zeros=True).make(4, 8)
    assert beyond.zeros is not None
    beyond.zeros[0, 0] = 16
    require_equal(as_codes(beyond).spread("in", range(8), 12))


def test_layers_that_are_one_get_one_form() -> None:
    """Which is exact; only minima that are made are rounded, to float32."""
    forms = [form for form in FORMS if not form.order]
    for first in forms:
        for second in forms:
            parts = [form.make(24, 128, seed) for seed, form in enumerate((first, second))]
            weight = StackedWeight([as_codes(part) for part in parts])
            found, read = weight.quantized(), weight.codes()
            assert found is not None and read is not None
            # Read in parts, of which some have outputs of one layer alone, it has the same form.
            for rows in np.array_split(np.arange(48), 5):
                some = read(rows)
                require_alike(found, some)
                expected = found.dequantize(torch.float32)[torch.from_numpy(rows)]
                assert torch.equal(some.dequantize(torch.float32), expected)
            expected = torch.cat([part.dequantize(torch.float32) for part in parts])
            if first.minima == second.minima:
                assert torch.equal(found.dequantize(torch.float32), expected)
            else:
                assert torch.allclose(found.dequantize(torch.float32), expected, atol=1e-6)


def test_layers_that_are_one_need_one_order() -> None:
    plain = Form(group=32).make(4, 64)
    ordered, other = (Form(group=32, order=True).make(4, 64, seed) for seed in (0, 1))
    zeros = replace(ordered, zeros=torch.full((4, 2), 7, dtype=torch.uint8))
    dense = in_memory(torch.randn(4, 64), name="b")
    for parts, said in (
        ([as_codes(plain, name="a"), dense], "a [+] b .* some are quantized and some are not"),
        ([as_codes(ordered), as_codes(zeros)], "in different ways"),
        ([as_codes(plain), as_codes(ordered)], "in different orders"),
        ([as_codes(ordered), as_codes(other)], "in different orders"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            StackedWeight(parts).quantized()
    require_equal(StackedWeight([as_codes(ordered), as_codes(ordered)]))
    half = Form(group=32, scales=torch.float16).make(4, 64)
    assert require_equal(StackedWeight([as_codes(plain), as_codes(half)])).group == 32


def test_codes_that_do_not_fit_their_scales_are_no_weight() -> None:
    codes = torch.zeros((4, 64), dtype=torch.uint8)
    wrong: tuple[dict[str, Any], ...] = (
        {"scales": torch.ones(4, 2), "bits": 8, "group": 0},
        {"scales": torch.ones(4, 1), "bits": 8, "group": 32},
        {"scales": torch.ones(4, 2), "bits": 8, "group": 32, "zeros": torch.ones(4, 1)},
        {"scales": torch.ones(4, 1), "bits": 3, "group": 0},
        {
            "scales": torch.ones(4, 1),
            "bits": 8,
            "group": 0,
            "minima": torch.ones(4, 1),
            "codebook": tuple(range(256)),
        },
    )
    for arguments in wrong:
        with pytest.raises(ValueError):
            QuantizedWeight(codes, **arguments)

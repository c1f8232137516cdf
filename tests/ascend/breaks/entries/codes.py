"""Products with weights of codes, and how these are packed."""

from functools import partial

from tests.ascend.breaks.fault import DECODER, Break

_OF_FORM = "decoder/test_codes.py::test_products_are_those_of_the_reference"
_PRODUCTS = (
    f"{_OF_FORM}[int4-g32-float16-zeros-torch.float16]",
    f"{_OF_FORM}[int4-g32-float16-order-torch.float16]",
    f"{_OF_FORM}[int8-g32-float32-torch.bfloat16]",
)
_WIDE = ("decoder/test_codes.py::test_a_wide_matrix_is_multiplied_in_pieces",)
_TOLD = ("decoder/test_codes.py::test_an_operator_that_gives_other_products_is_not_taken",)
_SAID = (
    "decoder/test_codes.py::test_what_an_operator_does_not_take_becomes_numbers_and_is_said_once",
)
_PARTS = ("decoder/test_codes.py::test_no_more_than_a_part_is_read_at_once",)
_WHOLE = (
    "decoder/test_ascend_checkpoints.py::test_activations_have_the_bits_that_compressed_tensors_says",
)
_FIXED = ("decoder/test_codes.py::test_activations_have_the_step_of_the_checkpoint",)
_OTHER_STEPS = (
    "decoder/test_codes.py::test_of_layers_with_other_steps_each_token_has_its_own",
    "decoder/test_codes.py::test_fixed_steps_that_an_operator_takes_otherwise_are_not_taken",
)
_NARROW = (
    "decoder/test_ascend_checkpoints.py::test_codes_of_4_bits_are_packed_with_the_scales_of_their_groups",
)
_linear = partial(Break, file=f"{DECODER}/devices/npu/weights/coded_linear.py")
_telling = partial(Break, file=f"{DECODER}/devices/npu/trials/telling_codes.py")
_reader = partial(Break, file="shared/weights/readers/ascend.py")
_ops = partial(Break, file=f"{DECODER}/devices/npu/ops.py")

BREAKS = [
    _linear(
        reason="zero points are added to codes",
        old="offsets.append(2 ** (part.bits - 1) - part.zeros.to(dtype))",
        new="offsets.append(part.zeros.to(dtype) - 2 ** (part.bits - 1))",
        tests=_PRODUCTS,
    ),
    _linear(
        reason="codes of 4 bits begin at -7",
        old="return part.unpacked().view(torch.int8) - 8",
        new="return part.unpacked().view(torch.int8) - 7",
        tests=_PRODUCTS,
    ),
    _linear(
        reason="inputs of codes are taken as they come",
        old="        x = x.index_select(1, packed.order)\n",
        new="        pass\n",
        tests=_PRODUCTS,
    ),
    _linear(
        reason="groups of inputs with one scale are not named",
        old="        antiquant_group_size=piece.group,\n",
        new="",
        tests=_PRODUCTS,
    ),
    _linear(
        reason="a bias of codes has the type of activations",
        old="return torch.float32 if form == WHOLE or dtype == torch.bfloat16 else dtype",
        new="return dtype",
        tests=_PRODUCTS,
    ),
    _linear(
        reason="every piece of a wide matrix has the first one's outputs",
        old="        first += size\n",
        new="",
        tests=_WIDE,
    ),
    _linear(
        reason="scales of whole numbers have 16 bits",
        old="return scales[:, 0].float().contiguous()",
        new="return scales[:, 0].to(dtype).contiguous()",
        tests=_WHOLE,
    ),
    _linear(
        reason="activations of all rows have one step",
        old="            pertoken_scale=steps,\n",
        new="            pertoken_scale=steps.mean().expand(len(x)).contiguous(),\n",
        tests=_WHOLE,
    ),
    _linear(
        reason="all of a matrix of codes is read at once",
        old="yield np.arange(start, min(start + each, first + size))",
        new="yield np.arange(start, first + size)\n        return",
        tests=_PARTS,
    ),
    _linear(
        reason="the zero of activations is not taken away",
        old="    return (own - zero * sums).clamp(",
        new="    return own.clamp(",
        tests=_FIXED,
    ),
    _linear(
        reason="a bias in steps of products is one in steps of weights",
        old="bias.double() / scales.double()).round()",
        new="bias.double() / scales.double().sqrt()).round()",
        tests=_FIXED,
    ),
    _linear(
        reason="activations with one step are not divided by it",
        old="steps, zeros, torch.qint8, 1, True)",
        new="steps, zeros, torch.qint8, 1, False)",
        tests=_FIXED,
    ),
    _linear(
        reason="scales of products in float16 are given as they are of others",
        old="    if dtype == torch.bfloat16:",
        new="    if dtype == torch.float16:",
        tests=_FIXED,
    ),
    _linear(
        reason="layers with other steps have those of the first",
        old="    fixed = activations == 8 and part.fixed is not None",
        new="    fixed = activations == 8",
        tests=_OTHER_STEPS,
    ),
    _reader(
        reason="of two codes of msmodelslim in a byte the upper one is first",
        old="torch.stack((stored << 4 >> 4, stored >> 4), 1)",
        new="torch.stack((stored >> 4, stored << 4 >> 4), 1)",
        tests=_NARROW,
    ),
    _reader(
        reason="scales of groups of W4A8 are not multiplied with those of outputs",
        old="scales = scales * _finite(",
        new="scales = _finite(",
        tests=_NARROW,
    ),
    _telling(
        reason="a form of codes is taken whatever it gives",
        old="    return worst, most",
        new="    return 0.0, most",
        tests=_TOLD,
    ),
    _ops(
        reason="nobody is told that codes have become numbers",
        old='            log.warning(f"quantized weights become {kind}"',
        new='            log.debug(f"quantized weights are {kind}"',
        tests=_SAID,
    ),
]

"""Keys and values of 8 bits: how they are made, called, moved and turned back into numbers."""

from functools import partial

from tests.ascend.breaks.fault import DECODER, Break

_FILE = "decoder/test_coded_cache.py"
_NEARLY = (f"{_FILE}::test_codes_say_nearly_what_numbers_say",)
_BIASES = (f"{_FILE}::test_codes_say_nearly_what_numbers_say[80-200.0-torch.float16]",)
_ASKED = (f"{_FILE}::test_attention_with_what_some_models_ask_for",)
_MOVED = (f"{_FILE}::test_a_token_has_its_codes_in_pieces_after_moves_and_by_export",)
_SCRUBBED = (f"{_FILE}::test_scrubbed_tokens_have_no_scale",)
_REFUSED = (f"{_FILE}::test_where_no_form_is_right_the_flag_is_refused",)
_SECOND = (f"{_FILE}::test_the_second_form_is_taken_where_the_first_is_wrong",)
_ROUNDED = (f"{_FILE}::test_an_operator_that_rounds_otherwise_is_told",)
_WRITTEN = (f"{_FILE}::test_codes_are_written_by_an_operator_that_is_right_for_them",)
_GRAPHS = (
    "decoder/test_served_cache.py::test_a_decoder_of_codes_says_what_transformers_says[graphs]",
)
_BYTES = (
    "decoder/test_served_cache.py::test_a_cache_of_codes_has_another_fingerprint_and_more_tokens",
)
_ops = partial(Break, file=f"{DECODER}/devices/npu/ops.py")
_cache = partial(Break, file=f"{DECODER}/devices/npu/attention/coded_cache.py")
_attention = partial(Break, file=f"{DECODER}/devices/npu/attention/coded_attention.py")
_telling = partial(Break, file=f"{DECODER}/devices/npu/trials/telling_rows.py")

BREAKS = [
    _attention(
        reason="scales of codes are said to be of each element",
        old="_PER_TOKEN_AND_HEAD = 5",
        new="_PER_TOKEN_AND_HEAD = 0",
        tests=_NEARLY,
    ),
    _attention(
        reason="values of 8 bits have the scales of keys",
        old="value_antiquant_scale=kv.v_scales,",
        new="value_antiquant_scale=kv.k_scales,",
        tests=_NEARLY,
    ),
    _attention(
        reason="beside single queries others attend to nothing",
        old="    if alone == meta.n:",
        new="    if alone:",
        tests=_NEARLY,
    ),
    _attention(
        reason="single queries see past their window",
        old="    if all(value is None for value in others.values()) and not meta.bidirectional:",
        new="    if not meta.bidirectional:",
        tests=_ASKED,
    ),
    _attention(
        reason="one block that a window shows is left out",
        old="        one = (row, hidden // block_size, -(-length // block_size))",
        new="        one = (row, -(-hidden // block_size), -(-length // block_size))",
        tests=_ASKED,
    ),
    _attention(
        reason="spans of a row are those of the row before it",
        old="            if other == row and high > hidden",
        new="            if other == row - 1 and high > hidden",
        tests=_ASKED,
    ),
    _attention(
        reason="rows that attend together have one table",
        old="        begin, hidden = sum(widths[:place]), first * ops.block_size",
        new="        begin, hidden = 0, first * ops.block_size",
        tests=_NEARLY,
    ),
    _attention(
        reason="where no form attends to codes the first one does",
        old="    if form is None:\n        raise kv_cache_dtype.refused(",
        new="    if form is None:\n        return BSND\n        raise kv_cache_dtype.refused(",
        tests=_REFUSED,
    ),
    _attention(
        reason="both layouts of codes are called alike",
        old="    axis = 1 if form == BSND else 2",
        new="    axis = 1",
        tests=_SECOND,
    ),
    _attention(
        reason="codes are not compared with what was written",
        old="        if not bool((off <= 0).all()):",
        new="        if off is None:",
        tests=_ROUNDED,
    ),
    _cache(
        reason="an element of two digits has the lower one alone",
        old="        return codes + _BASE * high",
        new="        return codes",
        tests=_BIASES,
    ),
    _cache(
        reason="queries meet upper digits as they meet lower ones",
        old="elements.expand(len(q), -1, -1)) * _BASE",
        new="elements.expand(len(q), -1, -1))",
        tests=_BIASES,
    ),
    _cache(
        reason="queries of a group meet the digits of other heads",
        old="self.elements.repeat_interleave(share, 0)",
        new="self.elements.flip(0).repeat_interleave(share, 0)",
        tests=_BIASES,
    ),
    _cache(
        reason="a large element decides the scale of the others",
        old="upper.of_elements(wide).abs().amax(-1) / (_LARGEST * _BASE)",
        new="upper.of_elements(wide).abs().amax(-1) / _LARGEST",
        tests=_BIASES,
    ),
    _cache(
        reason="scales lie by tokens and not by heads",
        old="first = slots + slots // block_size * (block_size * (num_kv - 1))",
        new="first = slots",
        tests=_NEARLY,
    ),
    _cache(
        reason="scales stay where codes are moved away",
        old="        return [(self.k, self.v), (self.k_scales, self.v_scales)]",
        new="        return [(self.k, self.v)]",
        tests=_MOVED,
    ),
    _cache(
        reason="blocks go out without upper digits",
        old="        digits = self.k[block, ..., self.size : self.size + self.upper.count]",
        new="        return keys, values\n        digits = self.k[block, ..., self.size :]",
        tests=_MOVED,
    ),
    _cache(
        reason="scales come in as they lie in the bytes",
        old="            scales[block] = stored[..., 0].T",
        new="            scales[block] = stored[..., 0].reshape(scales[block].shape)",
        tests=_MOVED,
    ),
    _cache(
        reason="bytes of a block of codes are counted without scales",
        old="(coded_width(spec) + _SCALE.itemsize)",
        new="coded_width(spec)",
        tests=_BYTES,
    ),
    Break(
        reason="memory for the numbers of the longest sequence is not left",
        file=f"{DECODER}/loading/profile_run.py",
        old="Profile(step_bytes + longest,",
        new="Profile(step_bytes,",
        tests=(
            "decoder/test_served_cache.py::test_memory_is_left_for_the_numbers_of_the_longest_sequence",
        ),
    ),
    _ops(
        reason="scales of tokens that are scrubbed stay",
        old="        if isinstance(kv, CodedKV):\n            places = kv.places(slots)",
        new="        if isinstance(kv, int):\n            places = kv.places(slots)",
        tests=_SCRUBBED,
    ),
    _ops(
        reason="a graph writes scales where those of its capture were",
        old="{' in a graph' if captured else ''}",
        new="",
        tests=_GRAPHS,
    ),
    _ops(
        reason="codes are written by what is right for numbers",
        old="coded=isinstance(kv, CodedKV))\n        form",
        new="coded=False)\n        form",
        tests=_WRITTEN,
    ),
    _telling(
        reason="writing codes is tried with numbers",
        old="ops.dtype, coded=asked.coded)\n    dtype = torch.int8 if asked.coded else ops.dtype",
        new="ops.dtype)\n    dtype = ops.dtype",
        tests=_WRITTEN,
    ),
]

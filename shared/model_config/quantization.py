"""How the linear layers of a checkpoint are stored as codes, read from `quantization_config`. Without torch.

Fields: AutoAWQ (https://github.com/casper-hansen/AutoAWQ), AutoGPTQ and GPTQModel
(https://github.com/ModelCloud/GPTQModel), compressed-tensors (https://github.com/vllm-project/compressed-tensors),
"fp8" as DeepSeek-V3 and Qwen3-FP8 have it, and "fbgemm_fp8" (FineGrainedFP8Config and FbgemmFp8Config of
https://github.com/huggingface/transformers), bitsandbytes (https://github.com/bitsandbytes-foundation/bitsandbytes),
AutoRound (https://github.com/intel/auto-round), Model Optimizer (https://github.com/NVIDIA/Model-Optimizer).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shared.checkpoint.folder import QUANTIZATION_KEYS, Checkpoint
from shared.errors import InvalidRequest
from shared.model_config.ascend_codes import (
    DYNAMIC,
    KINDS,
    NARROW,
    NUMBERS,
    STATIC,
    find_description,
    read_description,
)
from shared.text.cutting import cut

GGUF, AWQ, GPTQ, PACKED, BYTES = "gguf", "awq", "gptq", "pack-quantized", "int-quantized"
ASCEND = "ascend"
FLOAT8 = "float-quantized"
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
MODELOPT4 = "modelopt-nvfp4"
BNB4, BNB8 = "bitsandbytes-4bit", "bitsandbytes-8bit"
_COMPRESSED = "compressed-tensors"
# How scales are shared in these, and by how many inputs.
_FLOAT4 = {NVFP4: ("tensor_group", 16), MXFP4: ("group", 32)}
_FP8, _FBGEMM = "fp8", "fbgemm_fp8"
_BNB = "bitsandbytes"
_AUTO_ROUND = "auto-round"
_MODELOPT = "modelopt"


@dataclass(frozen=True)
class StoredCodes:
    """`layout`: AWQ, GPTQ, one of compressed-tensors', of bitsandbytes', or FLOAT8; `bits` of a code; `group`: inputs
    that share a scale, 0 for all of an output's; `symmetric`: zero is the code in the middle; `zero_shift`: what is
    added to stored zero points; `ordered`: which group an input belongs to is stored; `one_scale`: all outputs share
    it; `left_out`: layers that are numbers, by their names, with AWQ, GPTQ and fp8 by parts of them; `block`: outputs
    and inputs that share a scale of FLOAT8; `inverse_name`: its scales are called weight_scale_inv; `activations`: bits
    in which these are wanted, 8 or 16; `whole`: layers of ASCEND that want 8, by their names; `narrow`: those with
    codes of 4 bits; `two_a_byte`: of which two lie in a byte; `mixed`: bits, groups and whether zero is in the middle
    are each layer's own, by the shapes of its tensors."""

    layout: str
    bits: int
    group: int
    symmetric: bool
    zero_shift: int = 0
    ordered: bool = False
    one_scale: bool = False
    left_out: tuple[str, ...] = ()
    block: tuple[int, int] | None = None
    inverse_name: bool = False
    activations: int = 16
    whole: frozenset[str] = frozenset()
    narrow: frozenset[str] = frozenset()
    two_a_byte: bool = False
    mixed: bool = False

    def has_whole_activations(self, weight: str) -> bool:
        """Whether a layer, by the stored name of its weight, wants activations of 8 bits."""
        return weight.removesuffix(".weight") in self.whole

    def has_narrow_codes(self, weight: str) -> bool:
        """Whether a layer, by the stored name of its weight, has codes of 4 bits where others have 8."""
        return weight.removesuffix(".weight") in self.narrow

    def leaves_out(self, layer: str) -> bool:
        """Whether the configuration says that a layer, by its stored name, is not quantized. Patterns ("re:") are
        not tried: what is stored decides then."""
        if self.layout in (AWQ, GPTQ):
            return any(part in layer for part in self.left_out)
        if self.inverse_name:  # names, or what they end with
            return any(f".{layer}".endswith(f".{part}") for part in self.left_out)
        return layer in self.left_out


def quantization_said(checkpoint: Checkpoint) -> tuple[str, Any] | None:
    """The key of `config.json` that says how weights are quantized, and its value, or the name of msmodelslim's file;
    None where there is none of these."""
    for key in QUANTIZATION_KEYS:
        found = checkpoint.config.get(key) or checkpoint.text_config.get(key)
        if found:
            return key, found
    name = find_description(checkpoint)
    return None if name is None else (name, ASCEND)


def read_stored_codes(checkpoint: Checkpoint) -> StoredCodes | None:
    """None for a checkpoint that is not quantized. Raises InvalidRequest, naming the field, for codes that are not
    read."""
    said = quantization_said(checkpoint)
    return None if said is None else _read(checkpoint, *said)


def key_of_encoder(checkpoint: Checkpoint) -> str | None:
    """Where `config.json` says of the weights of its vision part by itself that they are quantized, if it does."""
    vision = checkpoint.vision_config or {}
    found = (f"vision_config.{key}" for key in QUANTIZATION_KEYS if vision.get(key))
    return next(found, None)


def read_encoder_codes(checkpoint: Checkpoint) -> StoredCodes | None:
    """Those of the vision encoder and its projector: what `vision_config` says of its own weights, where it does, else
    what is said of the whole. Raises as `read_stored_codes` does."""
    own = key_of_encoder(checkpoint)
    if own is None:
        return read_stored_codes(checkpoint)
    vision = checkpoint.vision_config or {}
    return _read(checkpoint, own, vision[own.rpartition(".")[2]])


def _read(checkpoint: Checkpoint, key: str, found: Any) -> StoredCodes | None:
    """key: where it is said, for messages."""
    method = str(found.get("quant_method")) if isinstance(found, Mapping) else str(found)
    values = found if isinstance(found, Mapping) else {}
    if values.get("load_in_4bit") or values.get("load_in_8bit"):
        method = _BNB  # which did not always say so
    fields = _Fields(checkpoint, key, method, values)
    if method == GGUF and checkpoint.is_gguf:
        return None  # each tensor says how it is stored
    if method in (ASCEND, "None") and (name := find_description(checkpoint)):
        return _ascend(checkpoint, name)
    if (read := _READERS.get(method)) is not None:
        return read(fields)
    known = list(_READERS)
    raise fields.refusal(
        f"of quantized checkpoints those of {', '.join(known[:-1])} and {known[-1]} are read;"
        " serve the model in float32, float16 or bfloat16"
    )


@dataclass(frozen=True)
class _Fields:
    """Of one object of `config.json`, whose errors name the field; `where` it lies in the method's."""

    checkpoint: Checkpoint
    key: str
    method: str
    values: Mapping[str, Any]
    where: str = ""

    def refusal(self, what: str) -> InvalidRequest:
        return InvalidRequest(
            "UNSUPPORTED_CONFIG",
            f"{self.checkpoint.folder / 'config.json'}: {self.key} says {cut(self.method, 60)}: {what}",
            field="model",
        )

    def one_of(self, name: str, allowed: tuple[Any, ...], *others: str, default: Any = None) -> Any:
        """The field, or the first there is of its other names."""
        names = [n for n in (name, *others) if self.values.get(n) is not None]
        value = self.values[names[0]] if names else default
        # True is not 1 here, nor False 0.
        if not any(value == known and type(value) is type(known) for known in allowed):
            read = " or ".join(str(known) for known in allowed)
            raise self.refusal(
                f"{self.where}{name} is {cut(repr(value), 60)} and may be {read} here"
            )
        return value

    def group(self, name: str, *others: str) -> int:
        """Inputs that share a scale; 0 for -1."""
        names = [n for n in (name, *others) if self.values.get(n) is not None]
        value = self.values[names[0]] if names else None
        if type(value) is not int or not (value == -1 or value > 0):
            raise self.refusal(
                f"{self.where}{name} is {cut(repr(value), 60)}; it is a number of inputs, or -1 for all"
            )
        return max(0, value)

    def block(self, name: str) -> tuple[int, int]:
        """Outputs and inputs that share a scale: a list of two."""
        value = self.values.get(name)
        if (
            not isinstance(value, list | tuple)
            or len(value) != 2
            or not all(type(size) is int and size > 0 for size in value)
        ):
            raise self.refusal(
                f"{self.where}{name} is {cut(repr(value), 60)}; it is two numbers, of outputs and inputs"
            )
        return value[0], value[1]

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.one_of(name, (True, False), default=default))

    def names(self, name: str) -> tuple[str, ...]:
        value = self.values.get(name) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(n, str) and n for n in value):
            raise self.refusal(f"{self.where}{name} is no list of names of layers")
        return tuple(value)

    def inner(self, name: str) -> "_Fields":
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            raise self.refusal(f"{self.where}{name} is no JSON object")
        return _Fields(self.checkpoint, self.key, self.method, value, f"{self.where}{name}.")

    def refuse(self, *names: str) -> None:
        """Fields that change what codes mean, in ways that are not read."""
        for name in names:
            if self.values.get(name):
                raise self.refusal(f"{self.where}{name} is not supported")


def _ascend(checkpoint: Checkpoint, name: str) -> StoredCodes | None:
    """None where all layers are numbers."""
    described = read_description(checkpoint, name)
    names = {kind: [n for n, k in described.kinds.items() if k == kind] for kind in KINDS}
    if len(names[NUMBERS]) == len(described.kinds):
        return None
    return StoredCodes(
        ASCEND,
        8,
        described.group,
        symmetric=False,
        left_out=tuple(names[NUMBERS]),
        whole=frozenset((*names[STATIC], *names[DYNAMIC])),
        narrow=frozenset(names[NARROW]),
        two_a_byte=described.two_a_byte,
    )


def _awq(fields: _Fields) -> StoredCodes:
    fields.one_of("version", ("gemm", "GEMM"), default="gemm")
    return StoredCodes(
        AWQ,
        fields.one_of("bits", (4,), "w_bit"),
        fields.group("group_size", "q_group_size"),
        symmetric=False,
        left_out=fields.names("modules_to_not_convert"),
    )


def _gptq(fields: _Fields) -> StoredCodes:
    version = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
    fields.refuse("is_marlin_format")
    fields.one_of("pack_dtype", ("int32",), default="int32")
    mixed = _is_mixed(fields, "dynamic")
    return StoredCodes(
        GPTQ,
        fields.one_of("bits", (4, 8)),
        fields.group("group_size"),
        symmetric=fields.flag("sym", True) and not mixed,
        zero_shift=1 if version == "gptq" else 0,
        ordered=fields.flag("desc_act", False),
        left_out=fields.names("modules_to_not_convert"),
        mixed=mixed,
    )


def _is_mixed(fields: _Fields, name: str) -> bool:
    """Whether a field says of some layers, by their names or patterns of these, something else than of all."""
    for layer, said in (fields.inner(name).values if fields.values.get(name) else {}).items():
        if not isinstance(said, Mapping):
            raise fields.refusal(f"{name} has no JSON object for {cut(layer, 80)}")
        if (bits := said.get("bits", 4)) not in (4, 8, 16, 32):
            raise fields.refusal(
                f"{name} has {cut(repr(bits), 40)} bits for {cut(layer, 80)}, and there may be 4 or 8, or 16 for layers"
                " that are not quantized"
            )
    return bool(fields.values.get(name))


def _fp8(fields: _Fields) -> StoredCodes:
    """As transformers' FineGrainedFP8Config says it, with blocks; without them scales are of whole layers."""
    fields.one_of("fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    said = fields.values.get("weight_block_size")
    block = None if said is None else fields.block("weight_block_size")
    left_out = (*fields.names("modules_to_not_convert"), *fields.names("ignored_layers"))
    return StoredCodes(
        FLOAT8,
        8,
        0,
        symmetric=True,
        one_scale=block is None,
        left_out=left_out,
        block=block,
        inverse_name=block is not None,
    )


def _fbgemm(fields: _Fields) -> StoredCodes:
    """As transformers' FbgemmFp8Config says it: a scale for each output."""
    left_out = fields.names("modules_to_not_convert")
    return StoredCodes(FLOAT8, 8, 0, symmetric=True, left_out=left_out)


def _auto_round(fields: _Fields) -> StoredCodes:
    """AutoRound's own format, whose layers are those of AutoGPTQ or of AutoAWQ."""
    packing = fields.one_of(
        "packing_format",
        ("auto_round:auto_gptq", "auto_round:auto_awq", "auto_round:llm_compressor"),
        "backend",
    )
    compressed = packing == "auto_round:llm_compressor"  # then in the layout of that tool
    fields.one_of("data_type", ("mx_fp",) if compressed else ("int",), default="int")
    if not compressed:
        fields.one_of("act_bits", (16, 32), default=16)
    symmetric, group = fields.flag("sym", True), fields.group("group_size")
    mixed = _is_mixed(fields, "extra_config")
    layers = fields.inner("extra_config").values if mixed else {}
    names = tuple(name for name, said in layers.items() if said.get("bits") in (16, 32))
    own = [name for name, said in layers.items() if _differs(said, fields) and name not in names]
    if own and packing != "auto_round:auto_gptq":
        raise fields.refusal(
            f"extra_config says of {cut(own[0], 80)} something else than of other layers, which is supported with"
            " packing_format auto_round:auto_gptq alone"
        )
    if compressed:
        fields.one_of("group_size", (_FLOAT4[MXFP4][1],))
        return StoredCodes(MXFP4, fields.one_of("bits", (4,)), group, True, left_out=names)
    if packing == "auto_round:auto_awq":
        bits = fields.one_of("bits", (4,))
        return StoredCodes(AWQ, bits, group, symmetric=False, left_out=names)
    bits = fields.one_of("bits", (4, 8))
    if own:
        return StoredCodes(GPTQ, bits, group, False, zero_shift=1, left_out=names, mixed=True)
    return StoredCodes(GPTQ, bits, group, symmetric, zero_shift=1, left_out=names)


def _differs(said: Mapping[str, Any], fields: _Fields) -> bool:
    return any(value != fields.values.get(name) for name, value in said.items())


def _modelopt(fields: _Fields) -> StoredCodes:
    """Scales of activations and of a cache, which may be there, are for those who make codes of these."""
    if fields.values.get("quantization"):  # as hf_quant_config.json has it
        fields = fields.inner("quantization")
    left_out = (*fields.names("ignore"), *fields.names("exclude_modules"))
    if fields.one_of("quant_algo", ("FP8", "NVFP4")) == "FP8":
        return StoredCodes(FLOAT8, 8, 0, symmetric=True, one_scale=True, left_out=left_out)
    size = _FLOAT4[NVFP4][1]
    fields.one_of("group_size", (size,), default=size)
    return StoredCodes(MODELOPT4, 4, size, symmetric=True, left_out=left_out)


def _bitsandbytes(fields: _Fields) -> StoredCodes:
    left_out = fields.names("llm_int8_skip_modules")
    if fields.flag("load_in_8bit", False):
        return StoredCodes(BNB8, 8, 0, symmetric=True, left_out=left_out)
    if not fields.flag("load_in_4bit", False):
        raise fields.refusal("neither load_in_4bit nor load_in_8bit is true")
    fields.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), default="fp4")
    fields.one_of("bnb_4bit_quant_storage", ("uint8",), default="uint8")
    return StoredCodes(BNB4, 4, 0, symmetric=True, left_out=left_out)


def _compressed(fields: _Fields) -> StoredCodes:
    layout = fields.one_of("format", (PACKED, BYTES, FLOAT8, *_FLOAT4))
    fields.one_of("quantization_status", ("compressed", "frozen"), default="compressed")
    fields.refuse("kv_cache_scheme", "transform_config")
    sparsity = fields.values.get("sparsity_config")
    if sparsity:
        fields.inner("sparsity_config").one_of("format", ("dense",), default="dense")
    groups = fields.inner("config_groups")
    if not groups.values:
        raise fields.refusal("config_groups is empty")
    schemes = [_scheme(groups.inner(name), layout) for name in groups.values]
    left_out = fields.names("ignore")
    differ = any(scheme != schemes[0] for scheme in schemes)
    if differ and layout == PACKED and not any(scheme.ordered for scheme in schemes):
        return replace(schemes[0], left_out=left_out, mixed=True)
    if differ:
        raise fields.refusal(
            "config_groups has several schemes, and one is supported: quantize"
            " all layers alike, and list others in ignore"
        )
    return replace(schemes[0], left_out=left_out)


def _scheme(group: _Fields, layout: str) -> StoredCodes:
    """Of one of `config_groups`. Of activations the bits are asked for alone: steps that are stored are not read."""
    weights = group.inner("weights")
    group.one_of("format", (layout,), default=layout)
    if layout == FLOAT8:
        return _float_scheme(weights)
    if layout in _FLOAT4:
        return _float4_scheme(weights, layout)
    weights.one_of("type", ("int",), default="int")
    bits = weights.one_of("num_bits", (4, 8))
    known = ("channel", "group") if layout == PACKED else ("tensor", "channel", "group")
    default = "group" if weights.values.get("group_size") else "tensor"
    strategy = weights.one_of("strategy", known, default=default)
    size = weights.group("group_size") if strategy == "group" else 0
    if layout == BYTES and weights.values.get("actorder") == "group":
        raise group.refusal(f"{weights.where}actorder is not supported with {layout}")
    ordered = layout == PACKED and weights.values.get("actorder") == "group"
    symmetric = weights.flag("symmetric", True)
    return StoredCodes(
        layout,
        bits,
        size,
        symmetric,
        ordered=ordered,
        one_scale=strategy == "tensor",
        activations=_activations(group) if bits == 8 else 16,
    )


def _activations(group: _Fields) -> int:
    """Bits, where these are 8 in whole numbers; 16 for all others."""
    said = group.values.get("input_activations")
    if not isinstance(said, Mapping):
        return 16
    return 8 if said.get("num_bits") == 8 and said.get("type", "int") == "int" else 16


def _float_scheme(weights: _Fields) -> StoredCodes:
    weights.one_of("type", ("float",))
    weights.one_of("num_bits", (8,))
    weights.one_of("symmetric", (True,), default=True)
    strategy = weights.one_of("strategy", ("tensor", "channel", "block"), default="tensor")
    block = weights.block("block_structure") if strategy == "block" else None
    return StoredCodes(FLOAT8, 8, 0, symmetric=True, one_scale=strategy == "tensor", block=block)


def _float4_scheme(weights: _Fields, layout: str) -> StoredCodes:
    strategy, size = _FLOAT4[layout]
    weights.one_of("type", ("float",))
    weights.one_of("num_bits", (4,))
    weights.one_of("symmetric", (True,), default=True)
    weights.one_of("strategy", (strategy,))
    weights.one_of("group_size", (size,))
    return StoredCodes(layout, 4, size, symmetric=True)


_READERS: Mapping[str, Callable[[_Fields], StoredCodes]] = {
    AWQ: _awq,
    GPTQ: _gptq,
    _AUTO_ROUND: _auto_round,
    _BNB: _bitsandbytes,
    _FP8: _fp8,
    _FBGEMM: _fbgemm,
    _MODELOPT: _modelopt,
    _COMPRESSED: _compressed,
}

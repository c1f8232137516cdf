"""torch's own ops on the device: the CPU's kernels over the same bytes, for each op that torch_npu has one for."""

from typing import Any

import torch
from torch import Tensor
from torch_npu import npu

from tests.ascend.simulator import counters, dispatch, graphs, native_ops, runtime, streams
from tests.ascend.simulator.memory import host_view

# Allocation and metadata stay torch_npu's own, as do all views.
_OWN = frozenset(
    {
        *(
            "empty.memory_format",
            "empty_strided",
            "empty_like",
            "new_empty",
            "new_empty_strided",
            "empty_with_format",
        ),
        *(
            "set_",
            "set_.source_Storage",
            "set_.source_Storage_storage_offset",
            "set_.source_Tensor",
            "as_strided_",
        ),
        *("resize_", "resize_as_", "record_stream", "is_pinned", "_pin_memory", "is_set_to"),
        *("_to_copy", "copy_", "_local_scalar_dense", "copy_memory_", "_copy_from_and_resize"),
    }
)
# The host needs a value of theirs, the number of elements found: torch_npu waits for the stream.
_WAIT_FOR_RESULT = frozenset(
    {"nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim"}
)


def install() -> None:
    """Registers a kernel for every op of torch_npu's lists."""
    copies = torch.library.get_kernel("aten::copy_", "PrivateUse1")
    scalars = torch.library.get_kernel("aten::_local_scalar_dense", "PrivateUse1")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    for name in sorted(native_ops.names() - _OWN):
        op = _op(name)
        if op is not None and not _is_view(op):
            dispatch.register("aten", name, _kernel(name.partition(".")[0], op))

    def transfer(to: Tensor, source: Tensor, non_blocking: bool) -> None:
        copies.call_boxed(keys, to, source, non_blocking)

    def copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        stream = dispatch.launch("copy_", (to, source), {})
        if source.numel():
            _copy(to, source, non_blocking, transfer, stream)
            streams.drain()
        return to

    def scalar(tensor: Tensor) -> Any:
        counters.kernels["item"] += 1
        graphs.refuse_in_capture("item()")
        return scalars.call_boxed(keys, tensor)

    dispatch.register("aten", "copy_", copy)
    dispatch.register("aten", "_local_scalar_dense", scalar)


def _op(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)


def _is_view(op: Any) -> bool:
    aliases = (result.alias_info for result in op._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)


def _kernel(name: str, op: Any) -> dispatch.Kernel:
    plain = dispatch.over_device_memory(
        name, op, dispatch.in_place_result(op), dispatch.written_by(op)
    )
    if name in _WAIT_FOR_RESULT:
        return _waiting(name, plain, lambda arguments: True)
    if name in {"index", "index_put", "index_put_", "_index_put_impl_"}:
        return _waiting(name, plain, _has_boolean_index)
    return plain


def _waiting(name: str, plain: dispatch.Kernel, when: Any) -> dispatch.Kernel:
    def run(*arguments: Any, **options: Any) -> Any:
        if when(arguments):
            graphs.refuse_in_capture(name)
            npu.current_stream().synchronize()
        return plain(*arguments, **options)

    return run


def _has_boolean_index(arguments: tuple[Any, ...]) -> bool:
    return any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1]
    )


def _copy(to: Tensor, source: Tensor, non_blocking: bool, transfer: Any, stream: int) -> None:
    """As torch_npu: between host and device go contiguous bytes of one dtype, the rest happens on the device."""
    if to.device.type == source.device.type:
        _copy_on_device(to, source, stream)
        return
    graphs.refuse_in_capture("a copy between host and device")
    if _same_layout(to, source):
        transfer(to, source, non_blocking)
    elif to.device.type == "npu":
        sent = source.to(to.dtype).expand(to.shape).contiguous()
        landed = torch.empty(to.shape, dtype=to.dtype, device=to.device)
        transfer(landed, sent, non_blocking and sent is source)
        streams.drain()
        _copy_on_device(to, landed, stream)
    else:
        packed = torch.empty(to.shape, dtype=to.dtype, device=source.device)
        _copy_on_device(packed, source.expand(to.shape), stream)
        landed = torch.empty(to.shape, dtype=to.dtype)
        transfer(landed, packed, False)
        to.copy_(landed)


def _same_layout(to: Tensor, source: Tensor) -> bool:
    alike = to.dtype == source.dtype and to.shape == source.shape
    return alike and to.is_contiguous() and source.is_contiguous()


def _copy_on_device(to: Tensor, source: Tensor, stream: int) -> None:
    target, values = host_view(to), host_view(source)
    dispatch.run_on(stream, lambda: target.copy_(values), streams.ranges([source], [to]))


def install_fallbacks() -> None:
    """Counts the calls of ops that torch_npu runs on the CPU because the device has no kernel for them."""
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
            if _falls_back(full):
                name = full.removeprefix("aten::")
                dispatch.register("aten", name, _fallback(name.partition(".")[0], _op(name)))


# Of what is composed of other ops, or registered for the device.
_NO_FALLBACK = (
    "PrivateUse1",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


def _falls_back(name: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if not torch._C._dispatch_has_kernel(name) or any(has(name, key) for key in _NO_FALLBACK):
        return False
    return bool(has(name, "CPU"))


def _fallback(name: str, op: Any) -> dispatch.Kernel:
    plain = dispatch.over_device_memory(name, op, written=dispatch.written_by(op))

    def run(*arguments: Any, **options: Any) -> Any:
        counters.fallbacks[name] += 1
        runtime.add("fallback")
        graphs.refuse_in_capture(f"{name}, which runs on the CPU,")
        npu.current_stream().synchronize()
        return plain(*arguments, **options)

    return run

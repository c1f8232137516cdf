"""Which operators this torch_npu has. Its releases differ in arguments too, and a name alone does not tell."""

import torch


def supports(operator: str, *arguments: str) -> bool:
    """Whether an operator of torch_npu, or of NNAL, is registered and takes these arguments."""
    for namespace in (torch.ops.npu, torch.ops.atb):
        packet = getattr(namespace, operator, None)
        if packet is not None:
            known = {argument.name for argument in packet.default._schema.arguments}
            return known.issuperset(arguments)
    return False

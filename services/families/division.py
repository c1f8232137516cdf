"""Whether a decoder of ours can be divided among several ranks, by its config.json and the headers of its tensors."""

from services.families import registry
from services.families.coded_tensors import coded_layers
from services.families.family import is_generic
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from shared.model_config.decoder import DecoderConfig
from shared.weights.layouts.layout import LEAST_GROUP


def require_divisible(checkpoint: Checkpoint, ranks: int, backend: ModelBackend) -> bool:
    """Raises InvalidRequest, with the reason, for a model of which not every one of `ranks` can have an equal part.
    False where the code of transformers runs it: its class has to be asked (`services.decoder.parallel.refusal`).
    """
    if is_generic(registry.find_decoder(checkpoint, backend).decoder):
        return False
    config = registry.decoder_config(checkpoint)
    if reason := _reason(config, ranks) or _reason_of_codes(checkpoint, config, ranks, backend):
        raise refusal(checkpoint, ranks, reason)
    return True


def refusal(checkpoint: Checkpoint, ranks: int, reason: str) -> InvalidRequest:
    """`reason`: what the model has that cannot be divided."""
    return InvalidRequest(
        "UNSUPPORTED_RANKS",
        f"--tensor-parallel-size {ranks}: {checkpoint.kind} has {reason}",
        field="tensor_parallel_size",
    )


def _reason(config: DecoderConfig, ranks: int) -> str:
    keys = config.num_kv_heads
    if config.num_heads % ranks:
        return f"{config.num_heads} attention heads, which do not divide by it"
    if keys % ranks and ranks % keys:
        return f"{keys} heads of keys and values, which neither divide by it nor divide it"
    if config.intermediate_size % ranks:
        return f"{config.intermediate_size} units between the layers of its MLP, which do not divide by it"
    if config.attends_to_media:
        return "layers that attend to pictures, which are not divided yet"
    if config.row_norms:
        return "norms of all heads together, of which each rank has only some"
    if config.vocab_size < ranks * ranks:
        return f"{config.vocab_size} tokens in its vocabulary, too few for so many"
    return ""


def _reason_of_codes(
    checkpoint: Checkpoint, config: DecoderConfig, ranks: int, backend: ModelBackend
) -> str:
    """Layers whose inputs are divided have to be cut where groups that share a scale can be."""
    layers = coded_layers(checkpoint, backend)
    if layers is None:
        return ""
    cuts = {
        "o_proj": config.num_heads * config.head_size // ranks,
        "down_proj": config.intermediate_size // ranks,
    }
    for layer in layers:
        cut = cuts.get(layer.rpartition(".")[2])
        group = layers.group(layer)
        if cut is None or not group or cut % group == 0 or layers.order(layer) is not None:
            continue
        # Groups are halved as often as that leaves a multiple of the least one.
        if not any(
            cut % (group >> times) == 0
            for times in range(1, group.bit_length())
            if group % (LEAST_GROUP << times) == 0
        ):
            _, inputs = layers.sizes(layer)
            return (
                f"{layer}.{layers.layout.main} with groups of {group}, whose {inputs} inputs are cut at {cut}, inside"
                " of a group"
            )
    return ""

"""Whether a decoder of ours can be divided among several ranks, by its config.json alone."""

from services.families import registry
from services.families.family import is_generic
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from shared.model_config.decoder import DecoderConfig


def require_divisible(checkpoint: Checkpoint, ranks: int, backend: ModelBackend) -> bool:
    """Raises InvalidRequest, with the reason, for a model of which not every one of `ranks` can have an equal part.
    False where the code of transformers runs it: its class has to be asked (`services.decoder.parallel.refusal`).
    """
    if is_generic(registry.find_decoder(checkpoint, backend).decoder):
        return False
    if reason := _reason(registry.decoder_config(checkpoint), ranks):
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

"""What cannot be divided among several ranks, said before they are started."""

from services.decoder.models.llama import Llama
from services.families import registry
from services.families.family import is_generic, load_part
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend
from shared.model_config.decoder import DecoderConfig


def require_divisible(
    checkpoint: Checkpoint, ranks: int, backend: ModelBackend, trust_remote_code: bool = False
) -> None:
    """Raises InvalidRequest, with the reason, for a model of which not every one of `ranks` can have an equal part."""
    family = registry.find_decoder(checkpoint, backend)
    part = load_part(family.decoder)
    if is_generic(family.decoder):
        reason = part.undivided(checkpoint, ranks, trust_remote_code)
    elif not issubclass(part, Llama):
        raise _refuse(ranks, f"the layers of {checkpoint.kind} are not divided among ranks yet")
    else:
        reason = _reason(registry.decoder_config(checkpoint), ranks)
    if reason:
        raise _refuse(ranks, f"{checkpoint.kind} has {reason}")


def _reason(config: DecoderConfig, ranks: int) -> str:
    keys = config.num_kv_heads
    if config.num_heads % ranks:
        return f"{config.num_heads} attention heads, which do not divide by it"
    if keys % ranks and ranks % keys:
        return f"{keys} heads of keys and values, which neither divide by it nor divide it"
    if config.intermediate_size % ranks:
        return f"{config.intermediate_size} units between the layers of its MLP, which do not divide by it"
    if config.row_norms:
        return "norms of all heads together, of which each rank has only some"
    if config.vocab_size < ranks * ranks:
        return f"{config.vocab_size} tokens in its vocabulary, too few for so many"
    return ""


def _refuse(ranks: int, why: str) -> InvalidRequest:
    return InvalidRequest(
        "UNSUPPORTED_RANKS", f"--tensor-parallel-size {ranks}: {why}", field="tensor_parallel_size"
    )

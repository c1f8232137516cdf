"""What cannot be divided among several ranks, said before they are started.

As a program, with the decoder's settings and the number of an `AnswerFile`, it says the reason there: `tessera serve`
asks it about models that the code of transformers runs, which the launcher does not import.
"""

import sys

from services.decoder.models.llama import Llama
from services.decoder.settings import DecoderSettings
from services.families import division, registry
from services.families.family import load_part
from shared.checkpoint.folder import Checkpoint
from shared.child_process.answer_file import write_answer
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend


def require_divisible(
    checkpoint: Checkpoint, ranks: int, backend: ModelBackend, trust_remote_code: bool = False
) -> None:
    """Raises InvalidRequest, with the reason, for a model of which not every one of `ranks` can have an equal part."""
    part = load_part(registry.find_decoder(checkpoint, backend).decoder)
    if not division.require_divisible(checkpoint, ranks, backend):
        if reason := part.undivided(checkpoint, ranks, trust_remote_code):
            raise division.refusal(checkpoint, ranks, reason)
    elif not issubclass(part, Llama):
        raise division.refusal(checkpoint, ranks, "layers that are not divided among ranks yet")


def main(number: str) -> None:
    """Says why the model cannot be divided; nothing where it can."""
    settings = DecoderSettings.load([])
    try:
        require_divisible(
            Checkpoint(settings.model, settings.family),
            settings.tensor_parallel_size,
            settings.model_backend,
            settings.trust_remote_code,
        )
    except InvalidRequest as error:
        write_answer(int(number), error.message)


if __name__ == "__main__":
    main(sys.argv[1])

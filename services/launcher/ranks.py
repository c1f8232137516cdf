"""Whether a model can be divided among `--tensor-parallel-size` ranks, said before anything is started."""

import subprocess
import sys
from pathlib import Path

from services.families import division
from services.launcher.settings import ServeSettings
from shared.checkpoint.folder import Checkpoint
from shared.child_process.answer_file import AnswerFile
from shared.errors import InvalidRequest
from shared.settings import child_environment, python_path

_ROOT = Path(__file__).parents[2]
_COMMAND = (sys.executable, "-P", "-m", "services.decoder.parallel.refusal")


def require_divisible(settings: ServeSettings, checkpoint: Checkpoint) -> None:
    """Raises InvalidRequest with the reason why it cannot. Where the code of transformers runs the layers its class is
    asked, by a process of its own, since that imports torch: some seconds.
    """
    ranks = settings.tensor_parallel_size
    if ranks == 1 or division.require_divisible(checkpoint, ranks, settings.model_backend):
        return
    variables = {
        "TESSERA_DECODER_MODEL": checkpoint.folder.absolute(),
        "TESSERA_DECODER_FAMILY": checkpoint.family,
        "TESSERA_DECODER_TENSOR_PARALLEL_SIZE": ranks,
        "TESSERA_DECODER_MODEL_BACKEND": settings.model_backend,
        "TESSERA_DECODER_TRUST_REMOTE_CODE": settings.trust_remote_code,
        "PYTHONPATH": python_path(_ROOT, _ROOT / "protos"),
    }
    with AnswerFile() as answer:
        subprocess.run(
            [*_COMMAND, str(answer.number)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment(**{name: str(value) for name, value in variables.items()}),
            pass_fds=answer.pass_fds,
        )
        reason = answer.read()
    # A check that fails for another reason leaves it to the decoder to say so.
    if reason:
        raise InvalidRequest("UNSUPPORTED_RANKS", reason, field="tensor_parallel_size")

"""`python -m services.comparison FOLDER NUMBER`: says in an `AnswerFile` why a checkpoint is refused, or nothing."""

import argparse
from pathlib import Path

from services.comparison.answer import say_refusal
from services.comparison.compare import compare
from shared.checkpoint.folder import Checkpoint
from shared.model_backends import ModelBackend


def main() -> None:
    """Runs one comparison."""
    parser = argparse.ArgumentParser(prog="python -m services.comparison")
    parser.add_argument("folder", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("--family", default="")
    parser.add_argument("--model-backend", type=ModelBackend, default=ModelBackend.AUTO)
    parser.add_argument("--trust-remote-code", action="store_true")
    chosen = parser.parse_args()
    checkpoint = Checkpoint(chosen.folder, chosen.family)
    say_refusal(
        chosen.number,
        lambda: compare(checkpoint, chosen.model_backend, chosen.trust_remote_code),
    )


if __name__ == "__main__":
    main()

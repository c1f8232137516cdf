"""`python -m services.preprocess`: prompts to token ids and pixel values."""

import shared.lean_start  # noqa: F401, I001  (first)
from functools import partial

from services.preprocess.settings import PreprocessSettings
from shared.settings import set_process_environment
from shared.telemetry.logs import configure_logs


def main() -> None:
    """Runs the service until SIGTERM or SIGINT."""
    settings = PreprocessSettings.load(prog="python -m services.preprocess")
    configure_logs("preprocess", settings.log_level, settings.log_format, quotes_errors=False)
    # Read when the libraries are imported. Requests run side by side already: threads inside one tokenization would
    # fight for the same cores. The image workers are programs of their own and know nothing of this process's gRPC.
    set_process_environment(TOKENIZERS_PARALLELISM="false", GRPC_ENABLE_FORK_SUPPORT="0")

    from services.families.check import Parts
    from services.families.prepare import prepare_model
    from shared import service_process

    settings = prepare_model(settings, Parts.TOKENIZER | Parts.PROCESSOR)
    from services.preprocess.server import serve

    service_process.run(partial(serve, settings), settings.internal_token_file)


if __name__ == "__main__":
    main()

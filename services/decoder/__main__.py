"""`python -m services.decoder`: computes the steps that a scheduler plans."""

import shared.lean_start  # noqa: F401  (first)
from services.decoder.parallel.leader import Leader
from services.decoder.settings import DecoderSettings
from services.families.check import Parts
from services.families.prepare import prepare_model
from shared.hardware import ascend, npu_leases
from shared.service_process import run
from shared.settings import set_process_environment
from shared.telemetry.logs import configure_logs


def main() -> None:
    """Runs the service until a signal stops it."""
    settings = DecoderSettings.load(prog="python -m services.decoder")
    configure_logs("decoder", settings.log_level, settings.log_format)
    # Idle OpenMP threads that spin for long would take the cores of the other services.
    set_process_environment(GOMP_SPINCOUNT="10000", **ascend.ENVIRONMENT)
    settings = npu_leases.for_decoder(settings, settings.tensor_parallel_size)
    settings = prepare_model(settings, Parts.WEIGHTS, **settings.computation)
    leader = Leader.start(settings) if settings.tensor_parallel_size > 1 else None
    from services.decoder.server import serve

    run(lambda stop: serve(settings, stop, leader=leader), settings.internal_token_file)


if __name__ == "__main__":
    main()

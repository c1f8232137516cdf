"""`python -m services.vision_encoder`: pixel values to embeddings."""

import shared.lean_start  # noqa: F401  (first)
from services.families.check import Parts
from services.families.prepare import prepare_model
from services.vision_encoder.settings import VisionEncoderSettings
from shared import service_process
from shared.hardware import ascend, npu_leases
from shared.settings import set_process_environment
from shared.telemetry.logs import configure_logs


def main() -> None:
    """Runs the service until SIGTERM or SIGINT."""
    settings = VisionEncoderSettings.load(prog="python -m services.vision_encoder")
    configure_logs("vision_encoder", settings.log_level, settings.log_format)
    # Read when torch is imported: threads spin briefly between operations, then leave the cores to the decoder.
    libraries = {"GOMP_SPINCOUNT": "10000", "TRANSFORMERS_VERBOSITY": "error"}
    set_process_environment(**libraries, **ascend.ENVIRONMENT)
    settings = npu_leases.for_encoder(settings)
    settings = prepare_model(settings, Parts.WEIGHTS, device=settings.device, dtype=settings.dtype)

    from services.vision_encoder.server import serve

    service_process.run(lambda stop: serve(settings, stop), settings.internal_token_file)


if __name__ == "__main__":
    main()

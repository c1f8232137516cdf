"""`python -m services.scheduler`: takes requests from the queue and plans the decoders' steps."""

import shared.lean_start  # noqa: F401  (first)
from services.scheduler.server import serve
from services.scheduler.settings import SchedulerSettings
from shared import service_process
from shared.telemetry.logs import configure_logs


def main() -> None:
    """Starts the scheduler and ends with its exit status."""
    settings = SchedulerSettings.load(prog="tessera-scheduler")
    configure_logs("scheduler", settings.log_level, settings.log_format)
    service_process.run(lambda stop: serve(settings, stop), settings.internal_token_file)


if __name__ == "__main__":
    main()

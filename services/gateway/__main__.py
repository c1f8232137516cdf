"""`python -m services.gateway`."""

import shared.lean_start  # noqa: F401, I001  (first)
import asyncio

from services.families.check import Parts
from services.families.prepare import prepare_model
from services.gateway.gateway import run_gateway
from services.gateway.settings import GatewaySettings
from shared import service_process
from shared.telemetry.logs import configure_logs


def main() -> None:
    """Loads settings and runs until SIGTERM."""
    settings = GatewaySettings.load(prog="python -m services.gateway")
    configure_logs("gateway", settings.log_level, settings.log_format, quotes_errors=False)
    settings = prepare_model(settings, Parts.TOKENIZER)

    async def body(stop: asyncio.Event) -> None:
        await run_gateway(settings, stop)

    service_process.run(body, settings.internal_token_file)


if __name__ == "__main__":
    main()

"""What a gateway holds at a moment, as series of its metrics."""

from collections.abc import Callable, Iterator, Mapping

from services.gateway.body_budget import BodyBudget
from shared.telemetry.series import Measured, Series

OPEN_ANSWERS = Series(
    "tessera_open_answers", "gauge", "Answers that this gateway follows, streams or not."
)
INSTANCES = Series(
    "tessera_instances",
    "gauge",
    "Processes of each service that requests need, as this gateway finds them in the registry.",
    ("service",),
)
BODY_BYTES = Series(
    "tessera_held_body_bytes",
    "gauge",
    "Bodies of requests that are being read or prepared (--max-body-bytes-in-flight).",
    unit="bytes",
)
SERIES = (OPEN_ANSWERS, INSTANCES, BODY_BYTES)


class GatewayState:
    """Reads it from the parts that know."""

    def __init__(
        self,
        open_answers: Callable[[], int],
        instances: Callable[[], Mapping[str, int]],
        budget: BodyBudget,
    ) -> None:
        self._open_answers, self._instances, self._budget = open_answers, instances, budget

    def read(self) -> Iterator[Measured]:
        """All series."""
        yield OPEN_ANSWERS.of(self._open_answers())
        found = self._instances().items()
        yield INSTANCES.by(((name.replace(" ", "_"),), count) for name, count in found)
        yield BODY_BYTES.of(self._budget.held)

"""`do_sample: true` of APIs that have it."""

from services.gateway.model.served_model import ServedModel


def drawn(temperature: float | None, model: ServedModel) -> float | None:
    """The temperature of a request whose tokens are to be drawn: 1 where it names none and the checkpoint's own answers
    are not drawn."""
    if temperature is None and model.defaults.numbers.get("temperature") == 0:
        return 1.0
    return temperature

"""How long the parts of a gateway wait, for its neighbours and for its clients."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds."""

    # Within which Redis answers a reservation.
    reserve_s: float = 3.0
    # Between two renewals of the followed requests' leases, of which the shortest lasts three times as long.
    renew_s: float = 5.0
    # While there is no preprocess: the restart of one on a machine that has too much to do took 38.
    preprocess_s: float = 45.0
    # A preprocess that is lost is noticed well before this. One that is lost later may have been lost by the prompt.
    lost_by_prompt_s: float = 15.0
    # A token log from which nothing was heard for so long is read again.
    reread_s: float = 1.0
    # An answer without anything new for so long gets a sign that it goes on.
    silence_s: float = 10.0
    # Between two looks for responses that have ended and that nobody has asked for.
    sweep_s: float = 30.0
    # For decoders and other gateways, until an adapter is loaded or unloaded.
    adapters_s: float = 60.0
    # Of a gateway's lease on a batch; it is renewed, and others are looked for, every fifth of that.
    batch_lease_s: float = 6.0


USUAL = Timings()

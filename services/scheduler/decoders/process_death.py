"""Whether the process of a decoder has ended, or only the connection to it."""

import asyncio
from collections.abc import Iterable

from shared.environment import monotonic
from shared.errors import ServingError
from shared.net import transport
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from shared.queue.registry import Directory, Member
from tessera.decoder.v1 import decoder_pb2
from tessera.decoder.v1.decoder_pb2_grpc import DecoderServiceStub

_ANSWER_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
# Within that time a supervisor has ended one that hangs, and starts it anew: `tessera serve` takes 5 s where it does
# nothing, and 50 s of processor time where it computes.
_GIVEN_UP_S = 75.0
# What a server at its address may say to `Open`: whether the decoder of that id has ended.
_SAYS = {"WRONG_DECODER": True, "STARTING": True, "STALE_LEASE": False, "DECODER_STOPS": False}


async def has_died(
    member: Member, directory: Directory, scheduler_id: str, answer_s: float = _ANSWER_S
) -> bool:
    """Finds out whether a decoder that no longer answers has ended: nothing listens at its address any more, or another
    incarnation does. Where it answers, or neither shows within 75 s, it counts as alive. `answer_s`: how long
    it may take to answer.
    """
    until, pause_s = monotonic() + _GIVEN_UP_S, _FIRST_PAUSE_S
    while monotonic() < until:
        died = await _look(member, directory.members, scheduler_id, answer_s)
        if died is not None:
            return died
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return False


async def _look(
    member: Member, known: Iterable[Member], scheduler_id: str, answer_s: float
) -> bool | None:
    """None where nothing is known for certain."""
    here = {m.instance_id for m in known if m.address == member.address}
    if here - {member.instance_id} or await transport.refuses_connections(member.address):
        return True
    return await _ask(member, scheduler_id, answer_s)


async def _ask(member: Member, scheduler_id: str, answer_s: float) -> bool | None:
    """What answers at its address. A lease of 0 binds nothing: the decoder itself refuses it as old."""
    opening = decoder_pb2.Open(decoder_id=member.instance_id, scheduler_id=scheduler_id, lease=0)
    async with open_channel(member.address) as channel:
        call = DecoderServiceStub(channel).Steps()
        try:
            async with asyncio.timeout(answer_s):
                with calling("decoder"):
                    await call.write(decoder_pb2.StepsRequest(open=opening))
                    await call.read()
        except ServingError as error:
            return _SAYS.get(error.reason)
        except (TimeoutError, asyncio.InvalidStateError):  # the latter: it ended before `write`
            return None
        finally:
            call.cancel()
    return None

"""Shares of tenants: from the gateway's flag to what the queue reads when it chooses."""

from typing import Any

import pytest

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.tenant_weights import read_weights
from services.gateway.gateway import open_gateway
from shared.errors import InvalidRequest
from shared.queue import connect
from shared.queue.keys import Keys
from tests.support.gateway.stage import MODEL, Stage

ALICE, HEAVY = tenant_of(Caller(""), "alice"), tenant_of(Caller("", api_key="sk-heavy"), "")


async def test_the_queue_hears_the_weights(stage: Stage) -> None:
    told = {"tenant_weights": "key:sk-heavy=4, user:alice=0.5"}
    redis = connect(stage.settings.redis_url)
    try:
        async with open_gateway(stage.settings.model_copy(update=told)):
            found: dict[Any, Any] = {}
            while not found:
                found = await redis.hgetall(Keys(MODEL).weights)
        assert {name.decode(): float(weight) for name, weight in found.items()} == {
            HEAVY: 4,
            ALICE: 0.5,
        }
    finally:
        await redis.aclose()


@pytest.mark.parametrize("told", ["alice=2", "user:alice", "user:alice=0", "user:=2", "key:sk=nan"])
def test_what_is_no_weight_stops_the_start_and_shows_no_key(told: str) -> None:
    with pytest.raises(InvalidRequest, match="tenant_weights") as caught:
        read_weights(told)
    assert "sk" not in caught.value.message

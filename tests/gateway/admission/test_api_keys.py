"""Who is let in: keys from flags and files, and addresses that need one."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from tokenizers import Tokenizer

from services.gateway.admission.api_keys import BEARER, ApiKeys, KeyHeader
from services.gateway.admission.caller import Caller
from services.gateway.gateway import open_gateway
from services.gateway.settings import GatewaySettings
from shared import access
from shared.errors import InvalidRequest, Unauthenticated
from tests.support.gateway.stage import open_stage


def test_keys_are_those_of_the_flag_and_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# a comment\n\n  three  \none\n")
    assert access.given_keys("one, two,", file) == ("one", "two", "three")
    assert access.given_keys(None, None) == ()


@pytest.mark.parametrize("listed", ["", " ", ",", " , ,"])
def test_a_list_without_a_key_is_refused(listed: str) -> None:
    with pytest.raises(InvalidRequest, match="holds no key"):
        access.given_keys(listed, None)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "holds nothing"),
        (b"# nobody\n\n", "holds nothing"),
        (b"a key\n", "API key 1 of 1 cannot be sent"),
        (b"good\nwith,comma\n", "API key 2 of 2 cannot be sent"),
        (b"\xff\xfe", "not text in UTF-8"),
    ],
)
def test_a_file_without_usable_keys_is_refused(tmp_path: Path, content: bytes, fault: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest, match=fault) as refused:
        access.given_keys(None, file)
    assert "with,comma" not in str(refused.value) and "a key\n" not in str(refused.value)


def test_only_a_whole_key_is_one() -> None:
    keys = ApiKeys(("sesame", "other"))

    def caller(authorization: str) -> Caller:
        return keys.caller("r", {"authorization": authorization, "traceparent": ""}.__getitem__)

    assert caller("bearer other").api_key == "other"
    for token in ("", "Bearer", "Bearer sesam", "Bearer sesamee", "Bearer sesame,other", "sesame"):
        with pytest.raises(Unauthenticated):
            caller(token)


def test_a_key_may_stand_in_any_header_of_its_api() -> None:
    keys = ApiKeys(("sesame",))
    where = (KeyHeader("X-Api-Key"), BEARER)

    def caller(**headers: str) -> Caller:
        return keys.caller("r", lambda name: headers.get(name.replace("-", "_"), ""), where)

    assert caller(x_api_key="sesame").api_key == "sesame"
    assert caller(x_api_key="of a proxy", authorization="Bearer sesame").api_key == "sesame"
    for headers in ({"x_api_key": "Bearer sesame"}, {"authorization": "sesame"}, {}):
        with pytest.raises(
            Unauthenticated, match="`X-Api-Key: <key>` or `Authorization: Bearer <key>`"
        ):
            caller(**headers)


async def test_a_gateway_reads_keys_from_a_file_and_warns_if_others_can(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("sesame\n")
    for mode, warned in ((0o600, False), (0o640, False), (0o644, True), (0o620, True)):
        file.chmod(mode)
        with structlog.testing.capture_logs() as lines:
            async with open_stage(
                redis_url, model_folder, tokenizer, api_key="one", api_key_file=file
            ) as stage:
                for key, status in (("one", 200), ("sesame", 200), ("two", 401)):
                    headers = {"authorization": f"Bearer {key}"}
                    reply = await stage.http.get("/v1/models", headers=headers)
                    assert reply.status_code == status, key
        told = [line["event"] for line in lines if "is open to others" in line["event"]]
        assert bool(told) is warned, oct(mode)
        assert all(f"chmod 600 {file}" in text for text in told)


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": ""}, False),
        ({"host": "0.0.0.0", "published_host": "192.0.2.1"}, False),
        ({"host": "0.0.0.0", "api_key": "sesame"}, True),
        ({"host": "0.0.0.0", "allow_unauthenticated": True}, True),
        ({"host": "0.0.0.0", "published_host": "127.0.0.1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "127.0.0.2"}, True),
    ],
)
async def test_an_address_that_others_reach_needs_a_key(
    redis_url: str, model_folder: Path, changes: dict[str, Any], starts: bool
) -> None:
    settings = GatewaySettings(
        model=model_folder, redis_url=redis_url, port=0, grpc_port=0, shutdown_timeout=0, **changes
    )
    refused = pytest.raises(InvalidRequest, match=r"--api-key-file .* --allow-unauthenticated")
    with contextlib.nullcontext() if starts else refused:
        async with open_gateway(settings):
            pass

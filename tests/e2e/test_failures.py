"""Every service is killed, frozen or stopped while requests run: answers equal those without a failure."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import redis
from openai import OpenAI

from services.launcher.state.folders import Folders
from shared.queue.keys import Keys
from tests.support.pictures import data_url, png
from tests.support.processes.system import System

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.full,
    pytest.mark.xdist_group("system_of_two"),
]

LENGTH = 90
COUNTS = {"scheduler": 1, "decoder": 2, "vision_encoder": 2, "preprocess": 2}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 2},
    "penalties": {"temperature": 0.7, "seed": 4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "text": {"temperature": 0.9, "seed": 5, "top_p": 0.8, "stop": ["never to be seen"]},
}


@pytest.fixture(scope="module")
def system(system_of_two: System) -> System:
    system_of_two.wait_ready()
    return system_of_two


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[OpenAI]:
    with OpenAI(base_url=system.base_url, api_key="none", max_retries=0, timeout=300) as opened:
        yield opened


def ask(client: OpenAI, kind: str, number: int, count: int = LENGTH) -> Any:
    """Texts and log-probabilities of an answer."""
    content: list[dict[str, Any]] = [{"type": "text", "text": f"What is in the picture {number}?"}]
    if kind != "text":
        pictures = [data_url(png(number + i)) for i in range(1 + number % 2)]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in pictures] + content
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
        max_tokens=count,
        extra_body={"ignore_eos": True},
        **KINDS[kind],
    )
    return [
        (
            choice.index,
            choice.finish_reason,
            choice.message.content,
            [(t.token, t.logprob) for t in (choice.logprobs.content or [])]
            if choice.logprobs
            else None,
        )
        for choice in sorted(answer.choices, key=lambda choice: choice.index)
    ]


@pytest.fixture(scope="module")
def undisturbed(client: OpenAI) -> dict[tuple[str, int], Any]:
    """The answers without a failure, by kind and number."""
    return {(kind, number): ask(client, kind, number) for kind in KINDS for number in range(2)}


def disturb(
    client: OpenAI, undisturbed: dict[tuple[str, int], Any], disturbance: Callable[[], object]
) -> None:
    """Asks everything at once; something happens a little later."""
    with ThreadPoolExecutor(len(undisturbed)) as pool:
        answers: dict[tuple[str, int], Future[Any]] = {
            key: pool.submit(ask, client, *key) for key in undisturbed
        }
        time.sleep(0.4)
        disturbance()
        found = {key: future.result() for key, future in answers.items()}
    for key, answer in found.items():
        assert answer == undisturbed[key], key


@pytest.mark.parametrize(
    "service", ["scheduler", "decoder", "vision_encoder", "preprocess", "redis"]
)
def test_a_killed_process_changes_no_answer(
    system: System, client: OpenAI, undisturbed: dict[tuple[str, int], Any], service: str
) -> None:
    disturb(client, undisturbed, lambda: system.kill(service))
    system.wait_ready()


@pytest.mark.parametrize("service", ["scheduler", "decoder", "vision_encoder"])
def test_a_frozen_process_changes_no_answer(
    system: System, client: OpenAI, undisturbed: dict[tuple[str, int], Any], service: str
) -> None:
    def freeze() -> None:
        pid = system.kill(service, with_signal=signal.SIGSTOP)
        time.sleep(3)
        os.kill(pid, signal.SIGCONT)

    disturb(client, undisturbed, freeze)
    system.wait_ready()


def test_the_loss_of_all_encoders_changes_no_answer(
    system: System, client: OpenAI, undisturbed: dict[tuple[str, int], Any]
) -> None:
    def kill() -> None:
        for pid in system.pids()["vision_encoder"]:
            os.kill(pid, signal.SIGKILL)
        assert ask(client, "text", 0) == undisturbed["text", 0], "text does not wait for pictures"

    disturb(client, undisturbed, kill)
    system.wait_ready()


def test_what_is_asked_while_no_preprocess_runs_is_answered(
    system: System, client: OpenAI, undisturbed: dict[tuple[str, int], Any]
) -> None:
    for pid in system.pids()["preprocess"]:
        os.kill(pid, signal.SIGKILL)
    disturb(client, undisturbed, lambda: None)
    system.wait_ready()


def test_restarting_every_service_under_load_changes_no_answer(
    system: System, client: OpenAI, undisturbed: dict[tuple[str, int], Any]
) -> None:
    """One process of each gets SIGTERM; its requests end before it exits, or move to another process."""
    done = threading.Event()
    wrong: list[Any] = []
    served = [0]

    def load(first: int) -> None:
        keys = list(undisturbed)
        number = first
        while not done.is_set():
            key = keys[number % len(keys)]
            try:
                if ask(client, *key) != undisturbed[key]:
                    wrong.append(key)
            except Exception as error:
                wrong.append((key, error))
            number += 1
            served[0] += 1

    threads = [threading.Thread(target=load, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    try:
        gone = {}
        for service in COUNTS:
            gone[service], pid = oldest(system, service)
            os.kill(pid, signal.SIGTERM)
        wait_until_replaced(system, gone)
        while served[0] < 10 and not wrong:
            time.sleep(0.1)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong


def wait_until_replaced(system: System, gone: dict[str, str]) -> None:
    """Waits until the registry lists as many processes of each service as before, and none of `gone`."""
    deadline = time.monotonic() + 300
    while not all(
        old not in (now := registered(system, service)) and len(now) == COUNTS[service]
        for service, old in gone.items()
    ):
        assert time.monotonic() < deadline, system.log
        time.sleep(0.1)
    time.sleep(1)  # until callers have read it


def oldest(system: System, service: str) -> tuple[str, int]:
    """The instance of a service that is registered for longest, and its process. Waits until those that earlier tests
    killed are replaced, and their entries have expired."""
    deadline = time.monotonic() + 120
    while True:
        found = registered(system, service)
        pids = [pid_at(system, service, address_of(system, service, name)) for name in found]
        if len(found) == COUNTS[service] and pids[0] is not None:
            return found[0], pids[0]
        assert time.monotonic() < deadline, system.log
        time.sleep(0.1)


def registered(system: System, service: str) -> list[str]:
    """The instances of a service that are alive, oldest first."""
    socket = Folders(system.folder / "state").socket("redis")
    prefix = Keys("tiny").prefix
    with redis.Redis(unix_socket_path=str(socket)) as client:
        now_ms = client.time()[0] * 1000
        found = client.zrangebyscore(f"{prefix}:instances:{service}", now_ms, "+inf")
    return [instance.decode() for instance in found]


def address_of(system: System, service: str, instance: str) -> str:
    socket = Folders(system.folder / "state").socket("redis")
    with redis.Redis(unix_socket_path=str(socket)) as client:
        found: Any = client.hget(f"{Keys('tiny').prefix}:addresses:{service}", instance)
    return str(found, "ascii")


def pid_at(system: System, service: str, address: str) -> int | None:
    """The process that listens at an address, if there is one."""
    for pid in system.pids()[service]:
        with contextlib.suppress(psutil.NoSuchProcess):
            sockets = psutil.Process(pid).net_connections("unix")
            if any(str(socket.laddr) == address.removeprefix("unix:") for socket in sockets):
                return pid
    return None

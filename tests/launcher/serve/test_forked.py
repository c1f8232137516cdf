"""`tessera serve` forks its services from processes that have imported their libraries: each is one of its own."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

from tests.support.processes.system import System
from tests.support.waiting import until

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks on Linux alone"),
]
SERVICES = ("gateway", "scheduler", "preprocess", "vision_encoder", "decoder")
KEY = "the-key-of-the-system"


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with System(None, "--api-key", KEY) as running:
        yield running


def fork_servers(system: System) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(system.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or it is not collected yet
            if any(word.endswith("fork_server.py") for word in child.cmdline()):
                found.append(child)
    return found


def ends(pid: int) -> set[str]:
    """The sockets and pipes that a process has open."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(descriptor))
        except FileNotFoundError:
            continue
    return {name for name in found if name.startswith(("socket:", "pipe:"))}


def ask(system: System) -> str | None:
    with OpenAI(base_url=system.base_url, api_key=KEY, max_retries=20) as client:
        answer = client.chat.completions.create(
            model="tessera-demo",
            messages=[{"role": "user", "content": "What is 2 + 2?"}],
            max_tokens=8,
            temperature=0,
        )
    return answer.choices[0].message.content


def replaced(system: System, service: str, before: int) -> Callable[[], bool]:
    """Whether another process of the service runs, and the system is ready."""

    def check() -> bool:
        pids = system.pids().get(service, [])
        return len(pids) == 1 and before not in pids and system.ready()

    return check


def test_each_service_is_a_child_of_the_launcher_with_a_session_and_a_command_line_of_its_own(
    system: System,
) -> None:
    assert len(fork_servers(system)) == 2
    assert "not forked" not in system.log
    for service in SERVICES:
        [pid] = system.pids()[service]
        process = psutil.Process(pid)
        assert process.ppid() == system.pid
        assert os.getsid(pid) == pid
        assert [word for word in process.cmdline() if word][1:] == [
            "-P",
            "-m",
            f"services.{service}",
        ]
    workers = {psutil.Process(*system.pids()[name]).nice() for name in SERVICES[2:]}
    [gateway] = system.pids()["gateway"]
    assert len(workers) == 1 and workers.pop() > psutil.Process(gateway).nice()


def test_no_two_services_have_a_socket_or_a_pipe_in_common(system: System) -> None:
    pids = [pid for service in SERVICES for pid in system.pids()[service]]
    pids += [process.pid for process in fork_servers(system)]
    found = [ends(pid) for pid in pids]
    assert all(found)
    assert len(set().union(*found)) == sum(map(len, found))


def test_the_key_is_in_no_process_but_the_gateway(system: System) -> None:
    for process in fork_servers(system):
        assert KEY not in Path(f"/proc/{process.pid}/environ").read_text()


@pytest.mark.parametrize("service", SERVICES)
def test_a_killed_service_is_forked_again(system: System, service: str) -> None:
    expected = ask(system)
    pid = system.kill(service)
    until(replaced(system, service, pid), f"another {service}")
    assert not psutil.pid_exists(pid)
    assert f"{service.replace('_', '-')} was ended by SIGKILL, starting it again" in system.log
    assert ask(system) == expected
    assert "not forked" not in system.log


def test_a_service_that_is_told_to_end_ends_with_status_0(system: System) -> None:
    pid = system.kill("scheduler", with_signal=signal.SIGTERM)
    until(replaced(system, "scheduler", pid), "another scheduler")
    assert "scheduler ended with status 0, starting it again" in system.log


def test_without_fork_servers_services_go_on_and_are_started(system: System) -> None:
    expected = ask(system)
    before = system.pids()
    killed = [process.pid for process in fork_servers(system)]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not fork_servers(system), "the end of the fork servers")
    until(lambda: not any(map(psutil.pid_exists, killed)), "that the launcher collects them")
    for service in ("decoder", "gateway"):
        pid = system.kill(service)
        until(replaced(system, service, pid), f"another {service}")
    after = system.pids()
    for service in ("scheduler", "preprocess", "vision_encoder"):
        assert after[service] == before[service]
    assert ask(system) == expected
    pids = system.all_pids()
    assert system.stop() == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)

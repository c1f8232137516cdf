"""Chat templates in confined processes: what one takes too much of is said, and the next is rendered."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shared.errors import Unavailable
from shared.text.templates.processes import TemplateLimit, TemplateProcesses, TemplateRefusal

FINE = "{{ messages[0].content }}!"
GIVEN: dict[str, Any] = {"messages": [{"role": "user", "content": "hi \U0001f600 \ud800"}]}

MEMORY, TIME = "took more than 256 MB of memory", "took over 1 s of processor time"

# These may take as long as a slow machine needs to fill the memory.
LASTING = 60


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    with TemplateProcesses(memory_bytes=256 << 20, processor_s=LASTING) as made:
        yield made


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ 'a' * 10**10 }}", MEMORY),
        ("{{ 'x' | center(10**10) }}", MEMORY),
        ("{{ '%010000000000d' % 1 }}", MEMORY),
        ("{{ ([0] * 10**9) | length }}", MEMORY),
        ("{% set n = namespace(s='ab' * 1000) %}"
         "{% for i in range(90000) %}{% set n.s = n.s ~ n.s %}{% endfor %}", MEMORY),
        ("{% set n = namespace(s=[1]) %}"
         "{% for i in range(90000) %}{% set n.s = n.s + n.s %}{% endfor %}", MEMORY),
        ("{{ (['ab' * 10**6] * 10**5) | join }}", MEMORY),
        ("{{ range(100000) | map('string') | map('center', 100000) | list | length }}", MEMORY),
        ("{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}", "nested too deep"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "wrote over 33554432 characters"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not compile"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "does not compile|ended its process"),
        ("{% for %}", "does not compile"),
        ("{{ raise_exception('no tools here') }}", "^no tools here$"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ lipsum.__globals__['os'].getpid() }}", "unsafe|undefined"),
    ],
)  # fmt: skip
def test_bounds(processes: TemplateProcesses, source: str, said: str) -> None:
    with pytest.raises(TemplateRefusal, match=said):
        processes.render(source, GIVEN)
    assert processes.render(FINE, GIVEN) == "hi \U0001f600 \ud800!"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ (9 ** (9 ** 9)) > 1 }}", f"{TIME}|{MEMORY}"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", TIME),
    ],
)
def test_bounds_of_time(source: str, said: str) -> None:
    with TemplateProcesses(memory_bytes=256 << 20, processor_s=1) as processes:
        with pytest.raises(TemplateRefusal, match=said):
            processes.render(source, GIVEN)
        assert processes.render(FINE, GIVEN) == "hi \U0001f600 \ud800!"


def test_what_a_template_takes_too_much_of_is_its_limit_and_not_its_refusal(
    processes: TemplateProcesses,
) -> None:
    with pytest.raises(TemplateLimit):
        processes.render("{{ 'a' * 10**10 }}", GIVEN)
    with pytest.raises(TemplateRefusal) as caught:
        processes.render("{{ raise_exception('no') }}", GIVEN)
    assert not isinstance(caught.value, TemplateLimit)


def test_what_templates_load_late_is_there(processes: TemplateProcesses) -> None:
    """A confined process can open no file when it first needs a module."""
    source = (
        "{{ strftime_now('%Y %Z') | length > 3 }} {{ {'a': [1]} | pprint }} {{ 'a b c' | wordwrap(3) }}"
        " {{ 'ä'.encode('utf-16') | length }} {{ 'ä'.encode('punycode') | length }} {{ 'a b' | urlencode }}"
        " {{ 'http://a.b' | urlize }} {{ {'a': 1} | xmlattr }} {{ 'a' | forceescape }} {{ lipsum(1) | length > 9 }}"
        " {{ [3, 1] | sort }} {{ 1.5 | round }} {{ '<b>x</b>' | striptags }} {{ [{'a': 1}] | groupby('a') }}"
        " {{ 12345 | filesizeformat }} {{ {'b': 'ü'} | tojson(indent=1) }} {{ [1, 2] | random > 0 }}"
    )
    text = processes.render(source, {})
    assert text.startswith("True {'a': [1]} a b\nc 4 ")


def test_a_process_is_kept_and_one_that_has_grown_is_replaced() -> None:
    with TemplateProcesses(memory_bytes=256 << 20, processor_s=LASTING) as processes:
        processes.render(FINE, GIVEN)
        (first,) = processes.pids
        processes.render(FINE, GIVEN)
        assert processes.pids == [first]
        large = "a" * 20_000_000
        assert processes.render(large, {}) == large  # it is kept, compiled
        processes.render(FINE, GIVEN)
        assert first not in processes.pids


def test_a_process_that_is_killed_costs_nothing() -> None:
    with TemplateProcesses() as processes:
        processes.render(FINE, GIVEN)
        os.kill(processes.pids[0], signal.SIGKILL)
        assert processes.render(FINE, GIVEN)


def test_several_threads_have_processes_of_their_own(processes: TemplateProcesses) -> None:
    texts: dict[int, str] = {}

    def render(number: int) -> None:
        content = f"{number} " * 20_000
        given = {"messages": [{"role": "user", "content": content}]}
        for _ in range(5):
            texts[number] = processes.render(FINE, given)
            assert texts[number] == content + "!"

    threads = [threading.Thread(target=render, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 3


def test_none_is_had_once_they_are_closed() -> None:
    processes = TemplateProcesses()
    processes.render(FINE, GIVEN)
    (pid,) = processes.pids
    processes.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(Unavailable):
        processes.render(FINE, GIVEN)

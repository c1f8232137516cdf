"""Which set of CPU kernels runs: what can run here is asked and timed in processes of their own, once for a host.

Small libraries stand for the kernels where one has to misbehave or has to be slow; the process that tries them, the
files and the locks are the real ones.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.cpu_kernels import binding, choice, compiling, instruction_sets, self_testing, trial
from shared.cpu_kernels.choice import choose
from shared.cpu_kernels.findings import FindingsFile
from shared.cpu_kernels.instruction_sets import INSTRUCTION_SETS, InstructionSet, Processor
from shared.errors import InvalidRequest

AMX, AVX512, AVX512_BF16, AVX2 = INSTRUCTION_SETS[:4]
SETS = (AMX, AVX512, AVX2)
NAMES = [known.name for known in SETS]
ROOT = Path(__file__).parents[2]

needs_compiler = pytest.mark.skipif(
    compiling.compiler() is None, reason="there is no compiler here"
)

# `ADMIT`: what is done when it is asked; `TURNS`: how long a row takes; `STARTED`: a file that grows with each trial.
LIBRARY = """
#include <signal.h>
#include <stdio.h>
int tessera_admit(void) { ADMIT; }
void tessera_start(int threads) { FILE* file = fopen(STARTED, "a"); fputc('.', file); fclose(file); }
void tessera_try_linear(void* w, long inputs, long outputs, void* x, void* y, long rows) {
    LINEAR;
    for (volatile long turn = 0; turn < TURNS * (rows + 20); turn++) {}
}
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compiles each library of a kind once."""
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "library.c").write_text(LIBRARY)

    def make(
        admit: str = "return 0", turns: int = 40, linear: str = "", started: str = "/dev/null"
    ) -> Path:
        made = folder / f"{abs(hash((admit, turns, linear, started)))}.so"
        if not made.exists():
            defined = (
                f"ADMIT={admit}",
                f"TURNS={turns}",
                f"LINEAR={linear}",
                f'STARTED="{started}"',
            )
            flags = [f"-D{each}" for each in defined]
            command = [str(compiling.compiler()), "-x", "c", "-shared", "-fPIC", *flags]
            subprocess.run([*command, str(folder / "library.c"), "-o", str(made)], check=True)
        return made

    return make


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries lie and findings are kept, of a processor that names three sets."""
    monkeypatch.setattr(instruction_sets, "named_by_processor", lambda **_: SETS)
    monkeypatch.setattr(compiling, "folders", lambda: [tmp_path])
    return tmp_path


def install(folder: Path, **made: Path) -> None:
    for known in SETS:
        (folder / compiling.file_name(known)).write_bytes(made[known.name].read_bytes())


def times(prompt: float, few: float = 1.0, one: float = 1.0) -> trial.Times:
    return {263: prompt, 4: few, 1: one}


@pytest.mark.parametrize(
    ("measured", "ranked"),
    [
        ({"amx": times(1), "avx512": times(8), "avx2": times(12)}, ["amx", "avx512", "avx2"]),
        ({"amx": times(12), "avx512": times(8), "avx2": times(30)}, ["avx512", "amx", "avx2"]),
        # A lead of 5 % is none, one of 11 % is: the figure is a mean, half of it that of prompts.
        ({"amx": times(1.1), "avx512": times(1), "avx2": times(1)}, ["amx", "avx512", "avx2"]),
        ({"amx": times(1.24), "avx512": times(1), "avx2": times(2)}, ["avx512", "amx", "avx2"]),
        # Faster prompts, slower tokens: what is lost is weighed against what is won.
        ({"amx": times(1, 2, 2), "avx512": times(1.5)}, ["avx512", "amx"]),
        ({"amx": times(1, 1.2, 1.2), "avx512": times(2)}, ["amx", "avx512"]),
        # The best of all leads two that are alike, which then go by their names.
        ({"avx2": times(4), "avx512": times(4.2), "amx": times(1)}, ["amx", "avx512", "avx2"]),
        ({"avx2": times(1)}, ["avx2"]),
        ({}, []),
    ],
)  # fmt: skip
def test_the_fastest_goes_first_and_a_small_lead_is_none(
    measured: dict[str, trial.Times], ranked: list[str]
) -> None:
    assert trial.rank(measured, NAMES) == ranked


def test_names_decide_otherwise_on_zen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_sets, "of_this_architecture", lambda: INSTRUCTION_SETS[:4])
    flags = AVX512_BF16.needs
    for vendor, first in (("GenuineIntel", AVX512), ("AuthenticAMD", AVX512_BF16)):
        here = Processor(vendor, (vendor,), flags)
        monkeypatch.setattr(instruction_sets, "processor", lambda here=here: here)
        named = instruction_sets.named_by_processor()
        assert named[0] == first
        assert set(named) == {AVX512, AVX512_BF16, AVX2}


@needs_compiler
def test_the_kernels_are_tried_once_and_the_file_is_used_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = choose("", tmp_path)
    assert first.sets
    assert first.warnings == ()
    monkeypatch.setattr(trial, "_run", None)  # a second trial would fail
    assert choose("", tmp_path) == first
    if len(first.sets) > 1:
        assert first.why.startswith("by trial")
        [file] = tmp_path.glob("trial-*.json")
        kept = json.loads(file.read_text())["times"]
        assert kept.keys() == {known.name for known in first.sets}
        assert choice.status("", tmp_path) == f"{first.sets[0].name}, compiled, {first.why}"


@needs_compiler
def test_the_fastest_library_is_chosen_whatever_its_name(
    folder: Path, libraries: Callable[..., Path]
) -> None:
    slow, fast = libraries(turns=400), libraries(turns=40)
    install(folder, amx=slow, avx512=slow, avx2=fast)
    chosen = choose("")
    assert chosen.sets[0] == AVX2
    assert chosen.why.startswith("by trial (a")


@needs_compiler
@pytest.mark.parametrize(
    ("admit", "said", "lasts"),
    [
        ("return 1", "the system does not permit it", False),
        ("return 2", "this processor adds up in another order", True),
        ("raise(SIGILL); return 0", "it ends the process with SIGILL", True),
        ("for (;;) {} return 0", "it does not come to an end", True),
    ],
)
def test_a_set_that_cannot_be_used_is_passed_over_with_a_line(
    folder: Path,
    libraries: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    admit: str,
    said: str,
    lasts: bool,
) -> None:
    slow = libraries(turns=400)
    install(folder, amx=libraries(admit), avx512=libraries(), avx2=slow)
    chosen = choose("")
    assert chosen.sets == (AVX512, AVX2)
    [warning] = chosen.warnings
    assert warning.startswith(f"amx is passed over: {said}")
    with pytest.raises(ValueError, match=f"'amx': {said}.*; it may be avx512, avx2, none"):
        choose("amx")
    assert choice.status().startswith("avx512, compiled, by trial")
    assert said in choice.status()
    # What the system has refused it may permit later; what the processor does wrong it will do again.
    install(folder, amx=libraries(turns=4), avx512=libraries(), avx2=slow)
    assert (choose("").sets[0] == AMX) is not lasts


@needs_compiler
@pytest.mark.skipif(
    not self_testing.with_emulated_tiles().needs <= instruction_sets.processor().flags,
    reason="the self-test emulates tiles beside vectors of AVX-512",
)
def test_emulated_tiles_never_serve(tmp_path: Path) -> None:
    emulating = self_testing.with_emulated_tiles()
    source, library = tmp_path / "library.cpp", tmp_path / "library.so"
    source.write_text(
        f'#include "{compiling.SOURCES}/admission.h"\n'
        'extern "C" int tessera_admit() { return tessera::admit(); }\n'
    )
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", *emulating.flags]
    subprocess.run([str(compiling.compiler()), *flags, "-o", str(library), str(source)], check=True)
    found = trial.admit({"amx": library})["amx"]
    assert found.problem == "its tiles are those of a self-test, in plain C++"
    assert found.lasting
    served = {flag for known in instruction_sets.all_of_this_architecture() for flag in known.flags}
    assert {flag for flag in emulating.flags if flag.startswith("-D")}.isdisjoint(served)


@needs_compiler
def test_a_library_that_fails_in_the_trial_leaves_the_others(
    folder: Path, libraries: Callable[..., Path]
) -> None:
    install(
        folder, amx=libraries(linear="raise(SIGILL)"), avx512=libraries(), avx2=libraries(turns=400)
    )
    chosen = choose("")
    assert chosen.sets == (AVX512, AVX2)
    assert chosen.warnings == ("amx is passed over: it ends the process with SIGILL",)


@needs_compiler
def test_what_this_process_may_not_open_is_passed_over(
    folder: Path, libraries: Callable[..., Path]
) -> None:
    install(folder, amx=libraries("return 1"), avx512=libraries(), avx2=libraries())
    with pytest.raises(PermissionError, match="the system does not permit it"):
        binding.open_kernels(AMX, 1)


@needs_compiler
def test_asking_for_one_that_is_refused_fails_at_start(
    folder: Path, libraries: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(folder, amx=libraries("return 2"), avx512=libraries(), avx2=libraries())
    monkeypatch.setenv("TESSERA_CPU_INSTRUCTIONS", "amx")
    binding.load_kernels.cache_clear()
    with pytest.raises(InvalidRequest, match=r"adds up in another order .*; it may be avx512"):
        binding.load_kernels(1)


@needs_compiler
def test_processes_that_start_at_once_make_one_trial(
    folder: Path, libraries: Callable[..., Path], tmp_path: Path
) -> None:
    started = tmp_path / "started"
    one = libraries(started=str(started))
    install(folder, amx=one, avx512=one, avx2=one)
    script = f"""
from pathlib import Path
from shared.cpu_kernels import choice, compiling, instruction_sets
instruction_sets.named_by_processor = lambda **_: tuple(
    known for known in instruction_sets.INSTRUCTION_SETS if known.name in {NAMES!r})
compiling.folders = lambda: [Path({str(folder)!r})]
print(choice.choose("").why)
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]  # fmt: skip
    said = {process.communicate()[0] for process in processes}
    assert len(said) == 1
    assert said.pop().startswith("by trial")
    assert len(started.read_text()) == len(SETS)


@needs_compiler
@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"problems": {}}', '{"problems": {"amx": ""}, "times": {"amx": {"1": 0}}}'],
)  # fmt: skip
def test_a_damaged_file_is_none(folder: Path, libraries: Callable[..., Path], content: str) -> None:
    file = FindingsFile(SETS, [folder])
    one = libraries()
    install(folder, amx=one, avx512=one, avx2=one)
    choose("")
    [kept] = folder.glob("trial-*.json")
    assert file.read().times.keys() == set(NAMES)
    kept.write_text(content)
    assert not file.read().times
    assert not file.read().problems


@needs_compiler
def test_where_nothing_can_be_written_each_process_tries_and_says_so(
    folder: Path, libraries: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = libraries()
    install(folder, amx=one, avx512=one, avx2=one)
    monkeypatch.setattr(compiling, "is_writable", lambda _: False)
    chosen = choose("", folder / "elsewhere")
    assert chosen.why.startswith("by trial")
    assert chosen.warnings == (
        f"each process tries the CPU kernels anew: cannot write to {folder}/elsewhere",
    )
    assert not list(folder.glob("trial*"))


@needs_compiler
def test_one_process_that_cannot_be_started_leaves_what_needs_no_proof(
    folder: Path, libraries: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = libraries()
    install(folder, amx=one, avx512=one, avx2=one)
    monkeypatch.setattr(trial, "_PROGRAM", folder / "missing.py")
    chosen = choose("")
    assert chosen.sets == (AVX512, AVX2)
    assert chosen.why == "the first by name"
    assert chosen.warnings[0].startswith("amx is passed over: the process that tries them fails")
    assert not FindingsFile(SETS, [folder]).read().problems


@needs_compiler
def test_what_does_not_compile_is_passed_over_by_processes_that_do_not_compile_too(
    folder: Path, libraries: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a compiler that is older than a set."""
    unknown = InstructionSet("amx", "x86_64", frozenset(), ("-mno-such-instructions",))
    sets = (unknown, AVX512, AVX2)
    monkeypatch.setattr(instruction_sets, "named_by_processor", lambda **_: sets)
    for known, library in ((AVX512, libraries()), (AVX2, libraries(turns=400))):
        (folder / compiling.file_name(known)).write_bytes(library.read_bytes())
    assert choose("", may_compile=False).sets == sets
    chosen = choose("")
    assert chosen.sets == (AVX512, AVX2)
    [warning] = chosen.warnings
    assert warning.startswith("amx is passed over: it does not compile: ")
    assert choose("", may_compile=False) == chosen


def test_what_is_not_compiled_is_not_tried_before_it_is(folder: Path) -> None:
    if compiling.compiler() is None:
        assert choose("", may_compile=False).sets == ()
        return
    assert choose("", may_compile=False).sets == SETS
    assert choose("avx2", may_compile=False).sets == (AVX2,)
    assert choice.status().startswith("amx, to be compiled, the first by name")
    assert choice.uncompiled("") == NAMES

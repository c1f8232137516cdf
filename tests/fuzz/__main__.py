"""`python -m tests.fuzz`; see the package."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor import FileDescriptor, ServiceDescriptor

from inference import inference_pb2
from services.launcher.state.folders import Folders
from tessera.artifact.v1 import artifact_pb2
from tessera.decoder.v1 import decoder_pb2
from tessera.gateway.v1 import chat_pb2, vectors_pb2
from tessera.preprocess.v1 import preprocess_pb2
from tessera.scheduler.v1 import scheduler_pb2
from tessera.vision_encoder.v1 import vision_encoder_pb2
from tests.fuzz.grpc_target import GrpcTarget
from tests.fuzz.health import Health
from tests.fuzz.reference import Reference
from tests.fuzz.rest_target import RestTarget
from tests.fuzz.run import Found, Run, Target
from tests.fuzz.values import MODEL
from tests.support.checkpoints import make_checkpoint
from tests.support.processes.system import System

# The gRPC services at the socket of each of ours. A decoder's binding is refused to all but a scheduler that knows its
# incarnation, which no input does.
_INTERNAL: dict[str, list[FileDescriptor]] = {
    "decoder": [decoder_pb2.DESCRIPTOR],
    "preprocess": [preprocess_pb2.DESCRIPTOR, artifact_pb2.DESCRIPTOR],
    "scheduler": [scheduler_pb2.DESCRIPTOR],
    "vision_encoder": [vision_encoder_pb2.DESCRIPTOR, artifact_pb2.DESCRIPTOR],
}

_PUBLIC = (chat_pb2.DESCRIPTOR, vectors_pb2.DESCRIPTOR, inference_pb2.DESCRIPTOR)


def main() -> int:
    """Returns 0 if nothing broke, else 1."""
    settings = _arguments().parse_args()
    with TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / MODEL, "qwen2_vl")
        flags = ["--max-model-len", "256", "--max-choices", "4", "--dtype", "float32"]
        flags += ["--tool-call-parser", "hermes", "--reasoning-parser", "think"]
        flags += ["--allowed-adapter-dir", folder]
        with System(checkpoint, *flags) as system:
            found = asyncio.run(_fuzz(system, settings))
    return 1 if found.broken else 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="send for at most so long")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="send at most so many")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds draw equal inputs")
    parser.add_argument(
        "--targets", default="", help="their names, separated by commas; all unless given"
    )
    parser.add_argument("--replay", default="", metavar="TARGET:SEED:NUMBER", help="send one again")
    return parser


async def _fuzz(system: System, settings: argparse.Namespace) -> Found:
    asked = settings.targets.split(",") if settings.targets else []
    targets = [target for target in _targets(system) if not asked or target.name in asked]
    health = Health(system)
    reference = Reference(system.base_url, MODEL)
    await reference.check()
    try:
        if settings.replay:
            name, seed, number = settings.replay.split(":")
            target = next(target for target in targets if target.name == name)
            found = await Run(targets, int(seed), reference, health).replay(target, int(number))
        else:
            run = Run(targets, settings.seed, reference, health)
            found = await run.run(settings.inputs, settings.seconds)
    finally:
        for target in targets:
            await target.close()
    found.broken |= {line: f"in the log: {line}" for line in health.tracebacks()}
    _report(found, health)
    return found


def _targets(system: System) -> Sequence[Target]:
    targets: list[Target] = [
        RestTarget("127.0.0.1", system.port),
        GrpcTarget("grpc", system.grpc_address, _services(_PUBLIC)),
    ]
    for socket in sorted(Folders(system.folder / "state").sockets.glob("*.sock")):
        files = _INTERNAL.get(socket.stem.rstrip("-0123456789").replace("-", "_"))
        if files:
            targets.append(GrpcTarget(socket.stem, f"unix:{socket}", _services(files)))
    return targets


def _services(files: Sequence[FileDescriptor]) -> list[ServiceDescriptor]:
    return [service for file in files for service in file.services_by_name.values()]


def _report(found: Found, health: Health) -> None:
    for target, answers in found.answers.items():
        print(f"{target}: {', '.join(f'{count} {kind}' for kind, count in answers.most_common())}")
    print(f"{found.inputs} inputs in {found.seconds:.0f} s; resident memory:\n{health.memory()}")
    for line in found.broken.values():
        print(f"BROKEN {line}")
    print("broken" if found.broken else "nothing broke", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

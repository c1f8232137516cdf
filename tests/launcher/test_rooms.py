"""What each process is told reaches the settings of its room."""

import importlib
import json
from pathlib import Path

import pytest

from services.launcher.service_commands import PASSED_ON, Rooms, doors
from services.launcher.settings import ServeSettings
from services.launcher.state.folders import Folders
from services.launcher.supervise.process import Program
from shared.settings import RoomSettings

REDIS = "unix:///somewhere/redis.sock"
NO_ENCODER = ["decoder", "preprocess"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "Tiny-VL"
    folder.mkdir()
    config = {"architectures": ["LlavaForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "state")


def room_settings(room: str, program: Program, monkeypatch: pytest.MonkeyPatch) -> RoomSettings:
    """The settings that the room itself reads from the environment it is given."""
    module = importlib.import_module(f"services.{room}.settings")
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, RoomSettings) and kind is not RoomSettings
    ]
    assert len(kinds) == 1, room
    for name, value in program.environment.items():
        monkeypatch.setenv(name, value)
    loaded: RoomSettings = kinds[0].load([], prog=room)
    return loaded


def test_one_of_each_unless_told_otherwise(checkpoint: Path, folders: Folders) -> None:
    rooms = Rooms(ServeSettings(model=checkpoint), folders, REDIS)
    programs = [*rooms.gateways(), *rooms.schedulers(), *rooms.workers()]
    assert sorted(program.name for program in programs) == [
        "decoder",
        "gateway",
        "preprocess",
        "scheduler",
        "vision-encoder",
    ]
    sockets = [program.socket for program in programs if program.socket]
    assert len(set(sockets)) == 4
    assert all(len(bytes(path)) < 100 for path in sockets)


def test_a_model_without_eyes_gets_no_encoder(checkpoint: Path, folders: Folders) -> None:
    settings = ServeSettings(model=checkpoint, language_model_only=True)
    assert [program.name for program in Rooms(settings, folders, REDIS).workers()] == NO_ENCODER
    (checkpoint / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    settings = ServeSettings(model=checkpoint)
    assert [program.name for program in Rooms(settings, folders, REDIS).workers()] == NO_ENCODER


def test_replicas_have_names_and_sockets_of_their_own(checkpoint: Path, folders: Folders) -> None:
    settings = ServeSettings(model=checkpoint, decoders=2, vision_encoders=3)
    workers = Rooms(settings, folders, REDIS).workers()
    names = [program.name for program in workers]
    assert [name for name in names if name.startswith("decoder")] == ["decoder-0", "decoder-1"]
    assert len({program.socket for program in workers}) == len(workers) == 6


def test_gateways_have_doors_of_their_own(checkpoint: Path) -> None:
    settings = ServeSettings(model=checkpoint, gateways=2, port=8100)
    assert [(door.port, door.grpc_port) for door in doors(settings)] == [(8100, 8101), (8110, 8111)]
    assert doors(settings)[1].url == "http://127.0.0.1:8110"
    with_tls = ServeSettings(model=checkpoint, port=8100, ssl_certfile=Path("chain.pem"))
    assert doors(with_tls)[0].url == "https://127.0.0.1:8100"


@pytest.mark.parametrize(
    "room", ["gateway", "scheduler", "preprocess", "vision_encoder", "decoder"]
)
def test_every_room_reads_what_it_is_told(
    room: str, checkpoint: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 96,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "num_host_blocks": 5,
        "step_target_ms": 120.0,
        "scheduling_policy": "priority",
        "preemption_mode": "swap",
        "kv_cache_memory_bytes": 1 << 24,
        "gpu_memory_utilization": 0.25,
        "max_choices": 7,
        "max_prompts": 5,
        "max_logprobs": 9,
        "api_key": "sesame",
        "api_key_file": checkpoint / "keys",
        "allow_unauthenticated": True,
        "redis_password_file": checkpoint / "password",
        "share_prefix_cache": True,
        "ssl_certfile": checkpoint / "chain.pem",
        "ssl_keyfile": checkpoint / "key.pem",
        "ssl_ca_certs": checkpoint / "ca.pem",
        "ssl_cert_reqs": 2,
        "cors_allow_origins": "https://chat.example.org",
        "allowed_hosts": "chat.example.org",
        "chat_template": checkpoint / "config.json",
        "language_model_only": True,
        "limit_mm_per_prompt": "image=2",
        "max_video_frames": 12,
        "allowed_media_domains": "example.org,example.com",
        "allow_private_media": True,
        "max_waiting_requests": 11,
        "max_waiting_tokens": 12_000,
        "queue_timeout": 13.0,
        "first_token_timeout": 14.0,
        "request_timeout": 15.0,
        "tenant_weights": "user:alice=2",
    }
    assert set(values) == set(PASSED_ON)
    settings = ServeSettings(
        model=checkpoint, port=8200, log_level="warning", vision_encoders=1, **values
    )
    rooms = Rooms(settings, folders, REDIS)
    name = room.replace("_", "-")
    programs = [*rooms.gateways(), *rooms.schedulers(), *rooms.workers()]
    program = next(program for program in programs if program.name == name)
    assert program.command[-2:] == ["-m", f"services.{room}"]

    told = room_settings(room, program, monkeypatch)
    assert told.model == checkpoint
    assert told.model_name == "Tiny-VL"
    assert told.redis_url == REDIS
    assert told.artifact_dir == folders.artifacts
    assert told.log_level == "warning"
    assert told.heartbeat == folders.heartbeat(name)
    for field, reached in PASSED_ON.items():
        if room in reached:
            assert str(getattr(told, field)) == str(values[field]), field
    if room == "gateway":
        assert (told.port, told.grpc_port) == (8200, 8201)  # type: ignore[attr-defined]
    else:
        assert told.listen == f"unix:{program.socket}"


def test_keys_stand_in_no_command_line_and_in_the_gateways_environment_alone(
    checkpoint: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_API_KEY", "sesame")
    monkeypatch.setenv("TESSERA_TENANT_WEIGHTS", "key:sesame=2")
    settings = ServeSettings.load([str(checkpoint)], prog="tessera serve")
    assert settings.api_keys == ("sesame",)
    rooms = Rooms(settings, folders, REDIS)
    for program in [*rooms.gateways(), *rooms.schedulers(), *rooms.workers()]:
        assert not any("sesame" in word for word in program.command)
        known = [name for name, value in program.environment.items() if "sesame" in value]
        assert bool(known) is (program.room == "gateway"), (program.name, known)


def test_what_is_not_given_is_left_to_the_room(checkpoint: Path, folders: Folders) -> None:
    program = Rooms(ServeSettings(model=checkpoint), folders, REDIS).workers()[0]
    assert not {"TESSERA_DECODER_DTYPE", "TESSERA_DECODER_MAX_NUM_SEQS"} & set(program.environment)

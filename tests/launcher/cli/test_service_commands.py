"""What `serve` is given reaches the settings of each service."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.launcher.service_commands import SERVICE_SETTINGS, ServiceCommands, gateway_addresses
from services.launcher.settings import ServeSettings
from services.launcher.state.folders import Folders
from services.launcher.supervise.process import Program
from shared.errors import InvalidRequest
from shared.settings import ServiceSettings

REDIS = "unix:///somewhere/redis.sock"
NO_ENCODER = ["decoder", "preprocess"]
# What the launcher decides for each service.
OWN = {
    "model",
    "served_model_name",
    "redis_url",
    "log_level",
    "host",
    "port",
    "grpc_port",
    "shutdown_timeout",
    "metrics_listen",
}
VALUES = (
    3,
    4096,
    True,
    0.25,
    "llava",
    "json",
    "int8",
    "nz",
    "priority",
    "swap",
    "on",
    "suffix",
    "image=2",
    "native",
    "openai",
    "portable",
    "last",
    "embed",
    "/somewhere",
)
MODULES = "small=/somewhere"


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


def service_settings(
    service: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> ServiceSettings:
    """The settings that the service itself reads from the environment it is given."""
    for name, value in program.environment.items():
        monkeypatch.setenv(name, value)
    return SERVICE_SETTINGS[service].load([], prog=service)


def another_value(name: str) -> Any:
    """A value that the setting may have and does not have by default."""
    if name == "lora_modules":
        return MODULES
    default = ServeSettings.model_fields[name].default
    for value in VALUES:
        try:
            read = getattr(ServeSettings.model_validate({name: value}), name)
        except ValidationError:
            continue
        if read != default:
            return read
    raise AssertionError(f"no value for {name}")


def test_one_process_of_each_service_by_default(checkpoint: Path, folders: Folders) -> None:
    commands = ServiceCommands(ServeSettings(model=checkpoint), folders, REDIS)
    programs = [*commands.gateways(), *commands.schedulers(), *commands.workers()]
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


def test_a_text_only_model_gets_no_encoder(checkpoint: Path, folders: Folders) -> None:
    settings = ServeSettings(model=checkpoint, language_model_only=True)
    assert [
        program.name for program in ServiceCommands(settings, folders, REDIS).workers()
    ] == NO_ENCODER
    (checkpoint / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    settings = ServeSettings(model=checkpoint)
    assert [
        program.name for program in ServiceCommands(settings, folders, REDIS).workers()
    ] == NO_ENCODER


def test_replicas_have_names_and_sockets_of_their_own(checkpoint: Path, folders: Folders) -> None:
    settings = ServeSettings(model=checkpoint, decoders=2, vision_encoders=3)
    workers = ServiceCommands(settings, folders, REDIS).workers()
    names = [program.name for program in workers]
    assert [name for name in names if name.startswith("decoder")] == ["decoder-0", "decoder-1"]
    assert len({program.socket for program in workers}) == len(workers) == 6


def test_each_gateway_has_its_own_address(checkpoint: Path) -> None:
    settings = ServeSettings(model=checkpoint, gateways=2, port=8100)
    addresses = gateway_addresses(settings)
    assert [(one.port, one.grpc_port) for one in addresses] == [(8100, 8101), (8110, 8111)]
    assert addresses[1].url == "http://127.0.0.1:8110"
    with_tls = ServeSettings(model=checkpoint, port=8100, ssl_certfile=Path("chain.pem"))
    assert gateway_addresses(with_tls)[0].url == "https://127.0.0.1:8100"


@pytest.mark.parametrize(
    ("service", "known"),
    [
        ("gateway", "max_choices"),
        ("scheduler", "step_target_ms"),
        ("preprocess", "chat_template"),
        ("vision_encoder", "dtype"),
        ("decoder", "max_num_seqs"),
    ],
)
def test_every_service_reads_what_it_is_given(
    service: str, known: str, checkpoint: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ServeSettings.model_fields.keys() & SERVICE_SETTINGS[service].model_fields.keys() - OWN
    assert known in names
    values = {name: another_value(name) for name in names}
    settings = ServeSettings(
        model=checkpoint, port=8200, log_level="warning", vision_encoders=1, **values
    )
    commands = ServiceCommands(settings, folders, REDIS)
    name = service.replace("_", "-")
    programs = [*commands.gateways(), *commands.schedulers(), *commands.workers()]
    program = next(program for program in programs if program.name == name)
    assert program.command[-2:] == ["-m", f"services.{service}"]

    settings_read = service_settings(service, program, monkeypatch)
    assert settings_read.model == checkpoint
    assert settings_read.model_name == "Tiny-VL"
    assert settings_read.redis_url == REDIS
    assert settings_read.artifact_dir == folders.artifacts
    assert settings_read.log_level == "warning"
    assert settings_read.heartbeat == folders.heartbeat(name)
    for name, value in values.items():
        assert getattr(settings_read, name) == value, name
    if service == "gateway":
        assert (settings_read.port, settings_read.grpc_port) == (8200, 8201)  # type: ignore[attr-defined]
    else:
        assert settings_read.listen == f"unix:{program.socket}"


def test_keys_are_in_no_command_line_and_only_in_the_environment_of_gateways(
    checkpoint: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_API_KEY", "sesame")
    monkeypatch.setenv("TESSERA_TENANT_WEIGHTS", "key:sesame=2")
    settings = ServeSettings.load([str(checkpoint)], prog="tessera serve")
    assert settings.api_keys == ("sesame",)
    commands = ServiceCommands(settings, folders, REDIS)
    for program in [*commands.gateways(), *commands.schedulers(), *commands.workers()]:
        assert not any("sesame" in word for word in program.command)
        known = [name for name, value in program.environment.items() if "sesame" in value]
        assert bool(known) is (program.service == "gateway"), (program.name, known)


def test_each_process_has_a_page_of_metrics_on_a_port_of_its_own(
    checkpoint: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServeSettings(model=checkpoint, decoders=2, metrics_listen="[::1]:9100")
    commands = ServiceCommands(settings, folders, REDIS)
    programs = [*commands.gateways(), *commands.schedulers(), *commands.workers()]
    found = {
        program.name: service_settings(program.service, program, monkeypatch).metrics_listen
        for program in programs
    }
    assert commands.metrics == {"launcher": "[::1]:9100", **found}
    assert sorted(commands.metrics.values()) == [f"[::1]:{9100 + n}" for n in range(7)]
    for wrong in ("9100", "127.0.0.1:65535", "127.0.0.1:0", "127.0.0.1:x"):
        settings = ServeSettings(model=checkpoint, metrics_listen=wrong)
        with pytest.raises(InvalidRequest, match="--metrics-listen"):
            ServiceCommands(settings, folders, REDIS)


def test_what_is_not_given_is_left_to_the_service(checkpoint: Path, folders: Folders) -> None:
    program = ServiceCommands(ServeSettings(model=checkpoint), folders, REDIS).workers()[0]
    assert not {"TESSERA_DECODER_DTYPE", "TESSERA_DECODER_MAX_NUM_SEQS"} & set(program.environment)


def environments(programs: list[Program], variable: str) -> dict[str, str | None]:
    """Name -> the variable's value."""
    return {program.name: program.environment.get(variable) for program in programs}


def test_variables_of_libraries_that_are_set_already_stay(
    checkpoint: Path, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HCCL_EXEC_TIMEOUT", raising=False)
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "1800")
    settings = ServeSettings(model=checkpoint, prewarmed_processes=True)
    [decoder] = ServiceCommands(settings, folders, REDIS).workers()[:1]
    assert decoder.environment["HCCL_CONNECT_TIMEOUT"] == "1800"
    assert decoder.environment["HCCL_EXEC_TIMEOUT"] == "60"


def test_npus_are_divided_among_decoders_and_encoders(checkpoint: Path, folders: Folders) -> None:
    settings = ServeSettings(model=checkpoint, decoders=2)
    commands = ServiceCommands(settings, folders, REDIS, npus=[4, 5, 6])
    assert environments(commands.workers(), "ASCEND_RT_VISIBLE_DEVICES") == {
        "decoder-0": "4",
        "decoder-1": "5",
        "vision-encoder": "6",
        "preprocess": None,
    }
    assert environments(commands.workers(), "TESSERA_DECODER_MEMORY_SHARERS")["decoder-0"] == "1"
    share = "TESSERA_DECODER_GPU_MEMORY_UTILIZATION"
    assert environments(commands.workers(), share)["decoder-0"] is None


def test_the_ranks_of_a_decoder_have_an_npu_each(checkpoint: Path, folders: Folders) -> None:
    settings = ServeSettings(model=checkpoint, decoders=2, tensor_parallel_size=2)
    commands = ServiceCommands(settings, folders, REDIS, npus=range(8))
    visible = environments(commands.workers(), "ASCEND_RT_VISIBLE_DEVICES")
    assert (visible["decoder-0"], visible["decoder-1"]) == ("0,1", "2,3")
    assert visible["vision-encoder"] == "4"
    pauses = {program.name: program.pause_s for program in commands.workers()}
    assert pauses == {"decoder-0": 10, "decoder-1": 10, "vision-encoder": 0, "preprocess": 0}
    alone = ServiceCommands(settings, folders, REDIS)
    assert not any(program.pause_s for program in alone.workers())
    with pytest.raises(InvalidRequest, match="need 4 NPUs, and 3 are visible"):
        ServiceCommands(settings, folders, REDIS, npus=range(3))


@pytest.mark.parametrize("given", [None, 0.6])
def test_an_npu_that_an_encoder_shares_is_not_the_decoders_alone(
    given: float | None, checkpoint: Path, folders: Folders
) -> None:
    changes = {} if given is None else {"gpu_memory_utilization": given}
    settings = ServeSettings.model_validate({"model": checkpoint, "decoders": 2, **changes})
    commands = ServiceCommands(settings, folders, REDIS, npus=[0])
    visible = environments(commands.workers(), "ASCEND_RT_VISIBLE_DEVICES")
    assert visible == {
        "decoder-0": "0",
        "decoder-1": "0",
        "vision-encoder": "0",
        "preprocess": None,
    }
    (decoder, *_) = commands.workers()
    assert decoder.environment["TESSERA_DECODER_MEMORY_SHARERS"] == "2"
    share = decoder.environment["TESSERA_DECODER_GPU_MEMORY_UTILIZATION"]
    assert share == str(given or 0.75)
    encoder = next(each for each in commands.workers() if each.service == "vision_encoder")
    assert encoder.environment["TESSERA_VISION_ENCODER_ENCODER_MEMORY_UTILIZATION"] == "0.15"

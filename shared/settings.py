"""Settings: read once at start from the environment and the command line, then handed down in narrow pieces.

Each service has one frozen subclass of `ServiceSettings` in its `settings.py`. A field `max_num_seqs` of the decoder is
the flag `--max-num-seqs` and the variable `TESSERA_DECODER_MAX_NUM_SEQS`; fields of `ServiceSettings` are also read
from `TESSERA_<FIELD>`, so that one variable sets them for all services. Nothing else in the project reads the
environment.

A field that `tessera serve` offers too is declared in a base class of the service's settings, such as
`DecoderOptions`, from which the launcher's settings inherit it.
"""

import inspect
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from shared.command_line import CommandLine
from shared.hardware.devices import DEVICES
from shared.net.redis.url import with_password
from shared.telemetry import log_lines
from shared.telemetry.trace_settings import TraceSettings, read_trace_settings

# Variables that programs need to start.
_NEEDED = ("PATH", "HOME", "LANG", "LC_", "LD_", "PYTHON", "TMPDIR", "TZ", "HF_HOME")
# By which CANN is told which of its devices there are.
VISIBLE_NPUS = "ASCEND_RT_VISIBLE_DEVICES"
DEMO_MODEL = Path(__file__).parent / "demo_model" / "checkpoint"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_GGUF = ".gguf"


# Settings that hold keys or passwords: no representation and no message has their values.
_SECRETS = frozenset({"api_key", "redis_url", "tenant_weights"})


class Settings(BaseSettings):
    """A frozen group of settings with flags and environment variables of the same names."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        protected_namespaces=(),
    )

    ENV_PREFIXES: ClassVar[tuple[str, ...]] = ("TESSERA_",)
    # Fields that are also read from TESSERA_<FIELD> where that is none of the prefixes.
    COMMON_VARIABLES: ClassVar[frozenset[str]] = frozenset()
    # The title under which `--help` has the fields that a class declares; "" puts them before all others.
    GROUP: ClassVar[str] = ""
    # Fields that `--help` shows, `--help-all` having all; empty shows all.
    SHORT: ClassVar[tuple[str, ...]] = ()
    # Fields whose flag may be followed by several values name=value, which become one with commas.
    SEVERAL: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def load(cls, arguments: list[str] | None = None, prog: str | None = None) -> Self:
        """Reads flags (`sys.argv` unless given), then the environment, then the defaults.

        Prints the usage and exits with status 2 when a value is out of range.
        """
        if os.environ.get("NO_COLOR"):
            log_lines.leave_out_colours()
        argv = _joined(sys.argv[1:] if arguments is None else arguments, cls.SEVERAL)
        parser = CommandLine(
            prog=prog,
            description=inspect.getdoc(cls),
            groups=cls._groups(),
            short=cls.SHORT,
        )
        source: CliSettingsSource[Any] = CliSettingsSource(
            cls, cli_parse_args=argv, cli_prog_name=prog, root_parser=parser
        )
        try:
            return cls(_cli_settings_source=source)
        except ValidationError as error:
            name = prog or Path(sys.argv[0]).name
            print(f"{name}: error: {_explain(error)}", file=sys.stderr)
            raise SystemExit(2) from None

    @classmethod
    def _groups(cls) -> dict[str, list[str]]:
        """The names of fields by the titles of the classes that declare them."""
        groups: dict[str, list[str]] = {}
        for name in cls.model_fields:
            declaring = next(kind for kind in cls.__mro__ if name in inspect.get_annotations(kind))
            if title := vars(declaring).get("GROUP", ""):
                groups.setdefault(title, []).append(name)
        return groups

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, "***" if name in _SECRETS and value else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments first, then each environment prefix, the service's own before the common one."""
        environment = [
            EnvSettingsSource(settings_cls, env_prefix=prefix, env_ignore_empty=True)
            for prefix in cls.ENV_PREFIXES
        ]
        if cls.COMMON_VARIABLES:
            environment.append(_CommonVariables(settings_cls, "TESSERA_", cls.COMMON_VARIABLES))
        return (init_settings, *environment)


def _joined(arguments: list[str], several: frozenset[str]) -> list[str]:
    """Arguments with the values after the flags of such fields as one each."""
    flags = {f"--{name.replace('_', '-')}" for name in several}
    joined: list[str] = []
    for argument in arguments:
        is_further = len(joined) > 1 and joined[-2] in flags and "=" in argument
        if is_further and not argument.startswith("-"):
            joined[-1] += f",{argument}"
        else:
            joined.append(argument)
    return joined


class _CommonVariables(EnvSettingsSource):
    """The environment under one prefix, of which only some fields count."""

    def __init__(self, kind: type[BaseSettings], prefix: str, fields: frozenset[str]) -> None:
        super().__init__(kind, env_prefix=prefix, env_ignore_empty=True)
        self._fields = fields

    def __call__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__call__().items() if name in self._fields}


class FamilySettings(Settings):
    """A setting of everything that reads a model."""

    GROUP: ClassVar[str] = "model, queue and logs"

    family: str = Field(
        "",
        description="Family that the model is served as, such as wemm or llava, whatever its config.json calls itself;"
        " found from config.json unless given.",
    )
    mmproj: str = Field(
        "",
        description="Vision part (mmproj) of a model that is a GGUF file: a path, or a file's name beside the model;"
        " none for text alone. The only one that lies beside the model unless given.",
    )


class CommonSettings(FamilySettings):
    """Settings of every service, and of a whole system (`tessera serve`)."""

    GROUP: ClassVar[str] = "model, queue and logs"

    model: Path = Field(
        DEMO_MODEL, description="Hugging Face checkpoint folder, or a model's name on the hub."
    )
    revision: str = Field(
        "", description="Branch, tag or commit of a model from the hub; main unless given."
    )
    served_model_name: str = Field(
        "", description="The model's name in requests; that of the folder or hub unless given."
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Where the queue is (redis://, rediss:// or unix://).",
    )
    redis_password_file: Path | None = Field(
        None, description="File with the password of Redis, where --redis-url contains none."
    )
    log_level: str = Field(
        "info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error."
    )
    log_format: str = Field("text", pattern="^(text|json)$", description="text or json lines.")

    @property
    def model_name(self) -> str:
        """The model's name in requests."""
        return self.served_model_name or default_model_name(self.model)

    @property
    def queue_url(self) -> str:
        """Where the queue is, with the password. Raises InvalidRequest if its file cannot be read."""
        return with_password(self.redis_url, self.redis_password_file)


class ModelLengthSettings(Settings):
    """A setting of the services that limit or reserve tokens, and of `tessera serve`."""

    GROUP: ClassVar[str] = "model, queue and logs"

    max_model_len: int | None = Field(
        None, ge=1, description="Tokens of prompt and answer; the checkpoint's length unless given."
    )


class LoraSettings(Settings):
    """Settings of the services that know adapters, and of `tessera serve`."""

    GROUP: ClassVar[str] = "adapters"

    SEVERAL: ClassVar[frozenset[str]] = frozenset({"lora_modules"})

    lora_modules: str = Field(
        "",
        description="LoRA adapters as name=folder, several after each other or separated by commas: the folders are"
        " PEFT's, and a request picks one by its name as its model.",
    )
    max_lora_rank: int = Field(
        64, ge=1, le=4096, description="Largest rank of an adapter's linear layers."
    )
    allowed_adapter_dir: Path | None = Field(
        None,
        description="Folder below which folders of adapters lie that POST /v1/load_lora_adapter may load while the"
        " system runs; none may be loaded unless given. The same for gateways and decoders.",
    )


class ChatTemplateSettings(Settings):
    """A setting of the services that render conversations or know how answers end, and of `tessera serve`."""

    GROUP: ClassVar[str] = "prompts and media"

    chat_template: Path | None = Field(
        None, description="File with a chat template (Jinja) to use instead of the model's own."
    )


class ComputeSettings(Settings):
    """Settings of the services that compute the model, and of `tessera serve`."""

    GROUP: ClassVar[str] = "decoder"

    device: str = Field(
        "auto",
        description=f"auto, {', '.join(DEVICES[:-1])} or {DEVICES[-1]}; auto is cuda or npu where there is one, else"
        " cpu.",
    )
    dtype: str = Field(
        "auto",
        description="Element type of weights and activations: auto, float32, bfloat16 or float16. auto is bfloat16, on"
        " an Ascend 310P float16; on the CPU float32 for checkpoints stored so and for models under 100 million"
        " parameters.",
    )
    cpu_arithmetic: Literal["fastest", "portable"] = Field(
        "fastest",
        description="On the CPU: fastest is what this processor's instructions do best; portable gives equal bits on"
        " every processor, so that an answer that goes on at another machine is exactly the undisturbed one, and costs"
        " speed where there is no AMX.",
    )

    def share_with_libraries(self) -> None:
        """Says what libraries of this process, and the processes it starts, have to know of these settings."""
        os.environ["TESSERA_CPU_ARITHMETIC"] = self.cpu_arithmetic


class NpuDeviceSettings(ComputeSettings):
    """Settings of the services that compute the model, where they run in containers."""

    GROUP: ClassVar[str] = "decoder"

    npu_devices: str = Field(
        "",
        description="Numbers of the host's NPUs that this container was given, such as 0,2,4-7: the service takes as"
        " many of them as it needs for itself alone, of those that no other container of its kind has taken"
        " (TESSERA_NPU_LEASE_DIR is the folder by which they know). Unless given it takes the first that it sees.",
    )
    npu_devices_beside: str = Field(
        "",
        description="Those that containers of the other kind, decoders or vision encoders, were given. On one that both"
        " were given memory is divided: 0.75 for the decoder and 0.15 for the encoder, unless shares are given.",
    )


class ProfileSettings(Settings):
    """A setting of the services that compute the model, and of `tessera serve`."""

    GROUP: ClassVar[str] = "decoder"

    profile_ops: bool = Field(
        False,
        description="Counts calls, time and bytes of every op of decoder and encoder, and logs them on SIGUSR2 and at"
        " the end. Slower: ops are not fused, and each is waited for.",
    )


class ServiceSettings(CommonSettings):
    """Settings that every service has."""

    GROUP: ClassVar[str] = "addresses"

    listen: str = Field(
        "127.0.0.1:0", description="Address of the gRPC server: host:port, or unix:/path."
    )
    advertise: str = Field(
        "",
        description="Address under which others reach it; the listening one unless given, and for one that listens on"
        " every address (0.0.0.0) that of its route to Redis.",
    )
    internal_token_file: Path | None = Field(
        None,
        description="File with a token that the gRPC services ask of each other, the same for all of them. Not needed"
        " on unix sockets, which their files' modes protect.",
    )
    heartbeat: Path | None = Field(
        None,
        description="Unix socket on which the process reports whether it is ready and its event loop runs; none unless"
        " given.",
    )
    metrics_listen: str = Field(
        "",
        description="Address (host:port) of a page of this process's metrics for Prometheus, http://host:port/metrics;"
        " no page unless given. Whoever reaches it may read it.",
    )
    artifact_dir: Path = Field(
        Path("/dev/shm") / f"tessera-{os.getuid()}",
        description="Folder in shared memory for pixel values and embeddings.",
    )


def trace_settings() -> TraceSettings | None:
    """What the `OTEL_*` variables say of traces; None where they name no endpoint, or turn them off. No fields of the
    services' settings: their names are a standard."""
    return read_trace_settings(os.environ)


def _explain(error: ValidationError) -> str:
    """Each value that is out of range, under its flag's name."""
    faults = []
    for fault in error.errors():
        name = ".".join(map(str, fault["loc"]))
        got = "" if name in _SECRETS else f" (got {fault['input']!r})"
        faults.append(f"--{name.replace('_', '-')}: {fault['msg']}{got}")
    return "; ".join(faults)


def default_model_name(model: Path) -> str:
    """A checkpoint folder's name, that of a GGUF file without its ending, or the whole name of a model on the hub; the
    demo model has one of its own."""
    if model.resolve() == DEMO_MODEL.resolve():
        return "tessera-demo"
    name = model.resolve().name
    return hub_name(model) or (name[: -len(_GGUF)] if name.lower().endswith(_GGUF) else name)


def hub_name(model: Path) -> str:
    """The name on the Hugging Face hub that `--model` means, such as "Qwen/Qwen2.5-VL-3B-Instruct"; empty for a
    folder, which goes first, and for a GGUF file.
    """
    name = model.as_posix()
    is_name = _HUB_NAME.fullmatch(name) and not name.lower().endswith(_GGUF)
    return name if is_name and not model.exists() else ""


def child_environment(*without: str, **changes: str) -> dict[str, str]:
    """This process's environment without some variables and with changes, for a process that it starts."""
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return {**kept, **changes}


def listed_in_environment(name: str, place: int) -> str:
    """What stands at a place, from 0, of a variable that lists things with commas; empty if it lists fewer."""
    listed = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]
    return listed[place] if place < len(listed) else ""


def bare_environment(**changes: str) -> dict[str, str]:
    """The part of this process's environment that programs need to start, with changes: for one that is not to know
    our settings, keys and passwords.
    """
    kept = {name: value for name, value in os.environ.items() if name.startswith(_NEEDED)}
    return {**kept, **changes}


def python_path(*folders: Path) -> str:
    """A PYTHONPATH of these folders before those that this process was given."""
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*map(str, folders), *filter(None, [given])])


def unless_set(**values: str) -> dict[str, str]:
    """These variables for a process that this one starts; a value that is set already stays."""
    return {name: os.environ.get(name, value) for name, value in values.items()}


def change_process_environment(changes: Mapping[str, str], *, alone: bool = False) -> None:
    """Sets variables of this process, whatever they were; `alone` removes all others."""
    if alone:
        os.environ.clear()
    os.environ.update(changes)


def set_process_environment(**values: str) -> None:
    """Sets variables that libraries read when they are imported; a value that is set already stays."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def npu_lease_folder() -> Path:
    """Where processes of this host see which NPUs others have (`npu_leases.py`): `TESSERA_NPU_LEASE_DIR`, or a folder
    of /tmp that every user may write to. No field of the services' settings: `tessera serve` goes by it as well.
    """
    return Path(os.environ.get("TESSERA_NPU_LEASE_DIR") or "/tmp/tessera-npus")


def show_npus(numbers: Iterable[int]) -> None:
    """To CANN in this process and those that it starts: these NPUs alone, of all that it would see. CANN reads it when
    it is first asked for devices."""
    os.environ[VISIBLE_NPUS] = ",".join(map(str, numbers))


def diagnostics_folder() -> Path | None:
    """Where services write their diagnostics when asked (`telemetry/diagnostics.py`): `TESSERA_DIAGNOSTICS_DIR`.

    None is never. No field of the services' settings: it is for tools that start a system.
    """
    folder = os.environ.get("TESSERA_DIAGNOSTICS_DIR", "")
    return Path(folder) if folder else None


def cpu_instructions() -> str:
    """Which instruction set the CPU kernels are to use, `TESSERA_CPU_INSTRUCTIONS`; empty is what is fastest here.

    No field of the services' settings: tests, measurements and tools go by it as well.
    """
    return os.environ.get("TESSERA_CPU_INSTRUCTIONS", "")


def cpu_arithmetic_is_portable() -> bool:
    """Whether the CPU kernels compute in portable arithmetic, `TESSERA_CPU_ARITHMETIC`."""
    return os.environ.get("TESSERA_CPU_ARITHMETIC", "") == "portable"


def cpu_trial_folder() -> Path | None:
    """Where what a trial of the CPU kernels finds is kept for all processes of a host, `TESSERA_CPU_TRIAL_DIR`; None is
    beside the compiled kernels.
    """
    folder = os.environ.get("TESSERA_CPU_TRIAL_DIR", "")
    return Path(folder) if folder else None


def state_home() -> Path:
    """Where programs keep what must outlive them: `$XDG_STATE_HOME`, else `~/.local/state`.

    Source: XDG Base Directory Specification 0.8.
    """
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")


def cache_home() -> Path:
    """Where programs keep what can be made again: `$XDG_CACHE_HOME`, else `~/.cache`. Raises RuntimeError where there
    is no home.

    Source: XDG Base Directory Specification 0.8.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def temporary_folder() -> Path:
    """The system's folder for temporary files."""
    return Path(tempfile.gettempdir())

"""Settings: read once at start from the environment and the command line, then handed down in narrow pieces.

Each room has one frozen subclass of `RoomSettings` in its `settings.py`. A field `max_num_seqs` of the decoder is the
flag `--max-num-seqs` and the variable `TESSERA_DECODER_MAX_NUM_SEQS`; fields of `RoomSettings` are also read from
`TESSERA_<FIELD>`, so that one variable sets them for all rooms. Nothing else in the project reads the environment.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

DEMO_MODEL = Path(__file__).parent / "demo_model" / "checkpoint"


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

    @classmethod
    def load(cls, arguments: list[str] | None = None, prog: str | None = None) -> Self:
        """Reads flags (`sys.argv` unless given), then the environment, then the defaults.

        Prints the usage and exits with status 2 when a value is out of range.
        """
        argv = sys.argv[1:] if arguments is None else arguments
        source: CliSettingsSource[Any] = CliSettingsSource(
            cls, cli_parse_args=argv, cli_prog_name=prog
        )
        try:
            return cls(_cli_settings_source=source)  # type: ignore[call-arg]
        except ValidationError as error:
            name = prog or Path(sys.argv[0]).name
            print(f"{name}: error: {_explain(error)}", file=sys.stderr)
            raise SystemExit(2) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments first, then each environment prefix, the room's own before the common one."""
        environment = [
            EnvSettingsSource(settings_cls, env_prefix=prefix, env_ignore_empty=True)
            for prefix in cls.ENV_PREFIXES
        ]
        return (init_settings, *environment)


class RoomSettings(Settings):
    """What every room needs to know."""

    model: Path = Field(DEMO_MODEL, description="Hugging Face checkpoint folder.")
    served_model_name: str = Field(
        "", description="The model's name in requests; the folder's name unless given."
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", description="Where the queue is (redis:// or unix://)."
    )
    listen: str = Field(
        "127.0.0.1:0", description="Address of the gRPC server: host:port, or unix:/path."
    )
    advertise: str = Field(
        "", description="Address under which others reach it; the listening one unless given."
    )
    artifact_dir: Path = Field(
        Path("/dev/shm") / f"tessera-{os.getuid()}",
        description="Folder in shared memory for pixel values and embeddings.",
    )
    log_level: str = Field("info", description="debug, info, warning or error.")
    log_format: str = Field("text", pattern="^(text|json)$", description="text or json lines.")

    @property
    def model_name(self) -> str:
        """The model's name in requests."""
        return self.served_model_name or default_model_name(self.model)


def _explain(error: ValidationError) -> str:
    """Each value that is out of range, under its flag's name."""
    return "; ".join(
        f"--{'.'.join(map(str, fault['loc'])).replace('_', '-')}: {fault['msg']}"
        f" (got {fault['input']!r})"
        for fault in error.errors()
    )


def default_model_name(model: Path) -> str:
    """A checkpoint folder's name; the demo model has one of its own."""
    if model.resolve() == DEMO_MODEL.resolve():
        return "tessera-demo"
    return model.resolve().name


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with changes, for a process that it starts."""
    return {**os.environ, **changes}


def python_path(*folders: Path) -> str:
    """A PYTHONPATH of these folders before those that this process was given."""
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*map(str, folders), *filter(None, [given])])


def set_process_environment(**values: str) -> None:
    """Sets variables that libraries read when they are imported; a value that is set already stays."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def cpu_instructions() -> str:
    """Which instruction set the CPU kernels are to use, `TESSERA_CPU_INSTRUCTIONS`; empty is the machine's best.

    No field of the rooms' settings: tests, measurements and tools go by it as well.
    """
    return os.environ.get("TESSERA_CPU_INSTRUCTIONS", "")


def state_home() -> Path:
    """Where programs keep what must outlive them: `$XDG_STATE_HOME`, else `~/.local/state`.

    Source: XDG Base Directory Specification 0.8.
    """
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")


def temporary_folder() -> Path:
    """The system's folder for temporary files."""
    return Path(tempfile.gettempdir())

"""`--help` shows the defaults that are in effect."""

import importlib
import re

import pytest

from services.launcher.run.settings import RunSettings
from services.launcher.settings import ChatSettings, DoctorSettings, ServeSettings
from shared.settings import ServiceSettings, Settings

SERVICES = ("gateway", "scheduler", "preprocess", "vision_encoder", "decoder")


def settings_of(service: str) -> type[ServiceSettings]:
    module = importlib.import_module(f"services.{service}.settings")
    (kind,) = (
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, ServiceSettings)
        and kind is not ServiceSettings
    )
    return kind


@pytest.mark.parametrize("service", SERVICES)
def test_serve_has_the_defaults_of_the_services(service: str) -> None:
    """But for where a whole system differs from one service."""
    own = {"model", "redis_url", "port", "grpc_port", "shutdown_timeout"}
    fields = settings_of(service).model_fields
    shared = (ServeSettings.model_fields.keys() & fields.keys()) - own
    assert shared > {"served_model_name", "log_level"}
    for name in shared:
        assert ServeSettings.model_fields[name].default == fields[name].default, name


@pytest.mark.parametrize(
    "kind", [ServeSettings, ChatSettings, DoctorSettings, RunSettings, *map(settings_of, SERVICES)]
)
def test_no_help_shows_a_value_that_only_stands_for_not_given(
    kind: type[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kind.load(["--help"], prog="it")
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "(default: None)" not in shown
    assert "(default: )" not in shown
    assert "unless given. (default" not in shown
    for name, field in kind.model_fields.items():
        if field.default == 0 and field.annotation in (int, float):
            assert f"{name.replace('_', '-')} " in shown
            said = str(field.description)
            assert "unless given" in said or re.search(r"\b0 (is|takes)\b", said), name


def test_a_real_default_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ServeSettings.load(["--help"], prog="it")
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "Port of the REST API. (default: 8000)" in shown
    assert "of one request. (default: 128) --max-prompts" in shown

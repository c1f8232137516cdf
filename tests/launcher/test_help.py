"""What `--help` says is what holds where nothing is given."""

import importlib
import re

import pytest

from services.launcher.service_commands import PASSED_ON
from services.launcher.settings import ChatSettings, DoctorSettings, ServeSettings
from shared.settings import ServiceSettings, Settings

ROOMS = ("gateway", "scheduler", "preprocess", "vision_encoder", "decoder")
# What stands for "found out at the start".
COMPUTED = (None, "", 0, "auto")


def settings_of(room: str) -> type[ServiceSettings]:
    module = importlib.import_module(f"services.{room}.settings")
    (kind,) = (
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, ServiceSettings)
        and kind is not ServiceSettings
    )
    return kind


@pytest.mark.parametrize("name", sorted(PASSED_ON))
def test_serve_tells_the_defaults_of_the_rooms(name: str) -> None:
    field = ServeSettings.model_fields[name]
    told = re.search(r"(\S+) unless given", str(field.description))
    for room in PASSED_ON[name]:
        default = settings_of(room).model_fields[name].default
        if field.default is None and default not in COMPUTED:
            assert told, f"{name} of {room} is {default}"
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            assert told.group(1) == shown


@pytest.mark.parametrize(
    "kind", [ServeSettings, ChatSettings, DoctorSettings, *map(settings_of, ROOMS)]
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
    assert "Port of the REST door. (default: 8000)" in shown
    assert "128 unless given. --max-prompts" in shown

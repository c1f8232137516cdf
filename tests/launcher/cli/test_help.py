"""`--help` shows the defaults that are in effect."""

import importlib
import re

import pytest

from services.launcher import cli
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
        kind.load(["--help-all" if kind.SHORT else "--help"], prog="it")
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "(default: None)" not in shown
    assert "(default: )" not in shown
    assert "unless given. (default" not in shown
    for name, field in kind.model_fields.items():
        if field.default == 0 and field.annotation in (int, float):
            assert f"{name.replace('_', '-')} " in shown
            said = str(field.description)
            assert "unless given" in said or re.search(r"\b0 (is|takes)\b", said), name


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """What `tessera serve` prints of these, and says in errors."""
    with pytest.raises(SystemExit) as ended:
        ServeSettings.load(list(arguments), prog="tessera serve")
    assert ended.value.code == (0 if "--help" in arguments[0] else 2)
    out, errors = capsys.readouterr()
    return out, errors


def test_help_of_serve_is_short_and_names_every_group_that_it_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short, _ = printed(capsys, "--help")
    everything, _ = printed(capsys, "--help-all")
    assert short.startswith("usage: tessera serve [options] [MODEL]\n")
    assert len(short.splitlines()) < 110 < len(everything.splitlines())
    known = set(ServeSettings.model_fields)
    assert set(ServeSettings.SHORT) <= known
    for name in known - {"model"}:
        flag = f"  --{name.replace('_', '-')} "
        assert flag in everything.replace("\n", " \n"), name
        assert (flag in short.replace("\n", " \n")) == (name in ServeSettings.SHORT), name
    titles = re.findall(r"^(\w.*):$", short, re.MULTILINE)
    assert titles[0] == "arguments" and {"decoder", "adapters", "processes and ports"} <= set(
        titles
    )
    assert set(titles) < set(re.findall(r"^(\w.*):$", everything, re.MULTILINE))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--portt", "3"], "there is no option --portt; did you mean --port?"),
        (["--max-num-seq=3"], "there is no option --max-num-seq; did you mean --max-num-seqs?"),
        (["--nope"], "there is no option --nope"),
        (["one", "two"], "there is no place for 'two'"),
        (["--port"], "argument --port: expected one argument"),
    ],
)
def test_a_slip_is_said_in_one_line_with_the_way_to_help(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, errors = printed(capsys, *arguments)
    assert out == ""
    assert errors == (f"tessera serve: error: {said}\n`tessera serve --help` lists the options.\n")


@pytest.mark.parametrize("columns", [40, 72, 200])
def test_lines_fit_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    texts = [printed(capsys, "--help")[0], printed(capsys, "--help-all")[0]]
    for arguments in ([], ["--help"]):
        assert cli.run(arguments) == 0
        texts.append(capsys.readouterr().out)
    for text in texts:
        # Of an option no part may be broken off: it would not be one.
        words = [line for line in text.splitlines() if not line.lstrip().startswith("--")]
        assert max(map(len, words)) <= min(columns, 100), text
        assert "\x1b" not in text


def test_without_arguments_the_five_things_that_one_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run([]) == 0
    shown = re.findall(r"^  tessera (\S+)", capsys.readouterr().out, re.MULTILINE)
    assert shown == ["serve", "chat", "doctor", "check", "bench"]


def test_a_real_default_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ServeSettings.load(["--help-all"], prog="it")
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "Port of the REST API. (default: 8000)" in shown
    assert "of one request. (default: 128) --max-prompts" in shown

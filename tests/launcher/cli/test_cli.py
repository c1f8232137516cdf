"""The command line as a user meets it."""

import functools
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from services.launcher import cli
from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.hardware.ascend import npu_fault
from shared.settings import DEMO_MODEL
from tests.support.generic_models import make_generic_checkpoint
from tests.support.network.ports import closed_port, free_ports
from tests.support.processes.forks import forks
from tests.support.processes.small_shared_memory import with_shared_memory

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}",
    "HOME": "/nonexistent",
    "PATH": "/usr/bin",
}
# What its commands import.
IMPORTED = (
    *("services.launcher.serve", "services.launcher.chat", "services.launcher.check"),
    *("services.launcher.doctor.command", "services.launcher.redis.check"),
)
Tessera = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def tessera() -> Iterator[Tessera]:
    """The command, in processes that have already imported their libraries."""
    with forks(ENVIRONMENT, *IMPORTED) as started:
        yield functools.partial(started.run, "services.launcher")


class Echo(BaseHTTPRequestHandler):
    """An OpenAI server that says how many turns and pictures it was shown, and the last text."""

    def log_message(self, *_: Any) -> None:
        return

    def do_GET(self) -> None:
        if self.headers.get("Authorization") not in (None, "Bearer sesame"):
            self._reply("application/json", '{"error": {"message": "who are you?"}}', status=401)
            return
        self._reply("application/json", json.dumps({"data": [{"id": "echo", "object": "model"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = body["messages"][-1]["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if parts[-1]["text"] == "key?":
            parts[-1]["text"] = str(self.headers.get("Authorization"))
        pictures = sum(part["type"] == "image_url" for part in parts)
        if parts[-1]["text"] == "fail":
            error = {"error": {"message": "messages: too long", "type": "invalid_request_error"}}
            self._reply("application/json", json.dumps(error), status=400)
            return
        answer = f"turns={len(body['messages'])} pictures={pictures} said={parts[-1]['text']}"
        chunks = [
            {"choices": [{"index": 0, "delta": {"content": word + " "}}]} for word in answer.split()
        ]
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        self._reply("text/event-stream", events + "data: [DONE]\n\n")

    def _reply(self, kind: str, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def echo_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(
        f"  {name}" in printed
        for name in ("serve", "chat", "bench", "profile", "check", "doctor", "weights", "version")
    )


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["sevre"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("tessera: no command 'sevre'; did you mean 'serve'?\n")
    assert len(errors.splitlines()) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["version"]) == 0
    assert capsys.readouterr().out.startswith("tessera ")


def test_a_taken_port_is_said_before_anything_starts(tmp_path: Path, tessera: Tessera) -> None:
    port, grpc_port = free_ports(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        state = tmp_path / "state"
        result = tessera(
            "serve", "--port", str(port), "--grpc-port", str(grpc_port), "--state-dir", str(state)
        )
    assert result.returncode == 1
    assert f"port {port} of 127.0.0.1 is in use" in result.stderr
    assert "--port" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not state.exists()


def test_a_value_out_of_range_names_its_flag(tessera: Tessera) -> None:
    result = tessera("serve", "--decoders", "0")
    assert result.returncode == 2
    assert "--decoders" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_redis_that_is_away_is_said_before_anything_starts(tessera: Tessera) -> None:
    with closed_port() as port:
        result = tessera("serve", "--redis-url", f"redis://127.0.0.1:{port}")
    assert result.returncode == 1
    assert f"no Redis answers at redis://127.0.0.1:{port}" in result.stderr


def test_a_conversation(echo_url: str, tmp_path: Path, tessera: Tessera) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"png")
    lines = f"hello\n/image {picture}\nlook\nagain\n/clear\nafresh\n/quit\nnever\n"
    result = tessera("chat", "--url", echo_url, "--image", str(picture), stdin=lines)
    assert result.returncode == 0, result.stderr
    assert [line.strip() for line in result.stdout.splitlines()] == [
        "turns=1 pictures=1 said=hello",
        "turns=3 pictures=1 said=look",
        "turns=5 pictures=0 said=again",
        "turns=1 pictures=0 said=afresh",
    ]


def test_a_refused_question_is_explained_and_forgotten(echo_url: str, tessera: Tessera) -> None:
    result = tessera("chat", "--url", echo_url, stdin="fail\n/image /nowhere\nhello\n")
    assert "too long" in result.stderr
    assert "cannot read /nowhere" in result.stderr
    assert "turns=1" in result.stdout
    assert result.returncode == 0


def test_a_server_that_is_away_is_explained(tessera: Tessera) -> None:
    with closed_port() as port:
        result = tessera("chat", "--url", f"http://127.0.0.1:{port}/v1", stdin="hello\n")
    assert result.returncode == 1
    assert "nobody answers" in result.stderr
    assert "tessera serve" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_conversation_takes_its_key_from_the_environment_or_a_file(
    echo_url: str, tmp_path: Path, tessera: Tessera
) -> None:
    file = tmp_path / "keys"
    file.write_text("# of this server\n\nsesame\nanother\n")
    by_file = tessera("chat", "--url", echo_url, "--api-key-file", str(file), stdin="key?\n")
    by_variable = tessera("chat", "--url", echo_url, stdin="key?\n", TESSERA_API_KEY="sesame")
    for result in (by_file, by_variable):
        assert "said=Bearer sesame" in result.stdout, result.stderr
    without = tessera("chat", "--url", echo_url, stdin="key?\n", TESSERA_API_KEY="wrong")
    assert "set TESSERA_API_KEY, or give --api-key-file" in without.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--api-key", ","], "--api-key was given and holds no key"),
        (["--api-key", ""], "--api-key was given and holds no key"),
        (["--api-key-file", "/nowhere"], "--api-key-file: cannot read /nowhere: No such file"),
        (["--api-key", "schlüssel"], "API key 1 of 1 cannot be sent in a header"),
        (["--host", "0.0.0.0"], "TESSERA_API_KEY, or --api-key-file FILE), or say --allow-unauth"),
        (["--redis-password-file", "/x"], "give --redis-url too"),
    ],
)
def test_serve_does_not_start_more_open_than_it_was_meant(
    flags: list[str], said: str, tmp_path: Path, tessera: Tessera
) -> None:
    state = tmp_path / "state"
    result = tessera("serve", *flags, "--state-dir", str(state))
    assert (result.returncode, result.stdout) == (1, "")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not state.exists()


def test_doctor_finds_nothing_missing_where_these_tests_run(tessera: Tessera) -> None:
    result = tessera("doctor", "--model", str(DEMO_MODEL))
    assert result.returncode == 0, result.stdout
    for word in ("python", "cpu", "torch", "grpcio", "redis-server", "shared memory", "protos"):
        assert word in result.stdout
    assert "LlavaForConditionalGeneration" in result.stdout


@pytest.mark.parametrize(("size", "mark"), [("4m", "missing"), ("64m", "note")])
def test_doctor_says_where_shared_memory_is_small(size: str, mark: str) -> None:
    program = (sys.executable, "-m", "services.launcher", "doctor")
    found = subprocess.run(
        with_shared_memory(size, program), capture_output=True, text=True, check=False
    )
    (line,) = [line for line in found.stdout.splitlines() if "shared memory" in line]
    assert line.split()[0] == mark
    assert f"MiB free of {size[:-1]} in /dev/shm" in line


@pytest.mark.parametrize(
    ("change", "flags", "said"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, (), "quantization_config says awq"),
        ({}, ("--dtype", "float16", "--device", "cpu"), "use bfloat16 on the CPU"),
        ({}, ("--dtype", "fp8"), "--dtype fp8: it may be auto, float32"),
        ({}, ("--device", "tpu"), "this version computes on cpu, cuda and npu"),
    ],
)
def test_doctor_says_of_a_model_what_serve_says(
    change: dict[str, Any], flags: tuple[str, ...], said: str, tmp_path: Path, tessera: Tessera
) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text()) | change
    (model / "config.json").write_text(json.dumps(config))
    ports = [str(port) for port in free_ports(2)]
    serve = tessera("serve", str(model), "--port", ports[0], "--grpc-port", ports[1], *flags)
    doctor = tessera("doctor", "--model", str(model), *flags)
    assert (serve.returncode, doctor.returncode) == (1, 1)
    assert said in serve.stderr
    assert len(serve.stderr.splitlines()) == 1
    assert serve.stderr.removeprefix("tessera serve: ").strip() in doctor.stdout


@pytest.mark.parametrize("backend", ["auto", "native", "transformers"])
def test_check_refuses_quantized_weights_that_are_not_read_as_serve_does(
    backend: str, tmp_path: Path, tessera: Tessera
) -> None:
    said = (
        "of quantized checkpoints those of awq, gptq, auto-round, bitsandbytes, fp8, fbgemm_fp8, modelopt"
        " and compressed-tensors are read"
    )
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao"}
    (model / "config.json").write_text(json.dumps(config))
    ports = [str(port) for port in free_ports(2)]
    flags = (str(model), "--model-backend", backend)
    serve = tessera("serve", *flags, "--port", ports[0], "--grpc-port", ports[1])
    check = tessera("check", *flags)
    assert (serve.returncode, check.returncode) == (1, 1)
    for printed in (serve.stderr, check.stdout):
        assert "quantization_config says torchao" in printed and said in printed


@pytest.mark.skipif(not npu_fault(), reason="there is an NPU here")
def test_serve_on_a_machine_without_npus_is_refused_with_what_doctor_says(
    tmp_path: Path, tessera: Tessera
) -> None:
    state = tmp_path / "state"
    ports = [str(port) for port in free_ports(2)]
    where = ("--device", "npu", "--port", ports[0], "--grpc-port", ports[1])
    serve = tessera("serve", *where, "--state-dir", str(state))
    doctor = tessera("doctor", *where)
    assert (serve.returncode, serve.stdout, doctor.returncode) == (1, "", 1)
    (line,) = serve.stderr.splitlines()
    said = line.removeprefix("tessera serve: --device npu: npu devices: ")
    assert said.startswith("there is no /dev/davinci0: no driver is loaded")
    assert all(part in doctor.stdout for part in said.split("; remedy: "))
    assert "set_env.sh" in doctor.stdout or "install CANN's toolkit" in doctor.stdout
    # One line says what devices there are, and no "npu  none" stands beside it.
    lines = [line.split()[1:3] for line in doctor.stdout.splitlines() if line.strip()]
    assert ["npu", "devices"] in lines and ["npu", "none"] not in lines
    assert not state.exists()


def test_a_model_with_vision_wants_an_encoder_or_to_hear_that_none_is_wanted(
    tessera: Tessera,
) -> None:
    ports = [str(port) for port in free_ports(2)]
    result = tessera("serve", "--vision-encoders", "0", "--port", ports[0], "--grpc-port", ports[1])
    assert result.returncode == 1
    assert "--language-model-only" in result.stderr


def test_a_model_that_ranks_cannot_divide_is_refused_before_anything_starts(
    tessera: Tessera,
) -> None:
    refused = tessera("serve", "--tensor-parallel-size", "5")
    assert refused.returncode != 0 and "redis" not in refused.stdout
    assert "--tensor-parallel-size 5: LlavaForConditionalGeneration has" in refused.stderr


@pytest.mark.full
def test_so_is_one_that_the_code_of_transformers_runs(tmp_path: Path, tessera: Tessera) -> None:
    folder = make_generic_checkpoint(tmp_path, "deepseek_v2")
    refused = tessera("serve", str(folder), "--tensor-parallel-size", "2")
    assert refused.returncode != 0 and "redis" not in refused.stdout
    assert "in a way which is not served" in refused.stderr


def test_an_instruction_set_that_is_none_is_refused_before_anything_starts(
    tessera: Tessera,
) -> None:
    doctor = tessera("doctor", TESSERA_CPU_INSTRUCTIONS="mmx")
    serve = tessera("serve", TESSERA_CPU_INSTRUCTIONS="mmx")
    assert (doctor.returncode, serve.returncode) == (1, 1)
    for said in (doctor.stdout, serve.stderr):
        assert "CPU instructions 'mmx': there is no such set; it may be" in said
    assert len(serve.stderr.splitlines()) == 1


def test_doctor_says_how_to_mend_a_redis_that_forgets(short_tmp: Path, tessera: Tessera) -> None:
    with EmbeddedRedis(short_tmp, short_tmp / "r.sock", persistent=False) as forgetful:
        result = tessera("doctor", "--redis-url", forgetful.url, "--model", str(short_tmp))
    assert result.returncode == 1
    assert "appendonly is no" in result.stdout
    assert "CONFIG SET appendonly yes" in result.stdout
    assert "no config.json" in result.stdout
    assert "3 thing(s) missing" not in result.stdout

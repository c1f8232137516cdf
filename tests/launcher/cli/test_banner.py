"""What a user is shown when all is ready works as it is printed."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from services.launcher.banner import EXAMPLE_PICTURE, banner
from services.launcher.settings import ServeSettings
from tests.support.checkpoints import make_checkpoint


class Locked(BaseHTTPRequestHandler):
    """Answers a conversation by saying which key was sent."""

    def log_message(self, *_: Any) -> None:
        return

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": str(self.headers["Authorization"])}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = {"id": "c", "object": "chat.completion", "created": 0, "model": "m"}
        text = json.dumps({**body, "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Locked) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def python_of(text: str) -> str:
    """The program between its heading and the last line."""
    return text.split("(pip install openai):\n")[1].split("\nCtrl-C")[0]


def run_python(text: str, **variables: str) -> str:
    # Somebody pastes it: nothing of ours is set.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TESSERA", "OPENAI"))}
    return subprocess.check_output(
        [sys.executable, "-c", python_of(text)], env={**clean, **variables}, text=True, timeout=100
    )


def test_it_names_the_page(port: int) -> None:
    assert f"http://127.0.0.1:{port}/\n" in banner(ServeSettings(port=port))


def test_without_a_key_the_python_works_as_it_stands(port: int) -> None:
    assert run_python(banner(ServeSettings(port=port))) == "Bearer none\n"


@pytest.mark.parametrize("from_file", [False, True])
def test_with_a_key_it_works_and_does_not_show_the_key(
    port: int, tmp_path: Path, from_file: bool
) -> None:
    file = tmp_path / "the keys"
    file.write_text("\n # ours\n  s3same \nother\n")
    given: dict[str, Any] = {"api_key_file": file} if from_file else {"api_key": "s3same"}
    text = banner(ServeSettings(port=port, **given))
    assert "s3same" not in text
    export = next(line for line in text.splitlines() if "export TESSERA_API_KEY" in line)
    script = export if from_file else "TESSERA_API_KEY=s3same"
    key = subprocess.check_output(["sh", "-c", f'{script}; echo "$TESSERA_API_KEY"'], text=True)
    assert run_python(text, TESSERA_API_KEY=key.strip()) == "Bearer s3same\n"
    assert 'Bearer $TESSERA_API_KEY"' in text


def test_a_model_of_text_alone_is_asked_without_a_picture(port: int, tmp_path: Path) -> None:
    settings = ServeSettings(port=port)
    assert str(EXAMPLE_PICTURE) in banner(settings)
    folder = make_checkpoint(tmp_path, "qwen2")
    for other in (
        ServeSettings(port=port, model=folder),
        ServeSettings(port=port, language_model_only=True),
    ):
        text = banner(other)
        assert "image" not in text and "picture" not in text
        command = text[text.index("  curl ") : text.index("In Python")].strip()
        said = json.loads(subprocess.check_output(["sh", "-c", command], timeout=100))
        assert said["choices"][0]["message"]["content"] == "None"


def test_the_picture_that_it_names_is_there() -> None:
    assert EXAMPLE_PICTURE.is_file()

"""`tessera serve` behind TLS with a model from the hub, and our own clients before it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shared.settings import DEMO_MODEL, child_environment
from tests.support.network.certificates import make_certificates
from tests.support.network.hub_server import HubServer
from tests.support.processes.system import System

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]


def tessera(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[3]
    return subprocess.run(
        [sys.executable, "-m", "services.launcher", *arguments],
        env=child_environment(PYTHONPATH=f"{root}:{root / 'protos'}"),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_model_of_the_hub_is_served_over_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_certificates(tmp_path)
    shutil.copytree(DEMO_MODEL, tmp_path / "repository")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))  # for the wait until it is ready
    with HubServer("Example/Tiny-VL", tmp_path / "repository") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        flags = ("--revision", "v1", "--ssl-certfile", str(files.server))
        system = System(Path("Example/Tiny-VL"), *flags, scheme="https")
        with system:
            assert "Model        Example/Tiny-VL\n" in system.log
            assert f"{system.url}/v1" in system.log
            url = ("--url", system.base_url)
            trusted = ("--ssl-ca-certs", str(files.authority))
            answer = tessera("chat", *url, *trusted, stdin="hello\n")
            assert (answer.returncode, bool(answer.stdout.strip())) == (0, True), answer.stderr
            monkeypatch.delenv("SSL_CERT_FILE")
            refused = tessera("chat", *url, "--ssl-ca-certs", str(files.stranger), stdin="hello\n")
            assert refused.returncode == 1
            assert "is not trusted" in refused.stderr and "--ssl-ca-certs" in refused.stderr
            load = ("--num-prompts", "2", "--random-input-len", "8", "--output-len", "2")
            bench = tessera("bench", "serve", "--base-url", system.url, *trusted, *load)
            assert bench.returncode == 0, bench.stderr
            monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))

"""OpenAI's client for node against the demo model: every way to ask gives the same text. Its library is installed into
build/node-client, if it is not there. Without node and npm a line says that nothing was tried.
"""

import json
import shutil
import subprocess
from pathlib import Path

from tests.support.processes.system import System

_ROOT = Path(__file__).parents[1]
_FOLDER = _ROOT / "build" / "node-client"
_LIBRARY = "openai@^6"


def main() -> None:
    """Prints what it does; fails with an AssertionError, or where the library cannot be installed."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        print("skipped: there are no node and npm here")
        return
    if not (_FOLDER / "node_modules" / "openai").exists():
        _FOLDER.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund", _LIBRARY]
        subprocess.run([*install, "--prefix", str(_FOLDER)], check=True)
    script = Path(__file__).with_suffix(".mjs")
    with System() as system:
        arguments = [str(_FOLDER), system.base_url, "tessera-demo"]
        done = subprocess.run(
            ["node", str(script), *arguments], stdout=subprocess.PIPE, check=True, timeout=120
        )
    found = json.loads(done.stdout)
    print(found)
    texts = set(found["texts"].values())
    assert len(texts) == 1 and texts.pop(), found["texts"]
    refused = {"status": 400, "param": "temperature", "kind": "BadRequestError"}
    assert found["refused"] == refused, found["refused"]
    assert found["listed"] == ["tessera-demo"], found["listed"]


if __name__ == "__main__":
    main()

"""What a new user does first: serve the demo model, ask about a picture, press Ctrl-C. Nothing may stay behind."""

import sys
import time
from pathlib import Path

import openai
import psutil

from tests.support.pictures import data_url, png
from tests.support.processes.system import System


def main() -> None:
    """Prints what it does; fails with an AssertionError."""
    began = time.monotonic()
    tessera = Path(sys.executable).with_name("tessera")
    with System(program=[str(tessera)]) as system:
        print(f"ready after {time.monotonic() - began:.1f} s: {system.base_url}")
        print(f"answer: {ask(system)!r}")
        pids = system.all_pids()
        began = time.monotonic()
        status = system.stop()
        print(f"Ctrl-C: status {status} after {time.monotonic() - began:.1f} s")
        assert status == 0, system.log
        left = [pid for pid in pids if psutil.pid_exists(pid)]
        assert not left, f"processes left: {left}"
        assert not system.leftovers(), f"left behind: {system.leftovers()}"


def ask(system: System) -> str:
    """The answer to a question about a picture."""
    picture = {"type": "image_url", "image_url": {"url": data_url(png(1))}}
    question = {"type": "text", "text": "What is in the picture?"}
    with openai.OpenAI(base_url=system.base_url, api_key="none", timeout=60) as client:
        answer = client.chat.completions.create(
            model="tessera-demo",
            messages=[{"role": "user", "content": [picture, question]}],  # type: ignore[list-item]
            max_tokens=24,
        )
    text = answer.choices[0].message.content
    assert text, answer
    return text


if __name__ == "__main__":
    main()

"""`llm`, the program and its library, with models of its file of OpenAI-compatible ones."""

import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from asked import ASKED, ENOUGH, PICTURE, RESULT, SCHEMA, agent, error_of, found, tell

FOLDER = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(FOLDER)
CAN = {"vision": True, "supports_tools": True, "supports_schema": True, "api_key_name": "tessera"}
KINDS = {"chat": {}, "responses": {"responses": True}}
SERVED = {"": (ASKED.model, ASKED.base_url), "agent ": (ASKED.agent_model, ASKED.agent_base_url)}
MODELS = [
    {"model_id": f"{role}{kind}", "model_name": name, "api_base": url, **CAN, **more}
    for kind, more in KINDS.items()
    for role, (name, url) in SERVED.items()
]
# JSON is YAML.
(FOLDER / "extra-openai-models.yaml").write_text(json.dumps(MODELS))
(FOLDER / "keys.json").write_text(json.dumps({"tessera": ASKED.key}))

import llm  # noqa: E402


def run(kind, **options):
    """The program's output and errors for the question."""
    command = [sys.executable, "-m", "llm", "-m", kind, "--no-log"]
    for name, value in options.items():
        command += ["-o", name, str(value)]
    done = subprocess.run([*command, ASKED.question], capture_output=True, text=True, check=False)
    return done.stdout.removesuffix("\n") if done.returncode == 0 else done.stderr


few = {"temperature": 0, "max_tokens": ASKED.tokens}
for kind in KINDS:
    model = llm.get_model(kind)
    found("chat", kind, model.prompt(ASKED.question, **few, stream=False).text())
    found("chat", f"{kind} stream", "".join(model.prompt(ASKED.question, **few)))
    found("chat", f"{kind} program", run(kind, **few))
    picture = llm.Attachment(type="image/png", content=base64.b64decode(PICTURE))
    asked = model.prompt(ASKED.question, attachments=[picture], **few, stream=False)
    found("picture_behind", kind, asked.text())
    formed = model.prompt(ASKED.question, schema=SCHEMA, temperature=0, max_tokens=ENOUGH)
    found("json", kind, formed.text())
    calls = []

    def get_weather(city: str) -> str:
        """How it is outside."""
        calls.append({"city": city})  # noqa: B023
        return RESULT

    chain = llm.get_model(f"agent {kind}").chain(ASKED.question, tools=[get_weather])
    found("agent", kind, agent(calls, chain.text()))
    found("refused", kind, error_of(model.prompt(ASKED.question, max_tokens=10**9).text))
    found("refused", f"{kind} program", run(kind, max_tokens=10**9))
    found("denied", kind, error_of(model.prompt(ASKED.question, key="wrong").text))
tell()

"""What a user is told when everything is ready: where to ask, and how."""

import shutil
import sys
from pathlib import Path

from services.launcher.rooms import Door, doors
from services.launcher.settings import ServeSettings

# A red circle, a blue square and a green triangle: every command shown works as it stands.
EXAMPLE_PICTURE = Path(__file__).with_name("example.png")
_QUESTION = "What is in the picture?"


def invitation(settings: ServeSettings) -> str:
    """Where this instance is, and commands to be copied."""
    first, *others = doors(settings)
    model = settings.model_name
    key = "$TESSERA_API_KEY" if settings.api_key else ""
    more = "".join(f", {door.url}/v1" for door in others)
    return f"""
{model} is being served.

  OpenAI API   {first.url}/v1{more}
  gRPC         {first.probe_host}:{first.grpc_port}  tessera.gateway.v1.ChatService, with reflection

In another terminal:

  {_chat(first, key)}

  {_curl(first, model, key)}

  from openai import OpenAI
  client = OpenAI(base_url="{first.url}/v1", api_key="{key or "none"}")
  answer = client.chat.completions.create(
      model="{model}", messages=[{{"role": "user", "content": "Hello!"}}])
  print(answer.choices[0].message.content)

Ctrl-C stops everything.
"""


def _chat(door: Door, key: str) -> str:
    """The terminal chat, about the example picture."""
    words = [f"{_tessera()} chat"]
    if door.url != "http://127.0.0.1:8000":
        words.append(f"--url {door.url}/v1")
    if key:
        words.append(f"--api-key {key}")
    words.append(f"--image {EXAMPLE_PICTURE}")
    return " ".join(words)


def _tessera() -> str:
    """How this user calls the command: the script may be in an environment that is not active."""
    script = Path(sys.executable).with_name("tessera")
    if shutil.which("tessera"):
        return "tessera"
    return str(script) if script.is_file() else f"{sys.executable} -m services.launcher"


def _curl(door: Door, model: str, key: str) -> str:
    """The same question in plain HTTP."""
    header = f' -H "Authorization: Bearer {key}"' if key else ""
    picture = f"data:image/png;base64,'$(base64 -w0 {EXAMPLE_PICTURE})'"
    return f"""curl {door.url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{{
    "model": "{model}", "messages": [{{"role": "user", "content": [
      {{"type": "image_url", "image_url": {{"url": "{picture}"}}}},
      {{"type": "text", "text": "{_QUESTION}"}}]}}]}}'"""

"""What is printed when everything is ready: the addresses, and commands to try them."""

import shlex
import shutil
import sys
from pathlib import Path

from services.launcher.service_commands import GatewayAddress, gateway_addresses, takes_pictures
from services.launcher.settings import ServeSettings

# A red circle, a blue square and a green triangle: every command shown works as it stands.
EXAMPLE_PICTURE = Path(__file__).with_name("console") / "example.png"
_TRUST = """A certificate that this machine's authorities have not signed is trusted by --ssl-ca-certs FILE
(tessera chat and bench), --cacert FILE (curl) and SSL_CERT_FILE=FILE (Python): the authority's file,
or {path} if that is signed by itself.

"""
_QUESTION = "What is in the picture?"
_GREETING = "Hello!"


def banner(settings: ServeSettings) -> str:
    """Addresses, and commands to copy. Where a key is needed they take it from TESSERA_API_KEY."""
    first, *others = gateway_addresses(settings)
    model = settings.model_name
    needs_key = settings.api_key is not None or settings.api_key_file is not None
    more = "".join(f", {other.url}/v1" for other in others)
    pictures = takes_pictures(settings)
    trusted = ""
    if settings.ssl_certfile is not None:
        trusted = _TRUST.format(path=settings.ssl_certfile)
    return f"""
  Chat page    {first.url}/
  Model        {model}
  OpenAI API   {first.url}/v1{more}
  gRPC         {first.probe_host}:{first.grpc_port}  tessera.gateway.v1.ChatService, with reflection

In another terminal:
{_key(settings) if needs_key else ""}
  {_chat(first, pictures)}

  {_curl(first, model, needs_key, pictures)}

In Python (pip install openai):

{_python(first, model, needs_key)}

{trusted}Ctrl-C stops everything.
"""


def _key(settings: ServeSettings) -> str:
    """The command that sets the key, which itself is not shown."""
    if settings.api_key_file is None:
        return "\n  export TESSERA_API_KEY=...   # the key\n"
    file = shlex.quote(str(settings.api_key_file.expanduser().absolute()))
    return f"""
  export TESSERA_API_KEY="$(grep -m 1 '^[[:space:]]*[^#[:space:]]' {file} | tr -d '[:space:]')"
"""


def _chat(address: GatewayAddress, pictures: bool) -> str:
    """The command of the terminal chat, about the example picture where the model looks at pictures."""
    words = [f"{_tessera()} chat"]
    if address.url != "http://127.0.0.1:8000":
        words.append(f"--url {address.url}/v1")
    if pictures:
        words.append(f"--image {EXAMPLE_PICTURE}")
    return " ".join(words)


def _python(address: GatewayAddress, model: str, needs_key: bool) -> str:
    """A question by OpenAI's client."""
    key = 'os.environ["TESSERA_API_KEY"]' if needs_key else '"none"'
    lines = [
        *(["import os"] if needs_key else []),
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{address.url}/v1", api_key={key})',
        "answer = client.chat.completions.create(",
        f'    model="{model}", messages=[{{"role": "user", "content": "{_GREETING}"}}])',
        "print(answer.choices[0].message.content)",
    ]
    return "\n".join(lines)  # not indented: it is pasted as it stands


def _tessera() -> str:
    """The command `tessera` as this user can call it: its script may be in an environment that is not active."""
    script = Path(sys.executable).with_name("tessera")
    if shutil.which("tessera"):
        return "tessera"
    return str(script) if script.is_file() else f"{sys.executable} -m services.launcher"


def _curl(address: GatewayAddress, model: str, needs_key: bool, pictures: bool) -> str:
    """The same question in plain HTTP."""
    header = ' -H "Authorization: Bearer $TESSERA_API_KEY"' if needs_key else ""
    picture = f"data:image/png;base64,'$(base64 -w0 {EXAMPLE_PICTURE})'"
    if not pictures:
        return f"""curl {address.url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{{
    "model": "{model}", "messages": [{{"role": "user", "content": "{_GREETING}"}}]}}'"""
    return f"""curl {address.url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{{
    "model": "{model}", "messages": [{{"role": "user", "content": [
      {{"type": "image_url", "image_url": {{"url": "{picture}"}}}},
      {{"type": "text", "text": "{_QUESTION}"}}]}}]}}'"""

"""`tessera chat`: a conversation in the terminal. An answer continues after a restart of its gateway."""

import base64
import mimetypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.launcher.settings import ChatSettings
from shared.client import BlockingClient, ClientError, GaveUp, Refused
from shared.errors import InvalidRequest

_HELP = "/image PATH shows a picture, /clear begins anew, /quit ends"


class ChatError(Exception):
    """An error that is shown to the user; the conversation continues."""


def main(arguments: list[str]) -> int:
    """Talks until /quit or the end of the input. Returns 0, or 1 if the last answer failed."""
    settings = ChatSettings.load(arguments, prog="tessera chat")
    try:
        with BlockingClient(settings.urls, api_key=settings.key, tls=settings.tls()) as client:
            conversation = Conversation(client, settings)
            for path in settings.image:
                conversation.show(path)
            return _talk(conversation)
    except (ChatError, InvalidRequest, ValueError) as error:  # ValueError: --url is none
        print(f"tessera chat: {error}", file=sys.stderr)
        return 1


class Conversation:
    """The turns so far, and the pictures that go with the next one."""

    def __init__(self, client: BlockingClient, settings: ChatSettings) -> None:
        """Asks the server for its model. Raises ChatError if it is away or has no such model."""
        self._client = client
        self._settings = settings
        self._pictures: list[dict[str, Any]] = []
        self.model = settings.model or self._only_model()
        self.clear()

    def clear(self) -> None:
        """Forgets all turns and pictures."""
        self._pictures.clear()
        system = self._settings.system
        self._messages: list[Any] = [{"role": "system", "content": system}] if system else []

    def show(self, path: Path) -> None:
        """Adds a picture to the next question. Raises ChatError if there is none at `path`."""
        try:
            data = path.expanduser().read_bytes()
        except OSError as error:
            raise ChatError(f"cannot read {path}: {error.strerror}") from error
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        self._pictures.append({"type": "image_url", "image_url": {"url": url}})

    def ask(self, question: str) -> None:
        """Prints the answer as it comes. Raises ChatError; then the question is forgotten."""
        content: Any = question
        if self._pictures:
            content = [*self._pictures, {"type": "text", "text": question}]
        asked = {"role": "user", "content": content}
        said: list[str] = []
        try:
            for piece in self._stream([*self._messages, asked]):
                said.append(piece)
                print(piece, end="", flush=True)
        except ClientError as error:
            raise ChatError(_explain(error, self._settings.url)) from error
        except KeyboardInterrupt:  # enough of this answer
            said.append(" ...")
        finally:
            print(flush=True)
        self._pictures.clear()
        self._messages += [asked, {"role": "assistant", "content": "".join(said)}]

    def _stream(self, messages: list[Any]) -> Iterator[str]:
        body: dict[str, Any] = {"model": self.model, "messages": messages}
        if self._settings.max_tokens is not None:
            body["max_tokens"] = self._settings.max_tokens
        if self._settings.temperature is not None:
            body["temperature"] = self._settings.temperature
        for event in self._client.stream("/v1/chat/completions", body):
            for choice in event.data.get("choices", ()):
                if text := choice.get("delta", {}).get("content"):
                    yield text

    def _only_model(self) -> str:
        try:
            models = self._client.get("/v1/models")["data"]
        except ClientError as error:
            raise ChatError(_explain(error, self._settings.url)) from error
        if not models:
            raise ChatError(f"{self._settings.url} serves no model")
        return str(models[0]["id"])


def _talk(conversation: Conversation) -> int:
    """One line of input after the other."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        print(f"{conversation.model}. {_HELP}.")
    failed = False
    while True:
        line = _read_line(at_terminal)
        if line is None or line in ("/quit", "/exit"):
            return int(failed)
        if not line:
            continue
        try:
            _act(conversation, line)
            failed = False
        except ChatError as error:
            failed = True
            print(f"tessera chat: {error}", file=sys.stderr)


def _read_line(at_terminal: bool) -> str | None:
    """The next line, trimmed; None at the end of the input."""
    try:
        return input("> " if at_terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        if at_terminal:
            print()
        return None


def _act(conversation: Conversation, line: str) -> None:
    """Carries out a command, or asks a question."""
    command, _, rest = line.partition(" ")
    if command == "/image":
        if not rest.strip():
            raise ChatError("/image needs a path")
        conversation.show(Path(rest.strip()))
    elif command == "/clear":
        conversation.clear()
    elif command.startswith("/"):
        raise ChatError(f"no command {command}: {_HELP}")
    else:
        conversation.ask(line)


def _explain(error: ClientError, url: str) -> str:
    """One sentence for people."""
    if isinstance(error, GaveUp) and "certificate" not in str(error):
        return f"nobody answers at {url}: start `tessera serve`, or give --url"
    if isinstance(error, Refused) and error.status == 401:
        return "the server wants a key: set TESSERA_API_KEY, or give --api-key-file FILE"
    return str(error)

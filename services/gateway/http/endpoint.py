"""What one API consists of: its routes, its form of errors, and its forms of replies."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from services.gateway.admission.api_keys import KeyHeader
from services.gateway.admission.caller import Caller
from services.gateway.following.answer import Answer
from services.gateway.following.writer import Writer
from services.gateway.http.exchange import Exchange
from services.gateway.http.forms import ErrorForm, StreamForm

Handler = Callable[[Exchange, Caller], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path. In a path `*` as its third or fourth part stands for a name, which may have slashes, `**`
    at its end for all that follows.
    """

    method: str
    path: str
    handler: Handler
    # What its bodies are decoded to, and what its JSON replies are; None where they have no Struct.
    body: type[msgspec.Struct] | None = None
    reply: type[msgspec.Struct] | None = None
    # The fields of its bodies where they are forms (multipart/form-data).
    form: type[msgspec.Struct] | None = None
    # Whether callers need a key where there are keys.
    needs_key: bool = True
    # Headers in which its callers may send their key, beside those of the API: for clients of others that call it too.
    key_headers: Sequence[KeyHeader] = ()
    # Whether it asks for tokens: the log has a line for its end, however it ends.
    generates: bool = False
    # Whether probes call it by address, whatever names the server has.
    is_probe: bool = False
    # Parameters of its query by name, with what they are.
    query: Mapping[str, str] = field(default_factory=dict)
    # The field of a body that says that it is meant, where several APIs have its method and path.
    known_by: str = ""


class Endpoint(ErrorForm, Protocol):
    """One API."""

    @property
    def routes(self) -> Sequence[Route]:
        """All its routes."""

    @property
    def roots(self) -> Sequence[str]:
        """Paths such as "/v1": errors about what lies at them or below have this API's form also where there is no
        route and where a request could not be read. Of several APIs' the longest root counts.
        """


class StreamWriter(Writer[str, bytes], StreamForm, Protocol):
    """One answer as a stream over HTTP. A frame is whole bytes; those of `first` may be in several parts."""


# A writer for an answer. `with_ids`: its events have ids, from which the stream can be resumed.
MakeWriter = Callable[[Answer, bool], StreamWriter]


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """The form of the replies to one kind of request (`ReplyKind`)."""

    make_writer: MakeWriter
    # What stands before the request's id in the id of its reply: the request is found by both.
    id_prefix: str = ""

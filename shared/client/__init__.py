"""A client whose streams go on when a gateway dies: at another gateway, behind the last token that came."""

from shared.client.blocking import BlockingClient
from shared.client.errors import ClientError, Failed, GaveUp, Refused
from shared.client.events import Event
from shared.client.resuming import Client

__all__ = ["BlockingClient", "Client", "ClientError", "Event", "Failed", "GaveUp", "Refused"]

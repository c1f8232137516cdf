"""A client whose streams continue when a gateway ends: at another gateway, after the last token that was received."""

from shared.client.blocking import BlockingClient
from shared.client.errors import ClientError, Failed, GaveUp, Refused
from shared.client.events import Event
from shared.client.resuming import Client

__all__ = ["BlockingClient", "Client", "ClientError", "Event", "Failed", "GaveUp", "Refused"]

"""What kinds of replies have in common."""

from tessera.scheduler.v1.queue_pb2 import ReplyKind

# Replies in the form of /v1/chat/completions.
CHATS = frozenset({ReplyKind.REPLY_KIND_CHAT, ReplyKind.REPLY_KIND_CHAT_MESSAGE})

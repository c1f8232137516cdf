"""What kinds of replies have in common."""

from tessera.scheduler.v1.queue_pb2 import ReplyKind

# Replies about the parts of an answer, of which one token may begin and end several.
OF_PARTS = frozenset({ReplyKind.REPLY_KIND_ANTHROPIC, ReplyKind.REPLY_KIND_RESPONSE})
# Replies in the form of /v1/chat/completions.
CHATS = frozenset({ReplyKind.REPLY_KIND_CHAT, ReplyKind.REPLY_KIND_CHAT_MESSAGE})
# Those whose requests have `top_logprobs`.
WITH_TOP_LOGPROBS = CHATS | {
    ReplyKind.REPLY_KIND_RESPONSE,
    ReplyKind.REPLY_KIND_OLLAMA_CHAT,
    ReplyKind.REPLY_KIND_OLLAMA_CHAT_MESSAGE,
    ReplyKind.REPLY_KIND_OLLAMA_GENERATE,
    ReplyKind.REPLY_KIND_OLLAMA_GENERATE_MESSAGE,
}

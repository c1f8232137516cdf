"""What streams of server-sent events have in common: their Content-Type, and comments as pings."""

MEDIA_TYPE = b"text/event-stream; charset=utf-8"
# A comment between events. Behind an id no empty line may follow it: that would end an event, and
# clients that remember the last id (the `openai` library) would take it for one without data.
# Without ids it is written as events are, since readers that split streams at empty lines would
# glue it to the next event.
COMMENT_BESIDE_IDS = b": ping\n"
COMMENT = b": ping\n\n"
# Readers that strip each piece which they receive (`vllm bench serve`) lose the empty line of a
# comment that came alone: what follows brings another one.
AFTER_COMMENT = b":\n\n"

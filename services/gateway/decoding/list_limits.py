"""Limits of the lists in one request, in REST and gRPC alike."""

MOST_MESSAGES = 4096
MOST_PARTS = 8192  # in all messages together
MOST_STOP_IDS = 1024
MOST_IDS = 65_536  # of allowed_token_ids, bad_token_ids and logit_bias
MOST_FRAMES = 1024
LONGEST_TEMPLATE_KWARGS = 65_536  # bytes as JSON
LONGEST_TOOLS = 524_288  # bytes as JSON
LONGEST_TOOL_NAME = 256  # characters
LONGEST_DOCUMENTS = 1_048_576  # bytes as JSON
MOST_CALLS = 256  # of one message
LONGEST_MEDIA_OPTIONS = 16_384  # bytes as JSON, of each field
LONGEST_UUID = 256  # characters

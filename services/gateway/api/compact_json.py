"""JSON as replies have it: without blanks, characters as they are."""

import json

# Values as one line of text. Of one encoder: `json.dumps` would make another for each call.
compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

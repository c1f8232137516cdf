"""What is said of a field of a body, in the field's own type: /openapi.json, /docs and tables of docs/api.md are made
of it.
"""

from typing import Annotated, Any

import msgspec

# Keys of a field's schema that are not JSON schema's: its value where it is not sent, and that every value but "off" is
# refused.
DEFAULT_KEY = "x-default"
REFUSED_KEY = "x-refused"

# Of a field that asks for what is not offered.
REFUSED = msgspec.Meta(extra_json_schema={REFUSED_KEY: True})
Refused = Annotated[msgspec.Raw, REFUSED]


def about(text: str, default: str = "", *, example: Any = None, **bounds: float) -> msgspec.Meta:
    """`text` says what the field is and may be, `default` what it is where it is not sent. `bounds`: keywords of
    JSON schema, for readers alone: what reads the field checks them. Examples of fields make that of a body.
    """
    more: dict[str, Any] = {**bounds, **({DEFAULT_KEY: default} if default else {})}
    return msgspec.Meta(
        description=text,
        examples=None if example is None else [example],
        extra_json_schema=more or None,
    )

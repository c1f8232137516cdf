"""Why a form cannot be compiled, as the confined process tells it to the gateway."""


class FormError(Exception):
    """`at` is the place within the form's own JSON, as ".properties.tags"; empty for the whole. `is_of_calls`: the form
    is that of calls which the answer may be instead. `field`: where in the request it stands, if that is known here.
    """

    def __init__(
        self, message: str, at: str = "", reason: str = "INVALID_GRAMMAR", field: str = ""
    ) -> None:
        super().__init__(message)
        self.at = at
        self.reason = reason
        self.field = field
        self.is_of_calls = False


def unsupported(message: str, at: str = "") -> FormError:
    """For a schema that is valid and asks for more than can be held to."""
    return FormError(message, at, "UNSUPPORTED_SCHEMA")

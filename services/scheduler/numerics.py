"""The numerics of a request: of the decoder that runs it and, with media, of the encoders (`shared/numerics.py`)."""

_JOINT = "+"  # in neither of them


def joined(decoder: str, encoder: str | None) -> str:
    """As one text. encoder: None without media."""
    return decoder if encoder is None else f"{decoder}{_JOINT}{encoder}"


def of_decoder(numerics: str) -> str:
    """The decoder's part."""
    return numerics.partition(_JOINT)[0]


def of_encoder(numerics: str) -> str:
    """The encoders' part; empty where there is none."""
    return numerics.partition(_JOINT)[2]

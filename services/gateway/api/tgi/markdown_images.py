"""Images in a text of Markdown, `![what it shows](URL)`, as TGI's clients write them."""

from collections.abc import Iterator

from services.gateway.decoding.bounds import wrong

_MOST_IMAGES = 256


def split_at_images(text: str, field: str) -> Iterator[tuple[str, str | None]]:
    """Yields each text before an image with the image's URL; last the text behind them all, with None. What stands in
    the brackets has no `]`, what stands in the parentheses no `)`. Time grows with the length of the text alone. Raises
    InvalidRequest naming `field` for too many images.
    """
    images = end = since = 0
    # `since` is where the next search begins: nothing is looked at twice.
    while (middle := text.find("](", since)) >= 0:
        first = text.rfind("]", since, middle) + 1 or since
        start = text.find("![", first, middle)
        since = middle + 2
        if start < 0:
            continue
        close = text.find(")", since)
        if close < 0:
            break
        images += 1
        if images > _MOST_IMAGES:
            raise wrong(field, f"must not hold more than {_MOST_IMAGES} images")
        yield text[end:start], text[since:close]
        end = since = close + 1
    yield text[end:], None

"""The newest turns of a conversation with media that fit into its window."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from services.preprocess.items.intake import TakenMedia
from services.preprocess.prompt.builder import Draft
from services.preprocess.prompt.history import History

Take = Callable[[Sequence[int]], Awaitable[list[TakenMedia]]]
InThread = Callable[..., Awaitable[Any]]


async def windowed_prompt(
    history: History, take: Take, in_thread: InThread
) -> tuple[Draft, list[TakenMedia]]:
    """The draft of the turns that are kept, and their media. `take` takes items in by their numbers; `in_thread` calls
    a function beside the event loop. Raises InvalidRequest where not even the newest turn fits.

    Turns are looked at from the newest on, those that are too many by their texts alone not at all: media of turns that
    are left out are not decoded, but for the first of these turns.
    """
    turns = await in_thread(history.most, 0, len(history))
    low = 0  # turns that fit with their media, which are `images`
    images: list[TakenMedia] = []
    tried = images
    for number in range(1, turns + 1):
        items = history.media(number)
        if len(items) == len(images):
            continue
        tried = await take(items)
        if not await in_thread(history.fits, number, [image.pixels.item for image in tried]):
            turns = number - 1
            break
        low, images = number, tried
    kept = await in_thread(history.most, low, turns, [image.pixels.item for image in images])
    shown = images if kept else tried
    draft = await in_thread(history.prompt, kept, [image.pixels.item for image in shown])
    return draft, images

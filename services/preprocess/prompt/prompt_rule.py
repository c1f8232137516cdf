"""What a model family says about media in its prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np

from services.families.family import ItemSize
from services.preprocess.media.fitted_picture import Square
from services.preprocess.media.item_options import Options
from services.preprocess.media.made_item import MadeItem
from services.preprocess.prompt.item_options import PROCESSOR, check_names
from services.preprocess.prompt.mindie_layout import MindieLayout
from services.preprocess.prompt.tokenizer import Ids
from tessera.common.v1.media_pb2 import Modality


@dataclass(frozen=True)
class MediaSpan:
    """The tokens that stand for one media item.

    `embed_runs` are (start, length) pairs inside the span that take an embedding row; empty means
    all positions.
    """

    token_ids: tuple[int, ...]
    rows: int
    embed_runs: tuple[tuple[int, int], ...] = ()
    grid: tuple[int, int, int] = (0, 0, 0)
    frames_per_step: int = 0  # of a video: how many frames one step of the grid shows
    # For the decoder, by name.
    fields: Mapping[str, "np.ndarray[Any, np.dtype[Any]]"] = field(default_factory=dict)


class Place(Enum):
    """A place in a prompt that no token marks."""

    START = auto()
    END = auto()


@dataclass(frozen=True)
class After:
    """Behind the first occurrence of these tokens."""

    ids: tuple[int, ...]


class Mode(Enum):
    """What becomes of an update's target."""

    REPLACE = auto()
    INSERT = auto()


@dataclass(frozen=True)
class Update:
    """Where the spans of one modality go: each in the place of `target`'s next occurrence, or beside it. A text as
    target is one that the tokenizer has no token for: what stands before and behind it is tokenized apart.

    `around`: text that comes before and behind each occurrence, before the text is tokenized.
    """

    modality: Modality.ValueType
    target: tuple[int, ...] | str | Place | After
    mode: Mode = Mode.REPLACE
    around: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Example:
    """A text with images, and the ids that the checkpoint's own processor makes of them together."""

    text: str
    items: Sequence[MadeItem]
    ids: Sequence[int]


@dataclass(frozen=True)
class ImageProcessing:
    """What a family may know of the checkpoint's image processor: its settings and an output's shape."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = ()


class PromptRule:
    """A family's rule. As it stands here it is that of a model that takes no media.

    A family's class is made of a Checkpoint and its ImageProcessing, and raises InvalidRequest where the two contradict
    each other. Its methods are pure; they may run in any thread.
    """

    # The modalities that the model takes, and how many items of each a prompt may have; None is any number.
    limits: Mapping[Modality.ValueType, int | None] = {}

    # Texts of tokens that a user's words never become, beside those that the tokenizer calls special.
    protected: tuple[str, ...] = ()

    # Ids behind the text of a conversation with media, in the place of the tokenizer's own begin and end tokens; None:
    # the tokenizer's.
    media_ending: tuple[int, ...] | None = None

    # Ids before each part of a text behind an item, unless it is empty: parts are then encoded as texts by themselves.
    part_beginning: tuple[int, ...] = ()

    # Prompts that have to come out so, else the model is refused at start.
    examples: Sequence[Example] = ()

    # How MindIE-LLM writes a picture among token ids, where that is known. `span` is then also asked for items whose
    # `tokens` are set.
    mindie: MindieLayout | None = None

    @property
    def family(self) -> str:
        """The folder of the family, for messages."""
        return type(self).__module__.split(".")[2]

    def options(self, given: Options, modality: Modality.ValueType) -> Options:
        """What the processor of an item is called with for a request's `mm_processor_kwargs`, which are not empty.

        No item has more tokens by them than the checkpoint's own settings allow: encoder and decoder have room for
        these. Raises InvalidRequest naming an option that is not known of the family, or beyond its bound.
        """
        check_names(given, (), PROCESSOR, self.family)
        return {}

    def updates(self) -> Sequence[Update]:
        """Where spans go, one entry for each modality of `limits`."""
        return ()

    def span(self, item: ItemSize) -> MediaSpan:
        """The tokens of an item of a modality that is in `limits`, known from its size alone unless the rule asks for
        a `MadeItem`."""
        raise NotImplementedError

    def square(self, images: int) -> Square | None:
        """What pictures of a prompt with so many are fitted into before they are processed; None leaves them as they
        are."""
        return None

    def finish(self, ids: Ids) -> Ids:
        """A text's ids after changes that no item causes; spans are not in them yet. Ids that a client sends stay as
        they are."""
        return ids

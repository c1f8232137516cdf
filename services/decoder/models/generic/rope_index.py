"""Rotary positions of several axes, as the model's own `get_rope_index` gives them for a prompt."""

import inspect
from collections import defaultdict
from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.decoder.media.media_spans import embed_positions, read_spans
from shared.artifacts.small_tensor import array_of
from shared.errors import InvalidRequest
from shared.prompts.modality import NAMES, modality_of
from tessera.common.v1.media_pb2 import MediaItem, Modality

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
Positions = np.ndarray[tuple[int, int], np.dtype[np.int32]]
# What transformers calls a token's type.
_TYPES = {Modality.MODALITY_IMAGE: 1, Modality.MODALITY_VIDEO: 2, Modality.MODALITY_AUDIO: 3}


class RopeIndex:
    """A model's positions for prompts with media. `axes` is how many each token has."""

    def __init__(self, owner: Any) -> None:
        self._get = owner.get_rope_index
        self._known = inspect.signature(self._get).parameters
        self.axes = len(self(np.zeros(2, np.int64), ())[0])

    @classmethod
    def find(cls, model: Any) -> "RopeIndex | None":
        """Of a model, or of what it wraps; None for one whose positions are the tokens' indices."""
        owners = (model, getattr(model, "model", None))
        return next((cls(owner) for owner in owners if hasattr(owner, "get_rope_index")), None)

    def __call__(self, prompt: Ids, media: Sequence[MediaItem]) -> tuple[Positions, int]:
        """Positions [axes, tokens] of a prompt's ids, and what to add to the index of later tokens.

        It is called with those arguments that it has: ids, types and a mask of the tokens, and the items' fields, which
        are concatenated. Raises InvalidRequest for fields that it does not understand.
        """
        items = sorted(media, key=lambda item: item.offset)
        try:
            given = {**_fields(items, self._known.keys()), **_tokens(prompt, items)}
            found, delta = self._get(**{name: given[name] for name in self._known if name in given})
        except (TypeError, ValueError, IndexError, RuntimeError, StopIteration) as error:
            raise InvalidRequest(
                "INVALID_MEDIA",
                f"no positions follow from the prompt's media: {error!r}",
                field="media",
            ) from error
        return found[:, 0].to(torch.int32).cpu().numpy(), int(delta.item())


def _tokens(prompt: Ids, items: Sequence[MediaItem]) -> dict[str, Tensor]:
    types = np.zeros(len(prompt), np.int64)
    for item, span in zip(items, read_spans(items, len(prompt)), strict=True):
        types[embed_positions([span])] = _TYPES[modality_of(item)]
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    return {
        "input_ids": ids,
        "mm_token_type_ids": torch.from_numpy(types)[None],
        "attention_mask": torch.ones_like(ids),
    }


def _fields(items: Sequence[MediaItem], known: Set[str]) -> dict[str, Tensor]:
    """Those that are known: others need not fit each other."""
    found: defaultdict[str, list[Tensor]] = defaultdict(list)
    for item in items:
        for name in known & item.fields.keys():
            found[name].append(torch.from_numpy(array_of(item.fields[name])))
        if item.grid_h and not item.fields:  # of a prompt rule of ours
            modality = modality_of(item)
            grid = [[item.grid_t, item.grid_h, item.grid_w]]
            found[f"{NAMES[modality]}_grid_thw"].append(torch.tensor(grid))
            if modality == Modality.MODALITY_VIDEO:
                found["second_per_grid_ts"].append(torch.tensor([item.seconds_per_grid]))
    return {name: torch.cat(values) for name, values in found.items()}

"""Molmo2's encoder: `get_image_features` of its class, and zeros for what stands between and around its rows."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from services.vision_encoder.generic import GenericEncoder
from services.vision_encoder.towers.encoder import PixelArray
from shared.checkpoint.folder import Checkpoint


class Molmo2Encoder(GenericEncoder):
    """Tower, pooling and projection of one checkpoint. Rows are added to the embeddings of a picture's tokens, so that
    zeros leave its marks and separators as they are."""

    def _row_ids(self, checkpoint: Checkpoint) -> Sequence[int]:
        return list(self._processor.image_token_ids)

    def _rows(self, tensors: Mapping[str, PixelArray]) -> Tensor:
        rows = super()._rows(tensors)
        grids = {"image_grids": tensors["image_grids"].tolist()}
        text = self._processor.replace_image_token(grids, image_idx=0)
        tokenizer = self._processor.tokenizer
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        placeholder = tokenizer.convert_tokens_to_ids("<im_patch>")
        [places] = self._device.upload(torch.nonzero(ids == placeholder)[:, 0])
        return rows.new_zeros((len(ids), rows.shape[1])).index_copy_(0, places, rows)

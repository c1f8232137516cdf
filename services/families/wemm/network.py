"""WeMM's vision part: Idefics2's tower over a picture of any shape, sixteen patches joined to one row, a separator at
each end (MindIE-LLM, `flash_causal_wemm.py`, `modeling_downsampler.py`, `vision_model.py`)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

from services.families.wemm.sizes import JOINED

# Of the table of separators: what stands before a picture's rows, and what stands behind them.
_BEFORE, _BEHIND = 0, 1


class WeMMNetwork(nn.Module):
    """Tensor names as in checkpoints, with `tower` for `vision_tower`."""

    def __init__(
        self,
        vision: Idefics2VisionConfig,
        downsampler: Mapping[str, Any],
        separators: tuple[int, int],
    ) -> None:
        """downsampler: settings; separators: how many there are, and their width."""
        super().__init__()
        self.tower = Idefics2VisionTransformer._from_config(vision)
        self.downsampler = Downsampler(**downsampler)
        self.separators = nn.Embedding(*separators)
        self._patch = int(vision.patch_size)
        self._buckets = int(vision.image_size) // self._patch

    def forward(self, pixels: Tensor) -> Tensor:
        """Rows [rows + 2, width] of one picture [3, height, width] of whole patches."""
        embeddings = self.tower.embeddings
        patches = embeddings.patch_embedding(pixels[None])
        grid = patches.shape[-2:]
        places = position_ids(grid[0], grid[1], self._buckets).to(pixels.device)
        hidden = patches.flatten(2).transpose(1, 2) + embeddings.position_embedding(places)[None]
        hidden = self.tower.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
        hidden = self.tower.post_layernorm(hidden)
        rows = self.downsampler(hidden.view(*grid, -1))
        marks = self.separators.weight
        return torch.cat([marks[_BEFORE, None], rows, marks[_BEHIND, None]])


class Downsampler(nn.Module):
    """Squares of patches as one row each, then a perceptron."""

    def __init__(
        self,
        visual_hidden_size: int = 4096,
        llm_hidden_size: int = 4096,
        depth: int = 2,
        hidden_act: str = "gelu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.group_op = nn.Conv2d(visual_hidden_size, llm_hidden_size, JOINED, JOINED, bias=bias)
        layers: list[nn.Module] = []
        for _ in range(depth - 1):
            layers += [ACT2FN[hidden_act], nn.Linear(llm_hidden_size, llm_hidden_size, bias=bias)]
        self.linear_model = nn.Sequential(*layers)

    def forward(self, patches: Tensor) -> Tensor:
        """[rows, width] of patches [rows, columns, width], the last ones repeated where they do not fill a square."""
        rows, columns = patches.shape[:2]
        missing = (0, -columns % JOINED, 0, -rows % JOINED)
        apart = F.pad(patches.permute(2, 0, 1)[None].float(), missing, mode="replicate")
        joined = self.group_op(apart.to(patches.dtype))[0]
        made: Tensor = self.linear_model(joined.flatten(1).T)
        return made


def position_ids(rows: int, columns: int, buckets: int) -> Tensor:
    """Which entry [rows * columns] of the table each patch takes: it is spread over `buckets` in both directions.

    In float32, as Idefics2 had it before transformers 5: the sums decide between neighbours.
    """
    edges = torch.arange(1 / buckets, 1.0, 1 / buckets)

    def places(count: int) -> Tensor:
        shares = torch.arange(0, 1 - 1e-6, 1 / count)
        return torch.bucketize(shares, edges, right=True)

    return (places(rows)[:, None] * buckets + places(columns)).flatten()

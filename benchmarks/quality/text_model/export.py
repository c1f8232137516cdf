"""Writes a checkpoint folder that `transformers` loads unchanged, and beside it the text that was held out."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2ForCausalLM

CHECKPOINT = Path(__file__).parent / "checkpoint"
HELD_OUT = Path(__file__).parent / "held_out.json"
_MOST = 4000  # characters of a page


def export(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """In bfloat16, as most checkpoints are."""
    shipped: Any = copy.deepcopy(model)
    shipped.to("cpu", torch.bfloat16)
    shipped.config.dtype = torch.bfloat16
    defaults: Any = GenerationConfig
    shipped.generation_config = defaults(do_sample=False, bos_token_id=0, eos_token_id=0)
    shipped.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def export_pages(pages: dict[str, str]) -> None:
    """Writes the begin of each page by its name, as JSON."""
    shortened = {name: page[:_MOST] for name, page in pages.items()}
    HELD_OUT.write_text(json.dumps(shortened, ensure_ascii=False, indent=1) + "\n", "utf-8")

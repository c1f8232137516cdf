"""Which adapter an offline prompt is answered with."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from services.launcher.offline.lora_request import LoRARequest
from services.launcher.offline.prompts.prompts import Prompt

Adapter: TypeAlias = LoRARequest | str | None


def adapted(prompts: Sequence[Prompt], adapter: Adapter | Sequence[Adapter]) -> list[Prompt]:
    """The prompts for one adapter, or each for its own; None is what the model's own name means. Raises ValueError
    where there are not as many.
    """
    if adapter is None or isinstance(adapter, (str, LoRARequest)):
        listed: list[Adapter] = [adapter] * len(prompts)
    else:
        listed = list(adapter)
    if len(listed) != len(prompts):
        raise ValueError(
            f"lora_request must be one for all, or one for each of {len(prompts)} prompts, not {len(listed)}"
        )
    return [
        replace(prompt, adapter=LoRARequest(one) if isinstance(one, str) else one)
        for prompt, one in zip(prompts, listed, strict=True)
    ]

"""Which adapter an offline prompt is answered with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from services.launcher.offline.prompts import Prompt


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by its name, as vLLM's programs say it. Adapters are those that `lora_modules` named at start: the
    number and the path, which vLLM needs, are not looked at.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""


Adapter: TypeAlias = LoRARequest | str | None


def adapted(prompts: Sequence[Prompt], adapter: Adapter | Sequence[Adapter]) -> list[Prompt]:
    """The prompts for one adapter, or each for its own; None is the model itself. Raises ValueError where there are not
    as many.
    """
    if adapter is None or isinstance(adapter, (str, LoRARequest)):
        listed: list[Adapter] = [adapter] * len(prompts)
    else:
        listed = list(adapter)
    if len(listed) != len(prompts):
        raise ValueError(
            f"lora_request must be one for all, or one for each of {len(prompts)} prompts, not {len(listed)}"
        )
    return [_adapted(*pair) for pair in zip(prompts, listed, strict=True)]


def _adapted(prompt: Prompt, adapter: Adapter) -> Prompt:
    if adapter is None:
        return prompt
    name = adapter if isinstance(adapter, str) else adapter.lora_name
    return replace(prompt, body={**prompt.body, "model": name})

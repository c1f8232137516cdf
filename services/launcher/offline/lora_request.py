"""An adapter as programs name it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by its name, as vLLM's programs say it. `lora_path`: its folder, from which it is loaded unless it is
    one that the engine has from its start; with another `lora_int_id` it is read anew.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""

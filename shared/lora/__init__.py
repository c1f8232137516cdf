"""LoRA adapters as PEFT saves them: their folders, what is refused of them, and what names them. No torch."""

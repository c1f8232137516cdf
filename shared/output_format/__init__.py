"""How models write reasoning and tool calls: one table for what reads answers and what shapes them."""

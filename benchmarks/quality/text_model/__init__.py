"""The small text model that measurements of quality use: how it was trained; `checkpoint/` has it."""

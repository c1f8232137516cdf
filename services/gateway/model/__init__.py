"""The served model as the gateway knows it, without tensors."""

"""What changes logits before a token is chosen: penalties, banned words, masks of grammars."""

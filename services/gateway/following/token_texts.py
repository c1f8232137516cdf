"""The text of each token of a choice by itself, for replies that list tokens: a fold over the tokens alone."""

from services.gateway.following.answer import Answer
from shared.text.text_fold import TextFold


class TokenTexts:
    """From a choice's tokens to the text that each adds. Together they are the text of the choice where its stop
    strings stay in it, but for special tokens, which have their own names here.
    """

    def __init__(self, answer: Answer, choice: int, count: int = 0) -> None:
        """Behind the first `count` tokens, which are known."""
        self._table = answer.table
        self._fold = TextFold(answer.table, skip_special_tokens=True)
        for token in answer.token_ids(choice)[:count]:
            self._fold.push(token)

    def push(self, token: int) -> str:
        """The text of the next token: whole characters, "" for a part of one."""
        text = self._fold.push(token)
        return text + self.name(token) if self.is_special(token) else text

    def end(self) -> str:
        """What is left of broken characters behind the last token."""
        return self._fold.finish()

    def is_special(self, token: int) -> bool:
        """Whether a token is one that texts do not show."""
        return token in self._table.special_ids

    def name(self, token: int) -> str:
        """A token's own text, wherever it stands."""
        pieces = self._table.pieces
        return pieces[token].decode("utf-8", "replace") if 0 <= token < len(pieces) else ""

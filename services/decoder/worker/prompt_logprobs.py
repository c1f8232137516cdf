"""Log-probabilities of prompt tokens, for the few sequences that ask for them."""

import numpy as np
from torch import Tensor

from services.decoder.models.decoder_model import DecoderModel
from services.decoder.sampling.logprobs import log_softmax, top
from services.decoder.worker.inputs.rows import Rows
from services.decoder.worker.slots.kept_by_slot import Introduced, KeptBySlot
from services.decoder.worker.slots.slots import SlotTable
from shared.errors import Precondition
from shared.step_columns import RESULT_COLUMNS
from tessera.decoder.v1 import decoder_pb2

# Rows that go through the output layer at a time: bounds the memory of their logits.
_PIECE = 64


class PromptLogprobs(KeptBySlot):
    """Keeps which sequences asked, and each one's hidden state after its last computed prompt token.

    A token's probability comes from the token before it, which may be in an earlier chunk.
    """

    def __init__(self, model: DecoderModel, slots: SlotTable) -> None:
        self._model = model
        self._slots = slots
        self._wanted: dict[int, int] = {}
        self._carried: dict[int, tuple[int, Tensor]] = {}

    def introduce(self, slot: int, sequence: Introduced) -> None:
        """See `KeptBySlot.introduce`."""
        params = sequence.message.sampling
        if params.HasField("prompt_logprobs"):
            self._wanted[slot] = params.prompt_logprobs

    def drop(self, slot: int) -> None:
        """Forgets a sequence."""
        self._wanted.pop(slot, None)
        self._carried.pop(slot, None)

    def reported(self, rows: Rows) -> list[int]:
        """Which of the rows have something to report."""
        if not self._wanted:
            return []
        told = zip(rows.slot.tolist(), rows.start.tolist(), strict=True)
        return [
            row
            for row, (slot, start) in enumerate(told)
            if slot in self._wanted and start < self._slots.prompt_len[slot]
        ]

    def report(
        self, place: int, slot: int, start: int, hidden: Tensor
    ) -> decoder_pb2.PromptLogprobs:
        """For a row of the plan with hidden rows [count, H]. Raises Precondition if a part is
        missing: such sequences must be computed from their beginning."""
        end = min(start + hidden.shape[0], int(self._slots.prompt_len[slot]))
        first = max(start, 1)
        before = hidden[: end - start - (1 if start == 0 else 0)]
        if start > 0:
            carried = self._carried.get(slot)
            if carried is None or carried[0] != start:
                raise Precondition(
                    "PROMPT_LOGPROBS_GAP",
                    f"prompt log-probabilities need all tokens computed in order, not from {start}",
                )
            before = before.new_empty((end - start, hidden.shape[1]))
            before[0] = carried[1]
            before[1:] = hidden[: end - start - 1]
        self._carried[slot] = (start + hidden.shape[0], hidden[-1].clone())
        tokens = self._slots.tokens[slot, first:end]
        own, ids, values = self._score(before, tokens, self._wanted[slot])
        return decoder_pb2.PromptLogprobs(row=place, logprobs=own, top_ids=ids, top_logprobs=values)

    def _score(
        self, before: Tensor, tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]", k: int
    ) -> tuple[bytes, bytes, bytes]:
        own, ids, values = [], [], []
        for start in range(0, len(tokens), _PIECE):
            some = tokens[start : start + _PIECE]
            logits = self._model.logits(before[start : start + _PIECE]).cpu().numpy()
            logprobs = log_softmax(logits)
            # Tokens in the place of media may lie behind the vocabulary.
            own_ids = np.minimum(some, logprobs.shape[1] - 1)
            chosen = logprobs[np.arange(len(some)), own_ids]
            own.append(chosen.astype(RESULT_COLUMNS["logprobs"]).tobytes())
            for row in logprobs:
                best, best_values = top(row, k)
                ids.append(best.astype(RESULT_COLUMNS["top_ids"]).tobytes())
                values.append(best_values.astype(RESULT_COLUMNS["top_logprobs"]).tobytes())
        return b"".join(own), b"".join(ids), b"".join(values)

"""Greedy generation by transformers, and the comparison that allows for ties."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

_TIE = 1e-4


def greedy_tokens(
    model: PreTrainedModel, prompt: Sequence[int], count: int, embeds: Tensor | None = None
) -> tuple[list[int], Tensor]:
    """`count` tokens by `generate`, and the logits [count, vocabulary] they were chosen from."""
    inputs = {"input_ids": torch.tensor([list(prompt)])}
    if embeds is not None:
        inputs = {"inputs_embeds": embeds[None]}
    length = inputs.get("input_ids", torch.empty(1, 0)).shape[1]
    with torch.no_grad():
        output = model.generate(
            **inputs,
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
        )
    return output.sequences[0, length:].tolist(), torch.cat(output.scores)


def assert_same_up_to_ties(found: Sequence[int], expected: Sequence[int], logits: Tensor) -> None:
    """Equal, or different from a place on where the reference itself all but tied."""
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours != theirs:
            best = logits[place].topk(2).values
            gap = float(best[0] - best[1])
            assert gap < _TIE, f"token {place}: {ours} instead of {theirs}, top two {gap} apart"
            return


def assert_greedy(
    model: PreTrainedModel,
    prompt: Sequence[int],
    output: Sequence[int],
    tie: float = _TIE,
    **inputs: Tensor,
) -> None:
    """Each token of the output is the reference's choice after what stands before it, up to ties.

    One forward pass instead of one a token; `tie`: logits no further apart may change places; `inputs`: what the model
    takes beside the ids.
    """
    ids = torch.tensor([[*prompt, *output]])
    with torch.no_grad():
        logits = model(input_ids=ids, **inputs).logits[0, len(prompt) - 1 : -1]
    expected = logits.argmax(-1).tolist()
    assert len(output) == len(expected)
    for place, (ours, theirs) in enumerate(zip(output, expected, strict=True)):
        gap = float(logits[place, theirs] - logits[place, ours])
        assert gap < tie, f"token {place}: {ours} instead of {theirs}, {gap} apart"

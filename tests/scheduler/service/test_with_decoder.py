"""The scheduler with a real decoder, against transformers: choices, beams, log-probabilities and swapped-out blocks."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared.queue.token_log import decode_tokens, stride
from tessera.common.v1 import ending_pb2
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.decoder.greedy_reference import assert_same_up_to_ties, greedy_tokens
from tests.support.scheduler_bench import Bench

PROMPTS = [np.random.default_rng(i).integers(0, 400, 3 + 11 * i).tolist() for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return load_reference(folder)


async def beam_reference(
    model: PreTrainedModel, prompt: list[int], **options: Any
) -> list[list[int]]:
    """Outputs of transformers, best first, each as long as it is. Scheduler and decoder work on meanwhile."""

    def generate() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                pad_token_id=-1 if options.get("eos_token_id") is None else 0,
                **options,
            )
        return found

    found = await asyncio.to_thread(generate)
    outputs = []
    for row in found[:, len(prompt) :].tolist():
        stops = [i for i, token in enumerate(row) if token in (options["eos_token_id"] or ())]
        row = row[: stops[0] + 1] if stops else row
        outputs.append([token for token in row if token >= 0])
    return outputs


# Beams, length penalty, early stopping, number of stop ids.
SEARCHES = [
    (2, 1.0, False, 0),
    (4, 1.0, False, 3),
    (4, 0.6, True, 3),
    (3, 2.0, False, 1),
    (5, -0.5, True, 2),
    (4, 2.0, "never", 3),
    (3, 0.5, "never", 2),
    (3, -1.0, "never", 2),
]


async def test_beam_search_is_that_of_transformers(
    bench: Bench, folder: Path, reference: PreTrainedModel, short_tmp: Path
) -> None:
    await bench.real_decoder(folder, short_tmp / "d")
    bench.scheduler()
    asked = []
    for prompt in PROMPTS:
        for beams, penalty, early, stops in SEARCHES:
            # Likely tokens as stop ids, so that hypotheses do end.
            with torch.no_grad():
                logits = reference(torch.tensor([prompt])).logits[0, -1]
            stop_ids = logits.topk(3 * stops + 1).indices.tolist()[1::3][:stops]
            options = {"length_penalty": penalty, "early_stopping": early}
            ours: dict[str, Any] = {
                "early_stopping": early is True,
                "early_stopping_never": early == "never",
            }
            rid = await bench.ask(
                prompt,
                n=2,
                best_of=beams,
                use_beam_search=True,
                stop_token_ids=stop_ids,
                max_tokens=14,
                length_penalty=penalty,
                **ours,
            )
            asked.append((rid, prompt, stop_ids, {"num_beams": beams, **options}))
    text = await bench.ask(PROMPTS[1], max_tokens=14)  # shares the steps
    for rid, prompt, stop_ids, options in asked:
        answers = await bench.answers(rid, 2)
        more = {"eos_token_id": stop_ids or None, "max_new_tokens": 14, "num_return_sequences": 2}
        expected = await beam_reference(reference, prompt, **more, **options)
        assert [decode_tokens(records) for records, _ in answers] == expected
        for tokens, (_, ending) in zip(expected, answers, strict=True):
            stopped = tokens[-1] in stop_ids
            assert ending.reason == (
                ending_pb2.FINISH_REASON_STOP if stopped else ending_pb2.FINISH_REASON_LENGTH
            )
    tokens, _ = await bench.answer(text)
    assert_same_up_to_ties(tokens, *greedy_tokens(reference, PROMPTS[1], 14))


@pytest.mark.parametrize("early", [True, False, "never"])
async def test_beams_end_with_stop_strings_as_in_transformers(
    bench: Bench, folder: Path, reference: PreTrainedModel, short_tmp: Path, early: bool | str
) -> None:
    await bench.real_decoder(folder, short_tmp / "d")
    bench.scheduler()
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    asked = []
    for prompt in PROMPTS:
        # Texts of the free search's beams, from the middle of one token into another, so that there
        # is something to stop at.
        free = await beam_reference(
            reference, prompt, num_beams=4, num_return_sequences=4, max_new_tokens=14,
            eos_token_id=None,
        )  # fmt: skip
        texts = [words.decode(output) for output in free]
        found = {text[i : i + 2] for text in texts for i in range(2, len(text) - 1, 4)}
        stops = sorted(stop for stop in found if "\ufffd" not in stop)[:6] or ["e"]
        for beams, penalty in ((4, 1.0), (3, 0.3), (2, 2.0)):
            rid = await bench.ask(
                prompt,
                n=2,
                best_of=beams,
                use_beam_search=True,
                stop=stops,
                max_tokens=14,
                length_penalty=penalty,
                early_stopping=early is True,
                early_stopping_never=early == "never",
            )
            asked.append((rid, prompt, stops, {"num_beams": beams, "length_penalty": penalty}))
    stopped = 0
    for rid, prompt, stops, options in asked:
        answers = await bench.answers(rid, 2)
        expected = await beam_reference(
            reference, prompt, num_return_sequences=2, max_new_tokens=14, eos_token_id=None,
            early_stopping=early, stop_strings=stops, tokenizer=words, **options,
        )  # fmt: skip
        assert [decode_tokens(records) for records, _ in answers] == expected
        for tokens, (_, ending) in zip(expected, answers, strict=True):
            text = words.decode(tokens)
            if ending.reason == ending_pb2.FINISH_REASON_STOP:
                stopped += 1
                cut = text.encode()[: len(text.encode()) - ending.cut].decode()
                assert text[len(cut) :].startswith(ending.stop)
                assert not any(stop in cut for stop in stops)
            else:
                assert len(tokens) == 14 and not any(stop in text for stop in stops)
    assert stopped > 6


async def test_beams_carry_their_log_probabilities(
    bench: Bench, folder: Path, reference: PreTrainedModel, short_tmp: Path
) -> None:
    await bench.real_decoder(folder, short_tmp / "d")
    bench.scheduler()
    prompt = PROMPTS[2]
    rid = await bench.ask(prompt, best_of=3, use_beam_search=True, logprobs=2, length_penalty=1.0)
    ((records, _),) = await bench.answers(rid, 1, stride(2))
    tokens = decode_tokens(records, stride(2))
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    kind = [("token", "<i4"), ("pairs", [("id", "<i4"), ("logprob", "<f4")], 3)]
    for token, row, found in zip(tokens, logprobs, np.frombuffer(records, kind), strict=True):
        assert found["pairs"]["id"].tolist() == [token, *row.topk(2).indices.tolist()]
        expected = [float(row[token]), *row.topk(2).values.tolist()]
        assert found["pairs"]["logprob"].tolist() == pytest.approx(expected, abs=1e-4)


async def test_sampled_choices_are_those_of_requests_alone(
    bench: Bench, folder: Path, short_tmp: Path
) -> None:
    """Forked or not, together or resumed: random numbers go by seed, choice and position."""
    await bench.real_decoder(folder, short_tmp / "d", max_num_batched_tokens=24)
    bench.scheduler()
    options: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
    together = await bench.answers(await bench.ask(PROMPTS[3], n=4, **options), 4)
    fewer = await bench.answers(await bench.ask(PROMPTS[3], n=2, **options), 2)
    outputs = [decode_tokens(records) for records, _ in together]
    assert [decode_tokens(records) for records, _ in fewer] == outputs[:2]
    assert len({tuple(output) for output in outputs}) == 4


@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_preempted_sequences_give_equal_output(
    bench: Bench, folder: Path, reference: PreTrainedModel, short_tmp: Path, mode: str
) -> None:
    decoder = await bench.real_decoder(
        folder,
        short_tmp / "d",
        kv_cache_memory_bytes=96 << 10,
        num_host_blocks=64,
        max_model_len=96,
    )
    limits = decoder.loaded.worker.limits
    bench.scheduler(preemption_mode=mode)
    rids = [await bench.ask(prompt, max_tokens=40, n=2) for prompt in PROMPTS]
    for rid, prompt in zip(rids, PROMPTS, strict=True):
        expected, logits = greedy_tokens(reference, prompt, 40)
        for records, _ in await bench.answers(rid, 2):
            assert_same_up_to_ties(decode_tokens(records), expected, logits)
    needed = sum(-(-(len(p) + 40) // limits.block_size) for p in PROMPTS) * 2
    assert needed > limits.num_blocks, "the test must be tight"

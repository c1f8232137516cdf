"""Every way to sample, through the whole system and the OpenAI client, compared with transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import torch
from openai import OpenAI
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from services.launcher.redis.embedded_redis import EmbeddedRedis
from tessera.gateway.v1.chat_pb2 import CompleteRequest, GenerationOptions, TokenIds
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.processes.services_in_process import Addresses, services_in_process

pytestmark = pytest.mark.timeout(600)
PROMPT = [5, 9, 33, 60, 12, 7, 41, 80, 23, 6, 90, 11, 50, 17, 19, 70, 8, 14, 35]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return load_reference(folder)


@pytest.fixture(scope="module")
def system(folder: Path, redis_server: EmbeddedRedis) -> Iterator[Addresses]:
    with services_in_process(folder, redis_server.url) as running:
        yield running


@pytest.fixture(scope="module")
def client(system: Addresses) -> Iterator[OpenAI]:
    with OpenAI(base_url=system.base_url, api_key="none", max_retries=0, timeout=90) as opened:
        yield opened


def complete(client: OpenAI, count: int = 12, **more: Any) -> Any:
    """A completion of PROMPT with token ids, which goes on to its length unless `more` says so."""
    own = {k: more.pop(k) for k in list(more) if k not in _STANDARD}
    extra = {"return_token_ids": True, "ignore_eos": True, **own}
    return client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=count, extra_body=extra, **more
    )


_STANDARD = {"n", "best_of", "temperature", "seed", "logprobs", "echo", "stop", "top_p"}


def ids(answer: Any) -> list[list[int]]:
    return [choice.token_ids for choice in answer.choices]


def scores_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [len(tokens) - 1, vocabulary] of what follows each token but the last."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits
    return logits[0, :-1].double().log_softmax(-1)


def test_a_seed_determines_every_choice(client: OpenAI) -> None:
    answer = complete(client, n=4, temperature=1.0, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({tuple(tokens) for tokens in ids(answer)}) == 4
    assert ids(answer) == ids(complete(client, n=4, temperature=1.0, seed=5))
    assert ids(answer)[:2] == ids(complete(client, n=2, temperature=1.0, seed=5))
    assert ids(answer)[0] == ids(complete(client, temperature=1.0, seed=5))[0]
    assert answer.usage.completion_tokens == 4 * 12
    greedy = complete(client, n=2, temperature=0)
    assert ids(greedy)[0] == ids(greedy)[1]


def test_several_prompts_are_answered_as_each_alone(client: OpenAI) -> None:
    prompts = [PROMPT, PROMPT[:7], PROMPT[3:]]
    options: Any = {"model": "tiny", "max_tokens": 8, "n": 2, "temperature": 1.0, "seed": -7}
    extra = {"return_token_ids": True, "ignore_eos": True}
    together = client.completions.create(prompt=prompts, extra_body=extra, **options)
    alone = [
        client.completions.create(prompt=prompt, extra_body=extra, **options) for prompt in prompts
    ]
    assert ids(together) == [tokens for answer in alone for tokens in ids(answer)]
    cut = {**extra, "truncate_prompt_tokens": 7}
    longer = client.completions.create(prompt=[PROMPT, PROMPT[:7]], extra_body=cut, **options)
    assert longer.usage is not None and longer.usage.prompt_tokens == 2 * 7
    assert ids(longer)[2:] == ids(alone[1])


def test_streamed_choices_equal_those_in_one_answer(client: OpenAI) -> None:
    whole = complete(client, n=3, temperature=1.0, seed=8, logprobs=2)
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, n=3, temperature=1.0, seed=8, logprobs=2,
        stream=True, stream_options={"include_usage": True},
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    values: dict[int, list[float]] = {0: [], 1: [], 2: []}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            tokens[choice.index] += getattr(choice, "token_ids", None) or []
            values[choice.index] += (
                (choice.logprobs.token_logprobs or []) if choice.logprobs else []
            )
    assert list(tokens.values()) == ids(whole)
    assert [choice.logprobs.token_logprobs for choice in whole.choices] == list(values.values())
    assert usage is not None and usage.completion_tokens == 36


def test_log_probabilities_are_those_of_transformers(
    client: OpenAI, reference: PreTrainedModel
) -> None:
    answer = complete(client, n=2, temperature=0.9, seed=3, logprobs=4, prompt_logprobs=3)
    for choice in answer.choices:
        expected = scores_of(reference, PROMPT + choice.token_ids)[len(PROMPT) - 1 :]
        own = expected[range(12), choice.token_ids].tolist()
        assert choice.logprobs.token_logprobs == pytest.approx(own, abs=2e-4)
        for told, row in zip(choice.logprobs.top_logprobs, expected, strict=True):
            best = sorted(told.values(), reverse=True)[:4]
            assert best == pytest.approx(row.topk(4).values.tolist(), abs=2e-4)
    told = answer.choices[0].prompt_logprobs
    expected = scores_of(reference, PROMPT)
    assert told[0] is None and len(told) == len(PROMPT)
    for token, entry, row in zip(PROMPT[1:], told[1:], expected, strict=True):
        assert entry[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=2e-4)
        best = sorted((e["logprob"] for e in entry.values()), reverse=True)[:3]
        assert best == pytest.approx(row.topk(3).values.tolist(), abs=2e-4)


def test_a_prompt_is_scored_without_generating(client: OpenAI, reference: PreTrainedModel) -> None:
    answer = complete(client, 0, echo=True, logprobs=1)
    told = answer.choices[0].logprobs
    expected = scores_of(reference, PROMPT)[range(len(PROMPT) - 1), PROMPT[1:]].tolist()
    assert told.token_logprobs[0] is None
    assert told.token_logprobs[1:] == pytest.approx(expected, abs=2e-4)
    assert answer.usage.completion_tokens == 0


def test_best_of_returns_the_most_likely_choices(client: OpenAI) -> None:
    every = complete(client, n=6, temperature=1.0, seed=21, logprobs=0)
    best = complete(client, n=2, best_of=6, temperature=1.0, seed=21, logprobs=0)
    sums = [sum(choice.logprobs.token_logprobs) for choice in every.choices]
    order = sorted(range(6), key=lambda i: -sums[i])
    assert ids(best) == [ids(every)[i] for i in order[:2]]


def beams_of(reference: PreTrainedModel, **options: object) -> list[list[int]]:
    """The outputs of the three best of four beams, without padding (-1)."""
    with torch.no_grad():
        found = reference.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT)),
            max_new_tokens=12,
            num_beams=4,
            num_return_sequences=3,
            do_sample=False,
            eos_token_id=None,
            **options,
        )
    return [[t for t in row if t >= 0] for row in found[:, len(PROMPT) :].tolist()]


@pytest.mark.parametrize("penalty", [1.0, 0.3])
def test_beams_are_those_of_transformers(
    client: OpenAI, reference: PreTrainedModel, penalty: float
) -> None:
    answer = complete(
        client, n=3, best_of=4, use_beam_search=True, length_penalty=penalty, logprobs=0
    )
    assert ids(answer) == beams_of(reference, length_penalty=penalty)
    for choice in answer.choices:
        scores = scores_of(reference, PROMPT + choice.token_ids)[len(PROMPT) - 1 :]
        own = scores[range(12), choice.token_ids].tolist()
        assert choice.logprobs.token_logprobs == pytest.approx(own, abs=2e-4)


def test_beams_end_with_stop_strings(
    client: OpenAI, reference: PreTrainedModel, folder: Path
) -> None:
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    beams: dict[str, Any] = {
        "n": 3,
        "best_of": 4,
        "use_beam_search": True,
        "early_stopping": "never",
    }
    free = [choice.text for choice in complete(client, **beams).choices]
    stops = [stop for text in free if "\ufffd" not in (stop := text[3:5])][:2] or ["e"]
    answer = complete(client, stop=stops, **beams)
    outputs = beams_of(
        reference, early_stopping="never", pad_token_id=-1, stop_strings=stops, tokenizer=words
    )
    assert ids(answer) == outputs
    for choice in answer.choices:
        assert not any(stop in choice.text for stop in stops)
        assert (choice.finish_reason == "stop") == (choice.stop_reason in stops)


def test_forbidden_tokens_are_never_generated(client: OpenAI) -> None:
    plain = ids(complete(client, 20, temperature=0))[0]
    bad = ids(complete(client, 20, temperature=0, bad_token_ids=plain[:3]))[0]
    assert not set(plain[:3]) & set(bad)
    only = ids(complete(client, 20, temperature=1.0, allowed_token_ids=[7, 8, 9]))[0]
    assert set(only) <= {7, 8, 9}
    biased = ids(complete(client, 5, temperature=0, logit_bias={"55": 100}))[0]
    assert biased == [55] * 5
    answer = complete(client, 20, temperature=0, stop_token_ids=[plain[2]], ignore_eos=True)
    assert ids(answer)[0] == plain[: plain.index(plain[2]) + 1]
    later = complete(client, 20, temperature=0, stop_token_ids=[plain[2]], min_tokens=10)
    assert len(ids(later)[0]) >= 10


def test_penalties_are_those_of_transformers(client: OpenAI, reference: PreTrainedModel) -> None:
    found = ids(complete(client, 20, temperature=0, repetition_penalty=1.4))[0]
    with torch.no_grad():
        expected = reference.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT)),
            max_new_tokens=20,
            repetition_penalty=1.4,
            do_sample=False,
            eos_token_id=None,
        )
    assert found == expected[0, len(PROMPT) :].tolist()
    rare = ids(complete(client, 20, temperature=0, frequency_penalty=2.0, presence_penalty=2.0))[0]
    plain = ids(complete(client, 20, temperature=0))[0]
    assert len(set(rare)) >= len(set(plain))


def test_bad_words_are_never_generated(client: OpenAI) -> None:
    word = "circle"
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "red"}],
        max_tokens=30,
        temperature=1.0,
        seed=1,
        extra_body={"bad_words": [word], "ignore_eos": True},
    )
    assert word not in (answer.choices[0].message.content or "").split()


def test_grpc_gives_the_answers_of_rest(client: OpenAI, system: Addresses) -> None:
    whole = complete(client, n=2, temperature=1.0, seed=4, logprobs=1)
    options = GenerationOptions(
        max_tokens=12, n=2, temperature=1.0, seed=4, logprobs=1, ignore_eos=True,
        return_token_ids=True, prompt_logprobs=0,
    )  # fmt: skip
    request = CompleteRequest(token_ids=TokenIds(ids=PROMPT), options=options)
    with grpc.insecure_channel(system.grpc_address) as channel:
        events = list(ChatServiceStub(channel).Complete(request))
    assert len(events[1].prompt_logprobs.tokens) == len(PROMPT)
    for choice in range(2):
        deltas = [e.delta for e in events if e.WhichOneof("event") == "delta"]
        deltas = [delta for delta in deltas if delta.choice == choice]
        assert [t for delta in deltas for t in delta.token_ids] == ids(whole)[choice]
        told = [entry.logprob for delta in deltas for entry in delta.logprobs]
        assert told == pytest.approx(whole.choices[choice].logprobs.token_logprobs, abs=1e-6)
    assert events[-1].usage.completion_tokens == 24


def test_too_many_choices_are_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, n=1000)
    assert caught.value.param == "n"

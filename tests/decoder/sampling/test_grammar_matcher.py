"""Grammars by llguidance, with real tokenizers: masks, endings, refusals, and the text that comes of them."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from services.decoder.sampling.grammar_matcher import GrammarMatcher
from services.decoder.sampling.grammar_tokenizer import GrammarTokenizer
from services.decoder.sampling.logits_processors.token_masks import Grammar
from services.decoder.sampling.sampler import Sampler
from shared.checkpoint.folder import Checkpoint
from shared.errors import ServingError
from shared.text.text_fold import TokenBytes
from tessera.common.v1.sampling_pb2 import SamplingParams
from tests.support.tokenizers import (
    byte_level_tokenizer,
    regex_replace_tokenizer,
    save,
    sentencepiece_like_tokenizer,
    token_id,
    trained_sentencepiece,
)

NONE = np.empty(0, np.int64)
VOCABULARY = 512  # more than the tokenizer has
WORDS = byte_level_tokenizer()
END, OTHER_END, START = (
    token_id(WORDS, name) for name in ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["circle", "square"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": LLMatcher.grammar_from_json_schema(SCHEMA),
    "regex": "start: /(ab|c){1,9}[0-9]*\\./",
    "special": f'start: "red" <[{START}]> "blue"{{1,3}} <|im_start|>?',
    "endless": "start: /[a-z ]+/",
    "tokens": f"start: <[^{START}]>{{0,9}} <[{START}]> <[*]>*",
}


def loaded(checkpoint: Checkpoint) -> "Future[GrammarTokenizer]":
    found: Future[GrammarTokenizer] = Future()
    found.set_result(GrammarTokenizer.load(checkpoint))
    return found


def checkpoint_of(folder: Path, words: Tokenizer | None, ends: list[int]) -> Checkpoint:
    if words is not None:
        save(words, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return Checkpoint(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> "Future[GrammarTokenizer]":
    return loaded(checkpoint_of(tmp_path_factory.mktemp("words"), WORDS, [END, OTHER_END]))


@pytest.fixture
def matcher(tokenizer: "Future[GrammarTokenizer]") -> GrammarMatcher:
    return GrammarMatcher(tokenizer)


def allowed(matcher: GrammarMatcher, slot: int) -> list[int]:
    """The tokens that may come next. Raises what `fill` returns."""
    bits = np.full((1, VOCABULARY // 32), 0xFFFFFFFF, np.uint32)
    for error in matcher.fill(bits, [slot]).values():
        raise error
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def begin(matcher: GrammarMatcher, slot: int, text: str, **more: Any) -> None:
    matcher.introduce(slot, matcher.prepare(Grammar(text, **more)))


def params(grammar: str = "", **changes: Any) -> SamplingParams:
    values = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": 3}
    return SamplingParams(grammar=grammar, **{**values, **changes})


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_after_a_replay_are_those_of_going_on(matcher: GrammarMatcher, name: str) -> None:
    numbers = np.random.default_rng(5)
    begin(matcher, 0, GRAMMARS[name])
    output: list[int] = []
    while len(output) < 40 and not {END, OTHER_END}.intersection(output):
        expected = allowed(matcher, 0)
        begin(matcher, 1, GRAMMARS[name], output=output)
        assert allowed(matcher, 1) == expected, WORDS.decode(output)
        output.append(int(numbers.choice(expected)))
        matcher.commit(0, output[-1])
    assert len(output) > 3
    begin(matcher, 1, GRAMMARS[name], output=output)
    assert allowed(matcher, 1) == allowed(matcher, 0)


def test_an_output_ends_by_all_ends_of_the_model_and_special_stop_ids(
    matcher: GrammarMatcher,
) -> None:
    letter = token_id(WORDS, "b")
    begin(matcher, 0, 'start: "a"', stop_ids=[END, START, letter])
    assert not {END, OTHER_END, START, letter}.intersection(allowed(matcher, 0))
    matcher.commit(0, token_id(WORDS, "a"))
    ends = sorted((END, OTHER_END, START))
    assert allowed(matcher, 0) == ends
    for end in ends:
        begin(matcher, 1, 'start: "a"', stop_ids=[START], output=[token_id(WORDS, "a"), end])
        assert allowed(matcher, 1) == ends, "what is planned ahead of an ending does not fail"
        matcher.commit(1, end)
    begin(matcher, 2, 'start: "a"')
    matcher.commit(2, token_id(WORDS, "a"))
    assert allowed(matcher, 2) == sorted((END, OTHER_END))


def test_ends_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    beyond = WORDS.get_vocab_size() - 1  # of the tokenizer, not of the model
    words = beyond // 32
    assert words > END // 32
    folder = checkpoint_of(tmp_path, WORDS, [beyond, END, VOCABULARY + 1])
    matcher = GrammarMatcher(loaded(folder))
    begin(matcher, 0, 'start: "a"', output=[token_id(WORDS, "a")])
    bits = np.zeros((1, words), np.uint32)
    assert not matcher.fill(bits, [0])
    found = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    assert found.tolist() == [END]


def test_ids_that_the_tokenizer_lacks_never_come(matcher: GrammarMatcher) -> None:
    begin(matcher, 0, "start: /(.|\\n)*/")
    found = allowed(matcher, 0)
    assert max(found) < WORDS.get_vocab_size() < VOCABULARY
    assert len(found) > 300


def test_a_fork_goes_its_own_way(matcher: GrammarMatcher) -> None:
    a, b = token_id(WORDS, "a"), token_id(WORDS, "b")
    begin(matcher, 0, 'start: "ab" | "aab"')
    matcher.commit(0, a)
    matcher.fork(1, 0)
    matcher.commit(1, a)
    assert b in allowed(matcher, 0) and a in allowed(matcher, 0)
    assert allowed(matcher, 1) == [b]
    matcher.drop(0)
    matcher.drop(1)
    assert len(matcher) == 0


def follow(
    matcher: GrammarMatcher, count: int, scale: float = 1.0, **changes: Any
) -> tuple[list[int], ServingError | None]:
    """What comes of random logits, until it ends."""
    sampler = Sampler(1, VOCABULARY, matcher)
    sampler.introduce(0, 0, params(**changes), NONE, NONE)
    numbers, slots = np.random.default_rng(1), np.zeros(1, np.int64)
    output: list[int] = []
    while len(output) < count:
        logits = (scale * numbers.standard_normal((1, VOCABULARY))).astype(np.float32)
        chosen = sampler.sample(logits, slots, np.asarray([len(output)]))
        if chosen.failed:
            return output, chosen.failed[0]
        sampler.commit(slots, chosen.tokens)
        output.append(int(chosen.tokens[0]))
        if output[-1] in (END, OTHER_END):
            break
    return output, None


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("seed", range(5))
def test_random_logits_become_what_the_schema_describes(
    matcher: GrammarMatcher, temperature: float, seed: int
) -> None:
    output, error = follow(
        matcher, 200, temperature=temperature, seed=seed, grammar=GRAMMARS["schema"]
    )
    assert error is None and output[-1] in (END, OTHER_END)
    found = json.loads(WORDS.decode(output[:-1]))
    assert list(found) == ["name", "size", "kind"]
    assert len(found["name"]) <= 6 and 1 <= found["size"] <= 99
    assert found["kind"] in ("circle", "square")


def test_min_tokens_yields_where_the_grammar_is_at_its_end(matcher: GrammarMatcher) -> None:
    stops = [END, OTHER_END]
    short, error = follow(matcher, 9, grammar='start: "a"', min_tokens=5, stop_token_ids=stops)
    assert error is None and len(short) == 2 and short[1] in stops
    text = "start: /a{1,99}/"
    long, error = follow(matcher, 99, 0.0, grammar=text, min_tokens=30, stop_token_ids=stops)
    assert error is None and len(long) > 29


def test_what_other_settings_forbid_stays_forbidden(matcher: GrammarMatcher) -> None:
    a = token_id(WORDS, "a")
    _, error = follow(matcher, 9, grammar='start: "a"', bad_token_ids=[a])
    assert error is not None and error.reason == "NO_TOKEN_LEFT" and "grammar" in error.message


def test_an_output_of_another_grammar_is_an_error(matcher: GrammarMatcher) -> None:
    with pytest.raises(ServingError) as caught:
        begin(matcher, 0, 'start: "a"', output=[token_id(WORDS, "b")])
    assert caught.value.reason == "GRAMMAR_LEFT"


def test_a_grammar_that_becomes_too_complex_fails_and_does_not_end(matcher: GrammarMatcher) -> None:
    ways = " | ".join(f"w{n}" for n in range(2500))
    rules = "\n".join(f'w{n}: "b" "{n}"' for n in range(2500))
    output, error = follow(matcher, 9, grammar=f'start: "a" y\ny: {ways}\n{rules}')
    assert WORDS.decode(output) in ("", "a", "ab")
    assert error is not None and error.reason == "GRAMMAR_TOO_COMPLEX"
    assert "<" not in error.message and "\n" not in error.message


def test_a_grammar_that_nothing_goes_on_fails_and_does_not_end(matcher: GrammarMatcher) -> None:
    output, error = follow(matcher, 9, grammar='start: "a" NO\nNO: /[a-z]+/ & /[0-9]+/')
    assert WORDS.decode(output) == "a"
    assert error is not None and error.reason == "NO_TOKEN_LEFT" and "grammar" in error.message


@pytest.mark.parametrize(
    "text", ["start: (", "start: /a(?=b)/", '{"grammars": [{"json_schema": 7}]}']
)
def test_a_grammar_that_cannot_be_read_is_refused(matcher: GrammarMatcher, text: str) -> None:
    with pytest.raises(ServingError) as caught:
        begin(matcher, 0, text)
    assert caught.value.reason == "INVALID_GRAMMAR"
    assert caught.value.metadata["field"] == "grammar"


def trained(folder: Path) -> None:
    trained_sentencepiece(folder / "tokenizer.model", byte_fallback=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: save(byte_level_tokenizer(), folder),
        lambda folder: save(sentencepiece_like_tokenizer(), folder),
        trained,
    ],
    ids=["byte level", "like SentencePiece", "a SentencePiece model"],
)
def test_tokens_have_the_bytes_that_answers_have(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path)
    known = GrammarTokenizer.load(checkpoint_of(tmp_path, None, [2]))
    table = TokenBytes.from_tokenizer_json(tmp_path / "tokenizer.json")
    compared = 0
    for index, piece in enumerate(table.pieces):
        if not known.is_special(index):
            compared += 1
            assert known.tokenizer.decode_bytes([index]) == piece, index
    assert compared > 250


def test_a_tokenizer_that_cannot_be_used_refuses_every_grammar(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, regex_replace_tokenizer(), [2])
    tokenizer = GrammarTokenizer.begin(checkpoint)
    with pytest.raises(ServingError) as caught:
        begin(GrammarMatcher(tokenizer), 0, 'start: "a"')
    assert caught.value.reason == "UNSUPPORTED_SAMPLING"
    assert caught.value.metadata["field"] == "grammar"

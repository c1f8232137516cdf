"""`LLM`: answers in order, those of transformers, through the death of a service."""

import threading
import time
from pathlib import Path
from typing import Any

import PIL.Image
import psutil
import pytest
import torch

from tessera import LLM, RequestRefused, SamplingParams
from tests.support.checkpoints import load_reference, reference_inputs
from tests.support.preprocess.service import picture

pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("offline")]

MARKED = "<|vision_start|><|image_pad|><|vision_end|>What is there?"


def greedy(tokens: int = 8, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def expected(folder: Path, text: str, *pictures: PIL.Image.Image, tokens: int = 8) -> list[int]:
    """What transformers' `generate` gives."""
    inputs = reference_inputs(folder, text, pictures)
    model = load_reference(folder)
    with torch.no_grad():
        found = model.generate(
            **inputs, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, eos_token_id=[]
        )
    ids: list[int] = found[0, inputs["input_ids"].shape[1] :].tolist()
    return ids


def test_answers_come_in_the_order_of_prompts_and_are_those_of_transformers(
    llm: LLM, folder: Path
) -> None:
    seen = picture(56, 84, seed=3)
    prompts = ["The red circle", {"prompt": MARKED, "multi_modal_data": {"image": seen}}, "and"]
    outputs = llm.generate(prompts, greedy())
    texts = ["The red circle", MARKED, "and"]
    assert [output.prompt for output in outputs] == texts
    pictures = [[], [seen], []]
    for output, text, shown in zip(outputs, texts, pictures, strict=True):
        (answer,) = output.outputs
        assert list(answer.token_ids) == expected(folder, text, *shown)
        assert output.finished and answer.finish_reason == "length"
        assert output.metrics.first_token_time is not None
    again = llm.generate({"prompt_token_ids": list(outputs[0].prompt_token_ids)}, greedy())
    assert again[0].outputs[0].text == outputs[0].outputs[0].text
    assert again[0].prompt_token_ids == outputs[0].prompt_token_ids


def test_a_conversation_is_answered_whichever_way_its_picture_is_given(
    llm: LLM, tmp_path: Path
) -> None:
    seen = picture(56, 56, seed=4)
    seen.save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    asked = [
        [{"role": "user", "content": [{"image": one}, {"text": "What?"}]}]
        for one in (seen, tmp_path / "a.png", data)
    ]
    first, *others = llm.chat(asked, greedy())
    assert {other.outputs[0].text for other in others} == {first.outputs[0].text}
    assert {other.prompt_token_ids[0] for other in others} == {first.prompt_token_ids[0]}
    (alone,) = llm.chat(asked[0], greedy())
    assert alone.outputs[0].token_ids == first.outputs[0].token_ids
    with pytest.raises(RequestRefused, match="max_window_size"):
        llm.chat(asked[0], greedy(), max_window_size=5)


def test_a_window_leaves_the_oldest_turns_out(llm: LLM) -> None:
    def turn(question: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": "red"}]

    newest = [*turn("and the blue square?"), {"role": "user", "content": "why?"}]
    system = {"role": "system", "content": "You answer."}
    (short,) = llm.chat([system, *newest], greedy())
    window = len(short.prompt_token_ids) + 1
    history = [system, *turn("what is there?"), *turn("and?"), *newest]
    (cut,) = llm.chat(history, greedy(), max_window_size=window)
    assert cut.prompt_token_ids == short.prompt_token_ids
    assert cut.outputs[0].token_ids == short.outputs[0].token_ids
    (whole,) = llm.chat(history, greedy())
    assert len(whole.prompt_token_ids) > window


@pytest.mark.parametrize("is_chat", [False, True])
def test_log_probabilities_are_by_token_and_ranked(llm: LLM, is_chat: bool) -> None:
    params = greedy(4, logprobs=2, prompt_logprobs=1)
    ask: Any = llm.chat if is_chat else llm.generate
    asked: Any = [{"role": "user", "content": "red"}] if is_chat else "The red circle"
    (output,) = ask(asked, params)
    (answer,) = output.outputs
    assert answer.logprobs is not None and len(answer.logprobs) == 4
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry[token].rank == 1 and len(entry) == 2
        assert all(one.decoded_token for one in entry.values())
        assert entry[token].logprob == max(one.logprob for one in entry.values())
    total = sum(
        entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)
    )
    assert answer.cumulative_logprob == pytest.approx(total)
    scores = output.prompt_logprobs
    assert scores is not None and scores[0] is None
    assert len(scores) == len(output.prompt_token_ids)
    assert all(
        token in entry
        for token, entry in zip(output.prompt_token_ids[1:], scores[1:], strict=True)
        if entry is not None
    )


def test_several_answers_beams_and_stops(llm: LLM) -> None:
    (drawn,) = llm.generate("The red circle", SamplingParams(n=3, seed=5, max_tokens=6))
    assert [answer.index for answer in drawn.outputs] == [0, 1, 2]
    assert len({answer.text for answer in drawn.outputs}) > 1
    beams = SamplingParams(use_beam_search=True, best_of=3, n=2, max_tokens=5, ignore_eos=True)
    (best,) = llm.generate("The red circle", beams)
    assert len(best.outputs) == 2 and all(len(one.token_ids) == 5 for one in best.outputs)
    (plain,) = llm.generate("The red circle", greedy())
    third = plain.outputs[0].token_ids[2]
    (stopped,) = llm.generate("The red circle", greedy(stop_token_ids=[third]))
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == third


def test_a_refused_prompt_names_its_field_and_costs_no_other_call(llm: LLM) -> None:
    with pytest.raises(RequestRefused, match="maximum context length"):
        llm.generate(["fine", "red " * 999], greedy())
    with pytest.raises(ValueError, match="logprobs"):
        llm.generate("fine", greedy(logprobs=10_000))
    with pytest.raises(ValueError, match="one for each of 2 prompts"):
        llm.generate(["a", "b"], [greedy()])
    with pytest.raises(RequestRefused, match=r"messages\[0\].role"):
        llm.chat([{"role": "nobody", "content": "hi"}])
    assert llm.generate("fine", greedy(2))[0].finished
    assert llm.generate([]) == []
    with pytest.raises(RequestRefused, match=r"prompts\[2\]: .*no tokens"):
        llm.generate(["a", "b", "", "c"], use_tqdm=False)


def test_killed_services_cost_an_answer_nothing(llm: LLM) -> None:
    (undisturbed,) = llm.generate("The red circle", greedy(480))
    launcher = psutil.Process(llm.pid)
    # Found while all of them live: a killed one has no command line to be found by.
    commands = [(child, child.cmdline()) for child in launcher.children()]
    victims = [
        next(child for child, command in commands if service in command)
        for service in ("services.decoder", "services.gateway")
    ]
    killed = []

    def kill() -> None:
        time.sleep(0.1)
        for victim in victims:
            victim.kill()
            killed.append(time.time())
        time.sleep(0.5)
        launcher.kill()
        killed.append(time.time())

    killing = threading.Thread(target=kill)
    killing.start()
    (output,) = llm.generate("The red circle", greedy(480))
    killing.join()
    assert len(killed) == 3
    assert output.metrics.finished_time is not None and output.metrics.finished_time > killed[-1]
    assert output.outputs[0].token_ids == undisturbed.outputs[0].token_ids
    assert output.outputs[0].text == undisturbed.outputs[0].text
    assert llm.pid != launcher.pid


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"max_modl_len": 5}, "is max_model_len meant"),
        ({"port": 8000}, "port cannot be given"),
        ({"max_model_len": 0}, "max_model_len"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(flags: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        LLM(**flags)

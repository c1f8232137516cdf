"""`tessera run`: asks a model about pictures, batch by batch, and prints and keeps the answers."""

import sys
from collections.abc import Iterator, Mapping, Sequence

from services.launcher.offline import LLM, EngineFailed, RequestRefused, SamplingParams
from services.launcher.offline.outputs import RequestOutput
from services.launcher.run.inputs import Input, InputError, read_inputs
from services.launcher.run.records import BatchTimes, append_times, save_answers
from services.launcher.run.settings import RunSettings

_WARM_UP_TOKENS = 2
# Names the picture in the message of a refusal.
_PICTURE = "messages[0].content[0]"


def main(arguments: list[str]) -> int:
    """Returns 0, or 1 where something could not be answered."""
    settings = RunSettings.load(arguments, prog="tessera run")
    try:
        inputs = read_inputs(settings.images, settings.input_texts, settings.input_dict)
        with LLM(settings.model, **settings.serve_flags) as llm:
            return 1 if run_batches(llm, inputs, settings) else 0
    except (InputError, RequestRefused, EngineFailed, ValueError) as error:
        print(f"tessera run: {error}", file=sys.stderr)
        return 1


def run_batches(llm: LLM, inputs: Sequence[Input], settings: RunSettings) -> int:
    """Asks about everything. What is kept is written after each batch: an interruption loses no answer. Returns how
    many pictures were refused: each is named on stderr, and costs nothing but itself.

    Raises RequestRefused where it is not a picture that is at fault.
    """
    failed = 0
    if not _warm_up(llm, inputs, settings):
        return _tell(_refused(llm, inputs, settings))
    for asked, count in batches(inputs, settings.max_batch_size):
        batch, outputs = asked, list[RequestOutput]()
        try:
            outputs = _ask(llm, batch, settings, settings.max_output_length)
        except RequestRefused:
            refused = _refused(llm, batch, settings)
            if not refused:
                raise
            failed += _tell(refused)
            count -= sum(one in refused for one in batch[:count])
            batch = [one for one in batch if one not in refused]
            batch += batch[-1:] * (len(asked) - len(batch))
            if batch:
                outputs = _ask(llm, batch, settings, settings.max_output_length)
        answers = {
            str(one.image): output.outputs[0].text
            for one, output in zip(batch[:count], outputs, strict=False)
        }
        for image, answer in answers.items():
            print(f"{image}: {answer}", flush=True)
        if settings.precision_save:
            save_answers(settings.predictions, answers)
        if settings.performance and outputs:
            append_times(settings.measurements, [BatchTimes.of(outputs, _words(llm, batch))])
    return failed


def _warm_up(llm: LLM, inputs: Sequence[Input], settings: RunSettings) -> bool:
    """Asks about the first picture that can be used. Returns whether there is one."""
    for one in inputs:
        try:
            _ask(llm, [one] * settings.max_batch_size, settings, _WARM_UP_TOKENS)
            return True
        except RequestRefused as error:
            if _PICTURE not in str(error):
                raise
    return False


def _refused(llm: LLM, batch: Sequence[Input], settings: RunSettings) -> dict[Input, str]:
    """Which of a batch cannot be answered, each with the reason."""
    refused: dict[Input, str] = {}
    for one in dict.fromkeys(batch):
        try:
            _ask(llm, [one], settings, 1)
        except RequestRefused as error:
            refused[one] = str(error)
    return refused


def _tell(refused: Mapping[Input, str]) -> int:
    """Names them on stderr. Returns how many there are."""
    for one, reason in refused.items():
        print(f"tessera run: {one.image}: {reason}", file=sys.stderr, flush=True)
    return len(refused)


def batches(inputs: Sequence[Input], size: int) -> Iterator[tuple[list[Input], int]]:
    """Batches of `size` inputs, and how many of each are not copies of the last one that fill it up."""
    for start in range(0, len(inputs), size):
        batch = list(inputs[start : start + size])
        yield [*batch, *[inputs[-1]] * (size - len(batch))], len(batch)


def _ask(
    llm: LLM, batch: Sequence[Input], settings: RunSettings, tokens: int
) -> list[RequestOutput]:
    conversations = [
        [{"role": "user", "content": [{"image": one.image}, {"text": one.text}]}] for one in batch
    ]
    return llm.chat(
        conversations,
        _sampling(settings, tokens),
        # One turn: it fits, or the request is refused.
        max_window_size=settings.max_input_length + 1,
        use_tqdm=False,
        lora_request=[one.adapter or settings.lora_adapter_id or None for one in batch],
    )


def _sampling(settings: RunSettings, tokens: int) -> SamplingParams:
    beams = settings.num_beams
    return SamplingParams(
        max_tokens=tokens,
        ignore_eos=settings.ignore_eos,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p or 1.0,
        repetition_penalty=settings.repetition_penalty,
        presence_penalty=settings.presence_penalty,
        frequency_penalty=settings.frequency_penalty,
        seed=settings.seed,
        use_beam_search=beams > 1,
        best_of=beams if beams > 1 else None,
        length_penalty=settings.length_penalty,
    )


def _words(llm: LLM, batch: Sequence[Input]) -> int:
    """Tokens of the longest prompt without its picture."""
    texts = {one.text for one in batch}
    prompts = [[{"role": "user", "content": [{"text": text}]}] for text in texts]
    asked = llm.chat(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    return max(len(output.prompt_token_ids) for output in asked)

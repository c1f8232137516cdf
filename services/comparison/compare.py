"""A checkpoint's class against our prompt, encoder and decoder, in a small random model of its configuration."""

import inspect
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.comparison import prepared, small_checkpoint
from services.comparison.ours import Whole, encode, load_decoder
from services.comparison.prepared import Prepared
from services.comparison.small_checkpoint import CannotBeMade
from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.models.generic.comparison import difference
from services.decoder.models.generic.loading import find_class, require_served
from services.families import registry
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.model_half import read_config
from shared.checkpoint.refusal import unsupported
from shared.child_process.answer_file import AnswerFile
from shared.errors import InvalidRequest
from shared.model_backends import ModelBackend

_TOLERANCE = 1e-3  # in standard deviations of all logits
_LONGEST = 8192  # tokens that rotary tables have at least
_TEXT = [0, 1, 2]  # ids that each vocabulary has
_MOST_LOGITS = 1 << 25  # of a prompt


@dataclass(frozen=True)
class Expected:
    """What the class makes of a prompt: logits [n, vocabulary] of some of its tokens, at `rows` [n]."""

    rows: Tensor
    logits: Tensor


def compare(checkpoint: Checkpoint, backend: ModelBackend, trust_remote_code: bool) -> None:
    """Raises InvalidRequest with the reason for a checkpoint whose prompt, rows or logits differ from those of its own
    class, and for one of which this cannot be said."""
    with tempfile.TemporaryDirectory(prefix="tessera-comparison-") as folder:
        prompts = []
        if registry.find(checkpoint).takes_media:
            prompts = _prepare(checkpoint, Path(folder) / "prompts.npz")
        small, expected = _expect(checkpoint, prompts, trust_remote_code, Path(folder) / "model")
        try:
            _compare(small, prompts, expected, backend, trust_remote_code)
        except InvalidRequest as error:  # which names the folder of the small model
            said = error.message.replace(str(small.folder), str(checkpoint.folder))
            raise InvalidRequest(error.reason, said, field="model") from error


def _prepare(checkpoint: Checkpoint, file: Path) -> list[Prepared]:
    command = [sys.executable, "-m", "services.comparison.prompts"]
    with AnswerFile() as answer:
        made = subprocess.run(
            [*command, str(checkpoint.folder), checkpoint.family, str(file), str(answer.number)],
            stdout=subprocess.DEVNULL,
            pass_fds=answer.pass_fds,
            check=False,
        )
        said = answer.read()
    if said:
        refusal = json.loads(said)
        raise InvalidRequest(refusal["reason"], refusal["message"], field="model")
    if made.returncode:
        raise unsupported(checkpoint, f"its processor ended its process ({made.returncode})")
    return prepared.read(file)


def _expect(
    checkpoint: Checkpoint, prompts: list[Prepared], trust_remote_code: bool, folder: Path
) -> tuple[Checkpoint, list[Expected]]:
    """A small checkpoint, and what its class makes of the prompts."""
    kind = find_class(checkpoint, trust_remote_code)
    config = read_config(checkpoint, trust_remote_code)
    require_served(checkpoint, kind, config)
    failure: Exception | None = None
    model = None
    try:
        for model in small_checkpoint.small_models(kind, config):
            try:
                expected = [_run(model, prompt) for prompt in prompts]
                if not prompts:
                    _run_text(model)
            except Exception as error:  # sizes that the class takes and its forward does not
                small_checkpoint.raise_if_passing(error)
                failure = error
                continue
            return small_checkpoint.save(model, checkpoint, folder), expected
    except CannotBeMade as error:
        if (
            model is not None and not prompts
        ):  # what fails in every size the decoder says at its start
            return small_checkpoint.save(model, checkpoint, folder), []
        said = f"{type(failure).__name__}: {failure}" if failure else str(error)
        raise unsupported(
            checkpoint,
            f"it cannot be compared with its own class, which fails in a small model: {said}."
            " --skip-model-check serves it without that",
        ) from error
    raise AssertionError("small_models raises at its end")


@torch.inference_mode()
def _run(model: Any, prompt: Prepared) -> Expected:
    """By the class's own forward; of a long prompt with a large vocabulary the logits of some tokens alone, where the
    class can be asked for them."""
    count = len(prompt.ids)
    types = np.zeros((1, count), np.int64)
    for item in prompt.items:
        runs = [(run.start, run.length) for run in item.embed_runs] or [(0, item.length)]
        for start, length in runs:
            types[0, item.offset + start :][:length] = 1
    # Of some classes the processor gives the types of tokens where it is asked to alone.
    inputs = {"mm_token_type_ids": types, **prompt.inputs}
    takes = inspect.signature(model.forward).parameters
    given = {name: torch.from_numpy(inputs[name]) for name in inputs if name in takes}
    given = {n: v.float() if v.is_floating_point() else v for n, v in given.items()}
    most = max(1, _MOST_LOGITS // len(model.get_input_embeddings().weight))
    rows = torch.arange(count)
    if count > most and "logits_to_keep" in takes:
        rows = torch.linspace(0, count - 1, most).long()  # the last among them
        given["logits_to_keep"] = rows
    return Expected(rows, model(**given, use_cache=False).logits[0])


@torch.inference_mode()
def _run_text(model: Any) -> None:
    """Whether the class works in its sizes: what it gives is compared by the decoder, at its own start."""
    model(input_ids=torch.tensor([_TEXT]), use_cache=False)


def _compare(
    small: Checkpoint,
    prompts: list[Prepared],
    expected: list[Expected],
    backend: ModelBackend,
    trust_remote_code: bool,
) -> None:
    longest = max([_LONGEST, *(len(prompt.ids) for prompt in prompts)])
    decoder = load_decoder(small, backend, trust_remote_code, longest)
    if not prompts:
        return
    whole = Whole(decoder, CpuDevice(torch.float32, threads=1))
    for prompt, rows, theirs in zip(prompts, encode(small, prompts), expected, strict=True):
        ours = whole.logits(prompt, rows, theirs.rows)
        columns = min(ours.shape[1], theirs.logits.shape[1])
        found = difference(ours[:, :columns], theirs.logits[:, :columns])
        if not found <= _TOLERANCE:
            count = len(prompt.items)
            pictures = "a picture" if count == 1 else f"{count} pictures of different sizes"
            raise unsupported(
                small,
                f"a prompt with {pictures} differs from its class's own forward by {found:.1e} standard deviations",
            )

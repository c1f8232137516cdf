"""Between the core's plain types and the messages on the wire. Nothing else here knows both."""

from collections.abc import Sequence as Items

import numpy as np

from services.scheduler.core.plan import StepOutput, StepPlan
from services.scheduler.core.scheduler import Capacity
from services.scheduler.core.sequence import Ending, EndReason, MediaSpan, Sequence
from shared.errors import Internal
from shared.queue import TakenRequest, tokens_of
from shared.text import StopFinder, TokenBytes
from tessera.common.v1 import ending_pb2
from tessera.decoder.v1 import decoder_pb2
from tessera.scheduler.v1.queue_pb2 import RequestSpec

_REASONS = {
    EndReason.STOP: ending_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: ending_pb2.FINISH_REASON_LENGTH,
    EndReason.CANCELLED: ending_pb2.FINISH_REASON_CANCELLED,
    EndReason.ERROR: ending_pb2.FINISH_REASON_ERROR,
}


def int32(values: Items[int]) -> bytes:
    """A list as the wire has it."""
    return np.array(values, dtype="<i4").tobytes() if values else b""


def capacity_of(hello: decoder_pb2.Hello) -> Capacity:
    """What a decoder said it is."""
    return Capacity(
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        max_slots=hello.max_slots,
        max_model_len=hello.max_model_len,
        max_batched_tokens=hello.max_batched_tokens,
    )


def sealed_of(hello: decoder_pb2.Hello) -> dict[int, bytes]:
    """Blocks whose content a decoder kept, and their hashes."""
    blocks = np.frombuffer(hello.sealed_blocks, "<i4").tolist()
    hashes = hello.sealed_hashes
    return {block: hashes[16 * i : 16 * i + 16] for i, block in enumerate(blocks)}


def sequence_of(taken: TakenRequest, table: TokenBytes) -> Sequence:
    """The sequence of a request with one choice, with what was generated before as committed tokens."""
    spec = taken.spec
    sampling = spec.sampling
    prompt: list[int] = np.frombuffer(spec.prompt, "<i4").tolist()
    generated = tokens_of(taken.logs[0], 4)
    search = None
    if sampling.stop:
        search = StopFinder(
            table,
            list(sampling.stop),
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=spec.reply.skip_special_tokens,
        )
        for token in generated:
            search.push(token)
    return Sequence(
        request_id=spec.request_id,
        tokens=prompt + generated,
        prompt_len=len(prompt),
        max_tokens=sampling.max_tokens,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        stop_search=search,
        media=tuple(
            MediaSpan(item.digest, item.offset, item.length, item.rows, payload=item)
            for item in spec.media
        ),
        lora_id=spec.lora_id,
        cache_salt=spec.cache_salt,
        arrival=taken.arrived_ms,
        payload=spec,
    )


def plan_message(plan: StepPlan, lease: int) -> decoder_pb2.StepsRequest:
    """A plan as it goes to the decoder."""
    message = decoder_pb2.StepPlan(
        lease=lease,
        step=plan.step,
        drop=int32(plan.drop),
        new=[_new_sequence(slot, sequence) for slot, sequence in plan.new],
        edit_slot=int32(plan.edit_slot),
        edit_index=int32(plan.edit_index),
        edit_len=int32(plan.edit_len),
        edit_blocks=int32(plan.edit_blocks),
        row_slot=int32([row.slot for row in plan.rows]),
        row_start=int32([row.start for row in plan.rows]),
        row_count=int32([row.count for row in plan.rows]),
        sample_row=int32([sample.row for sample in plan.samples]),
        sample_slot=int32([sample.slot for sample in plan.samples]),
        fetch=plan.fetch,
        release=plan.release,
        sealed_blocks=int32(plan.sealed_blocks),
        sealed_hashes=b"".join(plan.sealed_hashes),
    )
    return decoder_pb2.StepsRequest(plan=message)


def output_of(result: decoder_pb2.StepResult) -> StepOutput:
    """What a decoder answered."""
    return StepOutput(
        tokens=np.frombuffer(result.tokens, "<i4").tolist(),
        failed={f.row: (f.failure.reason, f.failure.message) for f in result.failed},
    )


def ending_message(ending: Ending, cached_tokens: int) -> ending_pb2.Ending:
    """An ending as the log has it."""
    message = ending_pb2.Ending(
        reason=_REASONS[ending.reason],
        stop=ending.stop,
        cut=ending.cut,
        cached_tokens=cached_tokens,
    )
    if ending.stop_token_id is not None:
        message.stop_token_id = ending.stop_token_id
    if ending.error is not None:
        message.failure.CopyFrom(Internal(*ending.error).to_failure())
    return message


def _new_sequence(slot: int, sequence: Sequence) -> decoder_pb2.NewSequence:
    spec: RequestSpec = sequence.payload
    return decoder_pb2.NewSequence(
        slot=slot,
        request_id=sequence.request_id,
        choice=sequence.choice,
        prompt_len=sequence.prompt_len,
        tokens=int32(sequence.tokens),
        media=spec.media,
        sampling=spec.sampling,
        lora_id=sequence.lora_id,
    )

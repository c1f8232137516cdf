"""Between the core's plain types and the messages on the wire: nothing else makes one of the other."""

import sys
from array import array
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.core.blocks import root_of
from services.scheduler.core.budget import AttentionKind, Capacity, Parts
from services.scheduler.core.lookahead import Lookahead
from services.scheduler.core.plan import StepOutput, StepPlan
from services.scheduler.core.sequence import Ending, EndReason, Error, Sequence
from services.scheduler.output.logprobs import StepLogprobs
from shared.step_columns import PLAN_COLUMNS, RESULT_COLUMNS
from tessera.common.v1 import ending_pb2
from tessera.common.v1.ending_pb2 import Failure
from tessera.decoder.v1 import decoder_pb2
from tessera.scheduler.v1.scheduler_pb2 import DraftTotals

if TYPE_CHECKING:
    from services.scheduler.output.request import Request

_REASONS = {
    EndReason.STOP: ending_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: ending_pb2.FINISH_REASON_LENGTH,
    EndReason.CANCELLED: ending_pb2.FINISH_REASON_CANCELLED,
    EndReason.ERROR: ending_pb2.FINISH_REASON_ERROR,
}


def int32(values: list[int]) -> bytes:
    """A list as the wire has it."""
    packed = array("i", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def capacity_of(hello: decoder_pb2.Hello) -> Capacity:
    """What a decoder said it is."""
    return Capacity(
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        max_slots=hello.max_slots,
        max_model_len=hello.max_model_len,
        max_batched_tokens=hello.max_batched_tokens,
        num_host_blocks=hello.num_host_blocks,
        parts=Parts(_attention_of(hello), hello.whole_prompt),
        max_step_tokens=hello.max_step_tokens,
        has_state=hello.has_state,
        num_encoder_blocks=hello.encoder_blocks,
        adapters=frozenset(hello.adapters) - frozenset(hello.loaded_adapters),
        max_adapters=hello.max_adapters,
        max_drafts=hello.max_drafts,
        kv_cache_dtype=hello.kv_cache_dtype,
    )


def _attention_of(hello: decoder_pb2.Hello) -> AttentionKind:
    name = decoder_pb2.AttentionKind.Name(hello.attention_kind).removeprefix("ATTENTION_KIND_")
    return AttentionKind.CAUSAL if name == "UNSPECIFIED" else AttentionKind[name]


def sealed_of(hello: decoder_pb2.Hello) -> dict[int, bytes]:
    """Blocks whose content a decoder kept, and their hashes."""
    blocks = np.frombuffer(hello.sealed_blocks, "<i4").tolist()
    hashes = hello.sealed_hashes
    return {block: hashes[16 * i : 16 * i + 16] for i, block in enumerate(blocks)}


def plan_message(plan: StepPlan, lease: int, capacity: Capacity) -> decoder_pb2.StepsRequest:
    """A plan as it goes to a decoder of that capacity."""
    message = decoder_pb2.StepPlan(
        lease=lease,
        step=plan.step,
        new=[_new_sequence(slot, sequence, capacity) for slot, sequence in plan.new],
        fetch=plan.fetch,
        release=plan.release,
        sealed_hashes=b"".join(plan.sealed_hashes),
        load_adapters=[
            decoder_pb2.LoadAdapter(lora_id=lora_id, folder=folder)
            for lora_id, folder in plan.load_adapters
        ],
        unload_adapters=plan.unload_adapters,
    )
    for name in PLAN_COLUMNS:
        values = getattr(plan, name)
        if values:
            setattr(message, name, int32(values))
    return decoder_pb2.StepsRequest(plan=message)


def output_of(plan: StepPlan, result: decoder_pb2.StepResult) -> StepOutput:
    """What a decoder answered to a plan."""
    output = StepOutput(np.frombuffer(result.tokens, RESULT_COLUMNS["tokens"]).tolist())
    if plan.row_drafts:
        output = _with_drafts(plan, result, output.tokens)
    for failed in result.failed:
        why = failed.failure
        output.failed[failed.row] = Error(
            why.reason, why.message, why.code, why.metadata.get("field", "")
        )
    for pool, (row, slot) in enumerate(zip(plan.pool_row, plan.pool_slot, strict=True)):
        sequence = plan.pool_sequence[pool]
        given = result.pooled[pool] if pool < len(result.pooled) else b""
        # One that has ended or begins anew concerns nobody.
        if sequence.slot == slot and len(given) != 4 * sequence.pooled_width:
            output.failed.setdefault(row, _not_pooled(sequence, given))
    if result.top_ids:
        beams = [i for i, s in enumerate(plan.sample_sequence) if s.beams is not None]
        logprobs = StepLogprobs(plan, result)
        places = output.places or range(len(output.tokens))
        output.top.update((sample, logprobs.top(places[sample])) for sample in beams)
    return output


def _with_drafts(plan: StepPlan, result: decoder_pb2.StepResult, tokens: list[int]) -> StepOutput:
    """The answer to a plan whose rows may have drafts: a sample may have several tokens."""
    drafted = np.frombuffer(result.drafted, RESULT_COLUMNS["drafted"]).tolist()
    if not any(drafted):
        return StepOutput(tokens, drafted=drafted or [0] * sum(map(bool, plan.row_drafts)))
    found: dict[int, list[int]] = {}
    places: list[int] = []
    for place, sample in enumerate(plan.spread(drafted)):
        if sample not in found:
            found[sample] = []
            places.append(place)
        found[sample].append(tokens[place])
    first = [found[sample][0] for sample in range(len(places))]
    more = {
        s: several for s, (_, *rest) in found.items() if (several := [t for t in rest if t >= 0])
    }
    return StepOutput(first, drafted=drafted, more=more, places=places)


def draft_totals(lookahead: Lookahead | None) -> DraftTotals | None:
    """What became of drafts; None where there are none."""
    if lookahead is None:
        return None
    return DraftTotals(rows=lookahead.rows, tokens=lookahead.tokens, accepted=lookahead.accepted)


def _not_pooled(sequence: Sequence, given: bytes) -> Error:
    return Error(
        "NOT_POOLED",
        f"the decoder gave {len(given) // 4} numbers where the request asks for {sequence.pooled_width}: gateway and"
        " decoder serve different models, or the decoder is older than the gateway",
    )


def ending_message(
    ending: Ending | None, cached_tokens: int, queue_s: float | None = None, preemptions: int = 0
) -> ending_pb2.Ending | None:
    """An ending, if there is one, as the log has it."""
    if ending is None:
        return None
    message = ending_pb2.Ending(
        reason=_REASONS[ending.reason],
        stop=ending.stop,
        cut=ending.cut,
        cached_tokens=cached_tokens,
        queued_us=None if queue_s is None else round(1e6 * queue_s),
        preemptions=preemptions,
    )
    if ending.stop_token_id is not None:
        message.stop_token_id = ending.stop_token_id
    if ending.error is not None:
        why = ending.error
        told = {"field": why.field} if why.field else {}
        failure = Failure(code=why.code, reason=why.reason, message=why.message, metadata=told)
        message.failure.CopyFrom(failure)
    return message


def _new_sequence(slot: int, sequence: Sequence, capacity: Capacity) -> decoder_pb2.NewSequence:
    request: Request = sequence.payload.request
    spec = request.spec
    return decoder_pb2.NewSequence(
        slot=slot,
        request_id=sequence.request_id,
        choice=sequence.choice,
        prompt_len=sequence.prompt_len,
        tokens=int32(sequence.tokens),
        media=request.media,
        sampling=request.sampling_of(sequence),
        lora_id=sequence.lora_id,
        root_name=root_of(sequence, capacity),
        client_request_id=spec.client_request_id,
        traceparent=spec.traceparent,
        pooling=spec.pooling if spec.HasField("pooling") else None,
    )

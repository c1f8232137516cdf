"""Who may hold a decoder, and what happens to plans that make no sense."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.block_hash import block_names
from shared.errors import (
    InvalidRequest,
    Precondition,
    ServingError,
    Superseded,
    Unavailable,
)
from tessera.decoder.v1.decoder_pb2 import NewSequence
from tests.support.decoder.deferred_device import LOADS
from tests.support.decoder.step_stream import (
    Decoder,
    NaiveScheduler,
    StepStream,
    Text,
    greedy,
    introduce,
    ints,
    make_plan,
    read_ints,
    running_decoder,
)

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(
    params=[(0, "cpu"), pytest.param((128, "cpu"), marks=pytest.mark.full), (0, "deferred")]
)
async def decoder(
    llama_folder: Path, short_tmp: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Decoder]:
    """Once with the device's own block size."""
    size, device = request.param
    options = {"num_host_blocks": 2, "block_size": size, "load": LOADS[device]}
    async with running_decoder(llama_folder, short_tmp / "s", **options) as running:
        yield running


def first_plan(slot: int = 0, **changes: Any) -> dict[str, Any]:
    """Introduces PROMPT in a slot and runs it."""
    fields = {
        "new": [introduce(Text(slot, PROMPT, greedy()))],
        "edit_slot": [slot],
        "edit_index": [0],
        "edit_len": [1],
        "edit_blocks": [1 + slot],
        "row_slot": [slot],
        "row_start": [0],
        "row_count": [5],
        "sample_row": [0],
        "sample_slot": [slot],
    }
    return {**fields, **changes}


async def still_works(decoder: Decoder, lease: int) -> None:
    async with StepStream.open(decoder.address, lease) as stream:
        result = await stream.run(make_plan(**first_plan()))
        assert not result.failed and len(read_ints(result.tokens)) == 1


async def test_hello_says_what_the_decoder_is(decoder: Decoder) -> None:
    async with StepStream.open(decoder.address) as stream:
        hello = stream.hello
    assert hello.block_size == decoder.loaded.device.block_size
    assert hello.num_blocks > 50 and hello.num_host_blocks == 2
    assert hello.max_slots == 32 and hello.max_model_len == 512 and hello.plans_in_flight == 2
    assert hello.max_batched_tokens == 272 and hello.row_invariant
    assert len(hello.model_fingerprint) == 16 and hello.ranks == 1


async def test_smaller_and_equal_leases_and_other_incarnations_are_refused(
    decoder: Decoder,
) -> None:
    async with StepStream.open(decoder.address, lease=5):
        pass
    for lease in (5, 4):
        with pytest.raises(Precondition, match="lease"):
            async with StepStream.open(decoder.address, lease=lease):
                pass
    with pytest.raises(Precondition) as caught:
        async with StepStream.open(decoder.address, lease=9, decoder_id="somebody else"):
            pass
    assert caught.value.reason == "WRONG_DECODER"
    await still_works(decoder, 6)


async def test_a_larger_lease_ends_the_older_stream_and_forgets_its_sequences(
    decoder: Decoder,
) -> None:
    async with StepStream.open(decoder.address, lease=1) as old:
        await old.run(make_plan(**first_plan()))
        assert not decoder.loaded.worker.slots.empty
        async with StepStream.open(decoder.address, lease=2) as new:
            with pytest.raises(Superseded):
                await old.result()
            assert decoder.loaded.worker.slots.empty
            result = await new.run(make_plan(**first_plan()))
            assert not result.failed


async def test_a_cut_stream_empties_the_table(decoder: Decoder) -> None:
    async with StepStream.open(decoder.address) as stream:
        await stream.run(make_plan(**first_plan()))
    async with asyncio.timeout(60):
        while not decoder.loaded.worker.slots.empty:
            await asyncio.sleep(0.01)
    await still_works(decoder, 2)


async def test_sealed_blocks_survive_until_they_are_overwritten(decoder: Decoder) -> None:
    async with StepStream.open(decoder.address, lease=1) as stream:
        await stream.run(make_plan(**first_plan()))
        hashes = b"a" * 16 + b"b" * 16 + b"c" * 16
        await stream.run(make_plan(sealed_blocks=[1, 2, 3], sealed_hashes=hashes))
        await stream.run(make_plan(copy_src=[1], copy_dst=[3]))
    async with StepStream.open(decoder.address, lease=2) as stream:
        assert read_ints(stream.hello.sealed_blocks) == [1, 2]
        assert stream.hello.sealed_hashes == hashes[:32]
        await stream.run(make_plan(**first_plan(slot=1)))  # writes block 2
    async with StepStream.open(decoder.address, lease=3) as stream:
        assert read_ints(stream.hello.sealed_blocks) == [1]


async def test_full_blocks_are_named_when_the_scheduler_is_lost(decoder: Decoder) -> None:
    root = b"r" * 16
    size = decoder.loaded.device.block_size
    prompt = [3 + i % 50 for i in range(2 * size + 8)]
    async with StepStream.open(decoder.address, lease=1) as stream:
        for slot, name in ((0, b""), (1, root), (2, root)):
            new = introduce(Text(slot, prompt[slot:], greedy()))
            new.MergeFrom(NewSequence(root_name=name))
            plan = first_plan(slot, new=[new], row_count=[len(prompt) - slot])
            plan |= {"edit_len": [3], "edit_blocks": [1 + 3 * slot, 2 + 3 * slot, 3 + 3 * slot]}
            await stream.run(make_plan(**plan))
        names = block_names(root, ints(prompt[1 : 1 + 2 * size]), size)
        # The second sequence's first block was named in time.
        await stream.run(make_plan(sealed_blocks=[4], sealed_hashes=names[0]))
        await stream.run(
            make_plan(row_slot=[1], row_start=[len(prompt) - 1], row_count=[1], sample_row=[0],
                      sample_slot=[1])
        )  # fmt: skip
    other = block_names(root, ints(prompt[2 : 2 + 2 * size]), size)
    async with StepStream.open(decoder.address, lease=2) as stream:
        assert read_ints(stream.hello.sealed_blocks) == [4, 5, 7, 8]
        assert stream.hello.sealed_hashes == b"".join(names + other)


async def test_nothing_is_named_that_may_rest_on_a_failed_row(decoder: Decoder) -> None:
    async with StepStream.open(decoder.address, lease=1) as stream:
        size = decoder.loaded.device.block_size
        new = introduce(Text(0, [3] * (size + 4), greedy()))
        new.root_name = b"r" * 16
        plan = first_plan(new=[new], row_count=[size + 4]) | {
            "edit_len": [2],
            "edit_blocks": [1, 2],
        }
        await stream.run(make_plan(**plan))
        result = await stream.run(make_plan(row_slot=[0], row_start=[3], row_count=[2]))
        assert len(result.failed) == 1
    async with StepStream.open(decoder.address, lease=2) as stream:
        assert not stream.hello.sealed_blocks


async def test_an_empty_plan_has_a_result(decoder: Decoder) -> None:
    async with StepStream.open(decoder.address) as stream:
        result = await stream.run(make_plan())
    assert result.step == 1 and result.lease == 1 and not result.tokens


async def test_silence_ends_the_stream(decoder: Decoder) -> None:
    async with StepStream.open(decoder.address) as stream:
        stream.beating.cancel()
        with pytest.raises(Unavailable) as caught:
            await stream.result()
    assert caught.value.reason == "SCHEDULER_SILENT"
    await still_works(decoder, 2)


async def test_a_draining_decoder_says_so_and_waits_for_its_sequences(decoder: Decoder) -> None:
    async with StepStream.open(decoder.address) as stream:
        await stream.run(make_plan(**first_plan()))
        draining = asyncio.create_task(decoder.servicer.drain(30))
        while not stream.draining:
            await stream.run(make_plan())
        assert not draining.done()
        await stream.run(make_plan(drop=[0]))
        await draining
    with pytest.raises(Unavailable):
        async with StepStream.open(decoder.address, lease=2):
            pass


async def test_a_draining_decoder_ends_the_stream_when_its_time_is_over(decoder: Decoder) -> None:
    async with StepStream.open(decoder.address) as stream:
        await stream.run(make_plan(**first_plan()))
        draining = asyncio.create_task(decoder.servicer.drain(0.1))
        with pytest.raises(Unavailable) as caught:
            await stream.result()
        assert caught.value.reason == "DECODER_STOPS"
        await draining


@pytest.mark.parametrize(
    "fields",
    [
        first_plan(row_slot=[99]),
        first_plan(row_slot=[-1]),
        first_plan(edit_blocks=[0]),
        first_plan(edit_blocks=[100_000]),
        first_plan(edit_blocks=[1, 2]),
        first_plan(edit_index=[3]),
        first_plan(edit_len=[1000], edit_blocks=[1] * 1000),
        first_plan(edit_slot=[7]),
        first_plan(row_count=[0]),
        first_plan(row_count=[500]),
        first_plan(row_start=[-1]),
        first_plan(row_count=[5, 5]),
        first_plan(sample_row=[1]),
        first_plan(sample_row=[0, 0], sample_slot=[0, 0]),
        first_plan(row_slot=[0, 0], row_start=[0, 0], row_count=[1, 1]),
        first_plan(fork_child=[1], fork_parent=[2], fork_choice=[0]),
        first_plan(fork_child=[0], fork_parent=[0], fork_choice=[0]),
        first_plan(set_token_slot=[0], set_token=[1]),
        first_plan(set_token_slot=[3], set_token=[1]),
        first_plan(set_token_slot=[0], set_token=[]),
        first_plan(copy_src=[1], copy_dst=[0]),
        first_plan(copy_src=[1], copy_dst=[]),
        first_plan(swap_out_device=[1], swap_out_host=[2]),
        first_plan(sealed_blocks=[1], sealed_hashes=b"short"),
        first_plan(drop=b"abc"),
        {"sample_row": [0], "sample_slot": [0]},
        first_plan(step=7),
        first_plan(lease=3),
        first_plan(new=[introduce(Text(0, PROMPT, greedy())), introduce(Text(0, [1], greedy()))]),
        first_plan(new=[introduce(Text(50, PROMPT, greedy()))]),
        first_plan(new=[introduce(Text(0, PROMPT, greedy()), tokens=b"abc")]),
    ],
)
async def test_plans_that_make_no_sense_end_the_stream_and_nothing_else(
    decoder: Decoder, fields: dict[str, Any]
) -> None:
    async with StepStream.open(decoder.address) as stream:
        with pytest.raises((InvalidRequest, Precondition)):
            await stream.run(make_plan(**fields))
    await still_works(decoder, 2)


async def test_a_third_unanswered_plan_ends_the_stream(decoder: Decoder) -> None:
    async with StepStream.open(decoder.address) as stream:
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wait_for_gate() -> None:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

        decoder.servicer._executor.submit(wait_for_gate)
        for _ in range(3):
            await stream.send(make_plan())
        with pytest.raises(InvalidRequest, match="unanswered"):
            await stream.result()
        gate.set()
    await still_works(decoder, 2)


async def test_streams_must_begin_with_open(decoder: Decoder) -> None:
    from shared.net.channels import open_channel
    from shared.net.rpc.errors import calling
    from tessera.decoder.v1 import decoder_pb2_grpc
    from tessera.decoder.v1.decoder_pb2 import Heartbeat, StepsRequest

    async with open_channel(decoder.address) as connection:
        call = decoder_pb2_grpc.DecoderServiceStub(connection).Steps()
        await call.write(StepsRequest(heartbeat=Heartbeat()))
        with pytest.raises(InvalidRequest, match="open"), calling("decoder"):
            await call.read()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lora_id": "x"}, "ADAPTER_CHANGED"),
        ({"sampling": greedy(use_beam_search=True)}, "UNSUPPORTED_SAMPLING"),
        ({"sampling": greedy(temperature=1.0, top_p=7.0)}, "INVALID_SAMPLING"),
        ({"prompt_len": 6}, "INVALID_SEQUENCE"),
        ({"prompt_len": 0}, "INVALID_SEQUENCE"),
        ({"tokens": b"\xff\xff\xff\x7f" * 5}, "INVALID_TOKEN"),
        ({"tokens": b"\x01\x00\x00\x00" * 513}, "TOO_LONG"),
    ],
)
async def test_a_bad_sequence_fails_alone_and_may_come_again(
    decoder: Decoder, changes: dict[str, Any], reason: str
) -> None:
    async with StepStream.open(decoder.address) as stream:
        fields = first_plan()
        fields["new"] = [
            introduce(Text(0, PROMPT, greedy()), **changes),
            introduce(Text(1, PROMPT, greedy())),
        ]
        fields.update(
            edit_slot=[0, 1], edit_index=[0, 0], edit_len=[1, 1], edit_blocks=[1, 2],
            row_slot=[0, 1], row_start=[0, 0], row_count=[5, 5], sample_row=[0, 1],
            sample_slot=[0, 1],
        )  # fmt: skip
        result = await stream.run(make_plan(**fields))
        assert [(f.row, f.failure.reason) for f in result.failed] == [(0, reason)]
        bad, good = read_ints(result.tokens)
        assert bad == -1 and good >= 0
        # Ignored from now on ...
        again = make_plan(row_slot=[0], row_start=[5], row_count=[1], sample_row=[0],
                          sample_slot=[0])  # fmt: skip
        result = await stream.run(again)
        assert not result.failed and read_ints(result.tokens) == [-1]
        # ... until it is dropped and comes anew.
        result = await stream.run(make_plan(drop=[0], **first_plan()))
        assert not result.failed and read_ints(result.tokens) == [good]


@pytest.mark.parametrize(
    "row",
    [
        {"row_start": [4]},  # 5 are computed
        {"row_start": [6]},
        {"row_count": [2]},  # only one token is known
        {"row_slot": [3], "sample_slot": [3]},  # nobody
        {"sample_slot": [3]},
    ],
)
async def test_rows_that_contradict_the_decoders_counts_fail_loudly(
    decoder: Decoder, row: dict[str, list[int]]
) -> None:
    async with StepStream.open(decoder.address) as stream:
        await stream.run(make_plan(**first_plan(slot=1)))
        await stream.run(make_plan(**first_plan()))
        fields = {"row_slot": [0], "row_start": [5], "row_count": [1], "sample_row": [0],
                  "sample_slot": [0]}  # fmt: skip
        before = await stream.run(make_plan(**{**fields, **row}))
        assert before.failed[0].failure.reason in ("ROW_MISMATCH", "UNKNOWN_SLOT")
        assert read_ints(before.tokens) == [-1]
        other = {"row_slot": [1], "row_start": [5], "row_count": [1], "sample_row": [0],
                 "sample_slot": [1]}  # fmt: skip
        after = await stream.run(make_plan(**other))
        assert not after.failed and read_ints(after.tokens)[0] >= 0


async def test_a_row_without_room_in_its_table_fails(decoder: Decoder) -> None:
    async with StepStream.open(decoder.address) as stream:
        length = decoder.loaded.device.block_size + 4
        long = Text(0, list(range(length)), greedy())
        fields = first_plan(new=[introduce(long)], row_count=[length])
        result = await stream.run(make_plan(**fields))
    assert result.failed[0].failure.reason == "ROW_MISMATCH"


async def test_a_failed_parents_children_are_ignored(decoder: Decoder) -> None:
    async with StepStream.open(decoder.address) as stream:
        fields = first_plan(new=[introduce(Text(0, PROMPT, greedy(grammar="x")))])
        fields.update(fork_child=[1], fork_parent=[0], fork_choice=[1], sample_row=[0, 0],
                      sample_slot=[0, 1])  # fmt: skip
        result = await stream.run(make_plan(**fields))
        assert len(result.failed) == 1 and read_ints(result.tokens) == [-1, -1]


async def test_an_error_in_a_step_ends_the_stream_not_the_process(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of something")

    async with StepStream.open(decoder.address) as stream:
        with monkeypatch.context() as patch:
            patch.setattr(decoder.loaded.worker._model, "embed", broken)
            with pytest.raises(ServingError, match="out of something"):
                await stream.run(make_plan(**first_plan()))
    await still_works(decoder, 2)


async def test_many_sequences_come_and_go(decoder: Decoder) -> None:
    """Slots are used again and again; each text is what it would be alone."""
    async with StepStream.open(decoder.address) as stream:
        scheduler = NaiveScheduler(stream)
        alone = Text(0, PROMPT, greedy())
        await scheduler.generate([alone], 6)
        await stream.run(make_plan(drop=[0]))
        for _ in range(3):
            texts = [Text(slot, PROMPT, greedy()) for slot in range(12)]
            await scheduler.generate(texts, 6, chunk=2)
            await stream.run(make_plan(drop=list(range(12))))
            assert all(text.output == alone.output for text in texts)
        assert decoder.loaded.worker.slots.empty

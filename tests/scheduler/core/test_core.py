"""The core against an arithmetic decoder, which checks every plan against the contract."""

from services.scheduler.core.plan import StepOutput
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import EndReason, MediaSpan, by_priority
from tests.support.arithmetic.drive import Drive, capacity, sequence, with_pictures
from tests.support.arithmetic.model import generate


def test_outputs_are_those_of_an_undisturbed_run() -> None:
    drive = Drive(Scheduler(capacity()))
    prompts = {f"r{i}": [i + 1] * (3 + 7 * i) for i in range(8)}
    for arrival, (name, prompt) in enumerate(prompts.items()):
        assert drive.scheduler.add(sequence(name, prompt, 10 + arrival, arrival)) is None
    drive.finish()
    for arrival, (name, prompt) in enumerate(prompts.items()):
        assert drive.outputs[name] == generate(prompt, 10 + arrival)
        assert drive.endings[name] is EndReason.LENGTH
    assert drive.scheduler.state.blocks.num_used == 0


def test_a_prompt_longer_than_a_step_is_computed_in_chunks() -> None:
    drive = Drive(Scheduler(capacity(max_batched_tokens=8)))
    prompt = list(range(1, 60))
    drive.scheduler.add(sequence("long", prompt, 5))
    drive.finish()
    assert drive.outputs["long"] == generate(prompt, 5)


def test_sequences_decode_while_a_long_prompt_is_computed() -> None:
    drive = Drive(Scheduler(capacity(max_batched_tokens=8)))
    drive.scheduler.add(sequence("short", [1, 2, 3], 40, arrival=0))
    drive.send()
    drive.answer()
    drive.scheduler.add(sequence("long", list(range(1, 100)), 2, arrival=1))
    while "long" not in drive.outputs:
        before = len(drive.outputs["short"])
        drive.send()
        drive.answer()
        assert len(drive.outputs["short"]) == before + 1


def test_a_prompt_alone_may_be_a_little_longer_than_beside_sequences_that_decode() -> None:
    drive = Drive(Scheduler(capacity(max_batched_tokens=34)))
    drive.scheduler.add(sequence("alone", list(range(1, 35)), 40, arrival=0))
    drive.scheduler.add(sequence("waiting", list(range(51, 85)), 2, arrival=1))
    counts = []
    for _ in range(3):
        drive.send()
        counts.append([row.count for row in drive.in_flight[-1].rows])
        drive.answer()
    assert counts == [[34], [1, 31], [1, 3]]
    drive.finish()
    assert drive.outputs["waiting"] == generate(list(range(51, 85)), 2)


def test_equal_prefixes_share_blocks_also_when_they_arrive_together() -> None:
    drive = Drive(Scheduler(capacity(max_batched_tokens=64)))
    prefix = list(range(1, 33))
    for i in range(4):
        drive.scheduler.add(sequence(f"r{i}", [*prefix, 50 + i], 3, i))
    plan = drive.scheduler.plan()
    assert plan is not None
    drive.in_flight.append(plan)
    assert [row.count for row in plan.rows] == [33, 1, 1, 1]
    drive.finish()
    for i in range(4):
        assert drive.outputs[f"r{i}"] == generate([*prefix, 50 + i], 3)


def test_a_repeated_prompt_is_computed_from_its_last_block_on() -> None:
    drive = Drive(Scheduler(capacity()))
    prompt = list(range(1, 31))
    drive.scheduler.add(sequence("first", prompt, 4))
    drive.finish()
    drive.scheduler.add(sequence("again", prompt, 4))
    drive.send()
    assert drive.in_flight[-1].rows[0].start == 28
    drive.finish()
    assert drive.outputs["again"] == drive.outputs["first"]


def test_an_ended_output_is_cached_to_its_last_full_block() -> None:
    drive = Drive(Scheduler(capacity()))
    prompt = list(range(1, 11))
    drive.scheduler.add(sequence("question", prompt, 27))
    drive.finish()
    talk = prompt + drive.outputs["question"]
    drive.scheduler.add(sequence("next question", [*talk, 5, 6], 4))
    drive.send()
    # The last of its 37 tokens was never computed: it was the last of the answer.
    assert drive.in_flight[-1].rows[0].start == 36
    drive.finish()
    assert drive.outputs["next question"] == generate([*talk, 5, 6], 4)


def test_blocks_of_generated_tokens_are_cached_before_preemption() -> None:
    drive = Drive(Scheduler(capacity(num_blocks=14)))
    drive.scheduler.add(sequence("first", [1] * 4, 40, arrival=0))
    drive.scheduler.add(sequence("second", [2] * 4, 40, arrival=1))
    while not drive.scheduler.state.preemptions:
        drive.step()
    (second,) = drive.scheduler.state.waiting
    assert len(second.block_hashes) == len(second.tokens) // 4
    assert len(second.tokens) > 16 and len(second.tokens) % 16 > 4  # between two looks
    drive.finish()
    for name, prompt in (("first", [1] * 4), ("second", [2] * 4)):
        assert drive.outputs[name] == generate(prompt, 40)


def test_placeholders_of_different_images_do_not_share_blocks() -> None:
    drive = Drive(Scheduler(capacity()))
    prompt = [1, *[9] * 20, 2]
    for name, digest in (("cat", b"c" * 16), ("dog", b"d" * 16)):
        span = MediaSpan(digest, 1, 20, 20)
        drive.scheduler.add(sequence(name, prompt, 2, media=(span,)))
        drive.finish()  # computes the text before the image
        drive.scheduler.state.media.take_wanted()
        drive.scheduler.embeddings_encoded(digest, "artifact")
        drive.send()
        assert drive.in_flight[-1].fetch == ["artifact"]
        drive.answer()
        drive.scheduler.embeddings_ready(digest)
        drive.send()
        assert drive.in_flight[-1].rows[-1].start <= 1
        drive.finish()
        assert len(drive.outputs[name]) == 2


def test_a_repeated_image_needs_no_encode() -> None:
    scheduler = Scheduler(capacity())
    drive = Drive(scheduler)
    span = MediaSpan(b"c" * 16, 1, 20, 20)
    prompt = [1, *[9] * 20, *range(2, 12)]
    scheduler.add(sequence("first", prompt, 2, media=(span,)))
    drive.finish()
    assert [s.digest for s in scheduler.state.media.take_wanted()] == [span.digest]
    scheduler.embeddings_encoded(span.digest, "artifact")
    drive.finish()
    scheduler.embeddings_ready(span.digest)
    drive.finish()
    assert drive.endings["first"] is EndReason.LENGTH
    assert scheduler.state.media.take_released() == [span.digest]
    scheduler.add(sequence("again", prompt, 2, media=(span,)))
    drive.send()
    assert scheduler.state.media.take_wanted() == []
    drive.finish()
    assert drive.outputs["again"] == drive.outputs["first"]


def test_text_before_an_image_is_computed_while_it_is_encoded() -> None:
    scheduler = Scheduler(capacity())
    span = MediaSpan(b"i" * 16, 10, 4, 4)
    scheduler.add(sequence("r", list(range(1, 31)), 2, media=(span,)))
    plan = scheduler.plan()
    assert plan is not None
    assert [(row.start, row.count) for row in plan.rows] == [(0, 10)]
    assert plan.samples == []


def test_a_sequence_that_waits_for_an_image_keeps_no_text_out() -> None:
    scheduler = Scheduler(capacity())
    for i in range(6):
        span = MediaSpan(bytes([i]) * 16, 0, 8, 8)
        scheduler.add(sequence(f"image{i}", [1] * 12, 2, i, media=(span,)))
    assert scheduler.state.num_ready_to_start == 0
    scheduler.add(sequence("text", [1, 2, 3], 2, 9))
    assert scheduler.state.num_ready_to_start == 1
    plan = scheduler.plan()
    assert plan is not None
    assert [row.sequence.request_id for row in plan.rows] == ["text"]


def test_sequences_with_all_slots_get_embeddings_beyond_the_encoder_budget() -> None:
    """Two images fill the budget, and sequences that have begun their text hold all slots: they need a third one."""
    scheduler = Scheduler(capacity(max_slots=2), encoder_budget=12)
    drive = Drive(scheduler)
    expected = {}
    for number, (before, item) in enumerate([(0, 0), (0, 1), (1, 2), (1, 3)]):
        span = MediaSpan(bytes([item]) * 16, before, 6, 6)
        prompt = [1] * before + [99] * 6 + [2] * 3
        assert scheduler.add(sequence(f"r{number}", prompt, 2, number, media=(span,))) is None
        expected[f"r{number}", 0] = generate(with_pictures(prompt, [span]), 2)
        for wanted in scheduler.state.media.take_wanted():
            scheduler.embeddings_encoded(wanted.digest, wanted.digest)
    for _ in range(10):
        drive.finish()
        for digest in drive.fetches:
            scheduler.embeddings_ready(digest)
        drive.fetches.clear()
        for wanted in scheduler.state.media.take_wanted():
            scheduler.embeddings_encoded(wanted.digest, wanted.digest)
    assert scheduler.state.num_sequences == 0
    assert drive.outputs_of == expected


def test_encodes_stay_within_the_budget_but_one_always_goes() -> None:
    scheduler = Scheduler(capacity(), encoder_budget=50)
    for i, rows in enumerate((60, 20, 20, 20)):
        span = MediaSpan(bytes([i]) * 16, 0, 8, rows)
        scheduler.add(sequence(f"r{i}", [1] * 12, 2, i, media=(span,)))
    assert [s.digest[0] for s in scheduler.state.media.take_wanted()] == [0]
    scheduler.cancel("r0")
    assert [s.digest[0] for s in scheduler.state.media.take_wanted()] == [1, 2]


def test_out_of_blocks_the_youngest_is_computed_again_and_nothing_changes() -> None:
    drive = Drive(Scheduler(capacity(num_blocks=16, max_batched_tokens=16)))
    prompts = {f"r{i}": [10 * i + j for j in range(1, 13)] for i in range(4)}
    for arrival, (name, prompt) in enumerate(prompts.items()):
        drive.scheduler.add(sequence(name, prompt, 30, arrival))
    drive.finish()
    assert drive.scheduler.state.preemptions > 0
    for name, prompt in prompts.items():
        assert drive.outputs[name] == generate(prompt, 30)


def test_a_prompt_without_blocks_for_all_of_it_is_not_begun_over_and_over() -> None:
    drive = Drive(Scheduler(capacity(num_blocks=14, max_batched_tokens=4)))
    span = MediaSpan(b"i" * 16, 16, 6, 6)
    waits = sequence("picture", [1] * 16 + [99] * 6 + [2], 2, 0, media=(span,))
    drive.scheduler.add(waits)
    drive.finish()  # up to the picture, whose embeddings are not there yet: four blocks
    long = list(range(1, 40))
    drive.scheduler.add(sequence("long", long, 2, 1))
    drive.finish()
    assert not drive.outputs["long"] and drive.scheduler.state.preemptions == 0
    drive.scheduler.cancel("picture")
    drive.finish()
    assert drive.outputs["long"] == generate(long, 2)


def test_a_stop_id_ends_the_sequence_and_the_token_in_flight_is_dropped() -> None:
    drive = Drive(Scheduler(capacity()))
    prompt = [5, 6, 7]
    expected = generate(prompt, 20)
    stop = expected[4]
    drive.scheduler.add(sequence("r", prompt, 20, stop_token_ids=frozenset({stop})))
    drive.finish()
    assert drive.outputs["r"] == expected[: expected.index(stop) + 1]
    assert drive.endings["r"] is EndReason.STOP
    assert drive.scheduler.state.blocks.num_used == 0


def test_cancel_frees_blocks_in_the_next_plan() -> None:
    drive = Drive(Scheduler(capacity()))
    drive.scheduler.add(sequence("r", [1] * 30, 100))
    drive.send()
    drive.send()
    assert drive.scheduler.cancel("r")
    assert not drive.scheduler.cancel("r")
    assert drive.scheduler.state.blocks.num_used == 0
    drive.finish()
    assert drive.decoder.worker.slots.empty
    assert drive.outputs["r"] == []


def test_a_prompt_that_never_fits_is_refused_with_both_numbers() -> None:
    ending = Scheduler(capacity(num_blocks=5)).add(sequence("r", [1] * 16, 1))
    assert ending is not None and ending.reason is EndReason.ERROR and ending.error is not None
    assert ending.error[0] == "PROMPT_TOO_LONG"
    assert "16 tokens" in ending.error[1]


def test_of_several_isolated_requests_none_waits_for_the_end_of_another() -> None:
    drive = Drive(Scheduler(capacity()))
    for arrival, (name, alone) in enumerate({"long": 1000, "short": 12, "other": 0}.items()):
        one = sequence(name, [arrival + 1] * 8, 60 if name == "long" else 6, arrival)
        one.isolated_until = alone
        drive.scheduler.add(one)
    while "short" not in drive.endings or "other" not in drive.endings:
        assert "long" not in drive.endings
        drive.send()
        drive.answer()
    drive.finish()
    assert drive.outputs["long"] == generate([1] * 8, 60)


def test_an_answer_is_not_cut_to_what_a_decoder_holds() -> None:
    core = Scheduler(capacity(max_model_len=40))
    ending = core.add(sequence("long", [1] * 16, 25))
    assert ending is not None and ending.reason is EndReason.ERROR and ending.error is not None
    assert ending.error[0] == "CONTEXT_LENGTH_EXCEEDED"
    assert "41 tokens" in ending.error[1] and "maximum context length" in ending.error[1]
    assert core.add(sequence("whole", [1] * 16, 24)) is None


def test_a_sequence_that_shares_a_block_of_a_failed_row_computes_it_again() -> None:
    drive = Drive(Scheduler(capacity(max_batched_tokens=64)))
    prefix = list(range(1, 33))
    for i in range(3):
        drive.scheduler.add(sequence(f"r{i}", [*prefix, 50 + i], 4, i))
    drive.send()
    drive.send()
    progress = drive.answer(failing_rows=[0])  # the leader's row writes nothing
    assert [(p.sequence.request_id, p.token) for p in progress] == [("r0", None)]
    assert drive.answer() == []
    drive.finish()
    for i in (1, 2):
        assert drive.outputs[f"r{i}"] == generate([*prefix, 50 + i], 4)


def test_blocks_of_a_cancelled_sequence_that_shared_a_failed_row_leave_the_cache() -> None:
    drive = Drive(Scheduler(capacity(max_batched_tokens=64)))
    prefix = list(range(1, 9))
    longer = [*prefix, *range(21, 34)]
    drive.scheduler.add(sequence("leader", [*prefix, 50], 2, 0))
    drive.send()
    drive.scheduler.add(sequence("sharer", longer, 2, 1))
    drive.send()
    drive.scheduler.cancel("sharer")
    drive.answer(failing_rows=[0])
    drive.scheduler.add(sequence("begins alike", [*prefix, 60], 2, 2))
    drive.finish()
    drive.scheduler.add(sequence("alike", longer, 2, 3))
    drive.finish()  # the decoder says so if it reads what was never computed
    assert drive.outputs["alike"] == generate(longer, 2)


def test_lost_embeddings_are_encoded_again_three_times() -> None:
    scheduler = Scheduler(capacity())
    span = MediaSpan(b"i" * 16, 0, 4, 4)
    scheduler.add(sequence("r", [1] * 8, 2, media=(span,)))
    for loss in range(3):
        assert [s.digest for s in scheduler.state.media.take_wanted()] == [span.digest]
        scheduler.embeddings_encoded(span.digest, loss)
        plan = scheduler.plan()
        assert plan is not None and plan.fetch == [loss]
        ended = list(scheduler.embeddings_lost(span.digest))
        scheduler.complete(StepOutput([]))
        assert bool(ended) == (loss == 2)
    assert ended[0].ending is not None and ended[0].ending.error is not None
    assert ended[0].ending.error[0] == "MEDIA_LOST"


def test_sealed_blocks_are_full_committed_and_findable() -> None:
    drive = Drive(Scheduler(capacity()))
    drive.scheduler.add(sequence("r", list(range(1, 12)), 12))
    sealed: dict[int, bytes] = {}
    for _ in range(40):
        while len(drive.in_flight) < 2 and drive.send():
            plan = drive.in_flight[-1]
            sealed.update(zip(plan.sealed_blocks, plan.sealed_hashes, strict=True))
        if not drive.in_flight:
            break
        drive.answer()
    fresh = Drive(Scheduler(capacity()))
    fresh.scheduler.state.blocks.adopt(sealed)
    fresh.decoder = drive.decoder
    fresh.decoder.worker.reset()
    fresh.scheduler.add(sequence("again", list(range(1, 12)), 12))
    fresh.send()
    assert fresh.in_flight[0].rows[0].start == 8
    fresh.finish()
    assert fresh.outputs["again"] == drive.outputs["r"]


def test_a_sequence_that_waits_for_slots_does_not_keep_out_those_that_hold_them() -> None:
    """Preempted choices keep their slots, and a request of higher priority wants all that there are."""
    limits = capacity(num_blocks=10, max_slots=4)
    drive = Drive(Scheduler(limits, policy=by_priority))
    prompt = [1, 2, 3]
    three = [sequence("three", prompt, 14, priority=1, choice=c) for c in range(3)]
    drive.scheduler.add(*three)
    while not drive.scheduler.state.preemptions:
        drive.step()
    four = [sequence("four", prompt, 2, 1, choice=c) for c in range(4)]
    drive.scheduler.add(*four)
    drive.finish()
    assert drive.scheduler.state.num_sequences == 0
    assert drive.outputs_of["three", 2] == generate(prompt, 14, 2)
    assert drive.outputs_of["four", 3] == generate(prompt, 2, 3)


def test_a_share_of_the_budget_is_never_held_by_who_cannot_use_it() -> None:
    """The budget is taken by an item that the second prompt has as well, behind another one."""
    scheduler = Scheduler(capacity(), encoder_budget=1)
    first, second = MediaSpan(b"1" * 16, 0, 6, 6), MediaSpan(b"2" * 16, 8, 6, 6)
    third = MediaSpan(b"3" * 16, 0, 6, 6)
    prompt = [99] * 6 + [1] * 2 + [99] * 6 + [1]
    shared = MediaSpan(second.digest, 0, 6, 6)
    scheduler.add(sequence("one", [99] * 6 + [1], 1, 0, media=(shared,)))
    scheduler.add(sequence("both", prompt, 1, 1, media=(first, second)))
    scheduler.add(sequence("third", prompt, 1, 2, media=(third,)))
    media = scheduler.state.media
    assert media.take_wanted() == [shared]
    assert media.take_wanted() == []
    scheduler.cancel("one")
    scheduler.embeddings_encoded(second.digest, "artifact")
    scheduler.embeddings_ready(second.digest)
    assert media.take_wanted() == [first]
    assert media.take_wanted() == []


def test_an_item_before_a_cached_prefix_does_not_hold_up_what_is_behind_it() -> None:
    """The prompt goes on behind its first item, which is cached: the second is encoded although the first has the
    budget."""
    scheduler = Scheduler(capacity(), encoder_budget=1)
    drive = Drive(scheduler)
    items = [MediaSpan(bytes([i]) * 16, 8 * i, 6, 6) for i in range(3)]
    prompt = ([99] * 6 + [1] * 2) * 3
    for number, name in enumerate(("one", "two")):
        media = tuple(items[: 1 + 2 * number])
        count = 8 if name == "one" else 24
        scheduler.add(sequence(name, [*prompt[:count], 5], 1, number, media=media))
    for _ in range(10):
        for span in scheduler.state.media.take_wanted():
            scheduler.embeddings_encoded(span.digest, span.digest)
        drive.finish()
        for digest in drive.fetches:
            scheduler.embeddings_ready(digest)
        drive.fetches.clear()
    assert drive.outputs["two"] == drive.generate([*prompt, 5], 1, media=items)

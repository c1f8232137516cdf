"""Draws calls of scripts, as likely to be refused as to be executed."""

import random
from collections.abc import Callable

from shared.queue.log_event import LogEventWriter, Origin
from shared.queue.token_log import encode_tokens
from tessera.common.v1.ending_pb2 import Ending, FinishReason

Call = tuple[str, list[str]]  # a script or a command, and its arguments, a character for each byte

PREFIX = "t:{m}"
_STOP = Ending(reason=FinishReason.FINISH_REASON_STOP)
_CANCELLED = Ending(reason=FinishReason.FINISH_REASON_CANCELLED)
_CHANGED = Ending(reason=FinishReason.FINISH_REASON_ERROR, stop="changed")
_ENDINGS = [_STOP, Ending(reason=FinishReason.FINISH_REASON_LENGTH), _CANCELLED]
_KEEP_S = "600"


def _text(data: bytes) -> str:
    return data.decode("latin-1")


class Draw:
    """Draws calls over few names, so that they affect each other. `now_us` advances with each."""

    def __init__(self, rng: random.Random) -> None:
        self.now_us = 1_800_000_000_000_000
        self._rng = rng
        self._rids = [f"r{i}" for i in range(5)]
        self._sids = ["a", "b"]
        self._fields: dict[str, list[str]] = {}
        self._lengths: dict[tuple[str, int], int] = {}
        self._deadlines: dict[str, int] = {}
        self._kinds: list[Callable[[], Call]] = [
            self._reserve,
            self._reserve,
            self._admit,
            self._admit,
            self._take,
            self._take,
            self._append,
            self._append,
            self._append,
            self._append,
            self._renew,
            self._renew,
            self._fence,
            self._give_back,
            self._blame,
            self._cancel,
            self._join,
            self._withdraw,
            self._leave,
            self._lease,
            self._leases,
            self._announce,
            self._members,
            self._follow,
            self._abandoned,
            self._expire,
            self._sweep,
            self._check_run,
            self._report,
            self._report,
            self._timeline,
            self._timeline,
            self._errors,
            self._refused,
            self._queue_age,
            self._recovery,
            self._weight,
            self._restore,
            self._restore,
            self._media,
            self._response,
            self._response,
            self._file,
            self._file,
            self._file,
            self._batch,
            self._batch,
            self._batch,
            self._adapter,
            self._adapter,
        ]

    def next(self) -> Call:
        """A script's name and its arguments; one in capitals is a command of Redis itself."""
        self.now_us += self._rng.choice([1, 900, 40_000, 300_000, 1_700_000, 4_000_000])
        return self._rng.choice(self._kinds)()

    def _some(self, names: list[str]) -> list[str]:
        return self._rng.sample(names, self._rng.randint(0, len(names)))

    def _rid(self) -> str:
        return self._rng.choice(self._rids)

    def _sid(self) -> str:
        return self._rng.choice(self._sids)

    def _closing(self) -> list[str]:
        endings = [
            _text(Ending(reason=FinishReason.FINISH_REASON_ERROR, stop=name).SerializeToString())
            for name in ("queue", "first", "total")
        ]
        return [_KEEP_S, "30000", _text(_CANCELLED.SerializeToString()), *endings]

    def _idem(self) -> str:
        return self._rng.choice(["", "", f"{PREFIX}:idem:t:k"])

    def _request(self, rid: str) -> list[str]:
        """What `admit` and `restore` say of a request: the same each time, but for its key."""
        rng = self._rng
        if rid not in self._fields:
            timeouts = [rng.choice(["0", "0", "0", "5000", "90000"]) for _ in range(3)]
            self._fields[rid] = [
                rid,
                f"spec of {rid}",
                "head",
                rng.choice(["interactive", "interactive", "batch"]),
                rng.choice(["", "x", "y"]),
                str(rng.randint(5, 60)),
                str(rng.choice([1, 1, 2])),
                "4",
                "4",
                str(rng.choice([0, 0, 7])),
                *timeouts,
            ]
        return [*self._fields[rid], self._idem(), "", rng.choice(["0", "30000"])]

    def _reserve(self) -> Call:
        rng = self._rng
        limits = [str(rng.choice([2, 10])), str(rng.choice([60, 1000]))]
        words = [self._rid(), str(rng.randint(5, 40)), *limits, "15000", self._idem()]
        words += [rng.choice(["f", "f", "g"]), _KEEP_S]
        whose = [rng.choice(["interactive", "batch"]), rng.choice(["", "x", "y"])]
        timeouts = [rng.choice(["0", "1", "5000"]) for _ in range(2)]
        return "reserve", [*words, *whose, *timeouts]

    def _admit(self) -> Call:
        advance = self._rng.choice(["0", "0", "-3600000000"])
        return "admit", [*self._closing(), *self._request(self._rid()), advance]

    def _take(self) -> Call:
        rng, places = self._rng, []
        for content in rng.choice([["a1"], ["b2"], ["a1", "b2"], [""]]):
            places += [content, str(rng.randint(0, 3)), str(rng.choice([10, 100, 1 << 40]))]
        late_after_ms = rng.choice(["0", "1", "2000", "2000", "30000"])
        return "take", [*self._closing(), self._sid(), late_after_ms, *places]

    def _append(self) -> Call:
        rng = self._rng
        batch = b""
        for _ in range(rng.randint(1, 3)):
            rid = self._rid()
            choice = rng.choice(
                [0, 0, int(self._fields[rid][6]) - 1, -1] if rid in self._fields else [0]
            )
            known = self._lengths.get((rid, choice), 0)
            start = max(0, known + rng.choice([0, 0, 0, 0, -2, -1, 1]))
            count = rng.choice([0, 1, 1, 1, 2, 5])
            # A position has one token whoever writes it, or another now and then.
            tokens = [7 * (start + i) + choice + 2 for i in range(count)]
            ending = rng.choice(_ENDINGS) if choice >= 0 and rng.random() < 0.15 else None
            origin = Origin(
                rng.choice(["a1", "b2", ""]), rng.choice(["n1", "n2", ""]), rng.random() < 0.8
            )
            records = encode_tokens(tokens)
            batch += LogEventWriter(rid, choice, 4).event(start, records, ending, origin)
            if start <= known:
                self._lengths[rid, choice] = max(known, start + count)
        return "append", [self._sid(), _KEEP_S, _text(batch)]

    def _renew(self) -> Call:
        sid = self._sid()
        register, speed = self._rng.choice(["0", "1"]), self._rng.choice(["", "120.5"])
        self._deadlines[sid] = self.now_us // 1000 + 1500
        contents = self._rng.choice(["", "a1", "a1 b2"])
        return "renew", [sid, "1500", register, "load", speed, contents]

    def _fence(self) -> Call:
        sid = self._sid()
        return "fence", [*self._closing(), sid, repr(float(self._deadlines.get(sid, 5)))]

    def _give_back(self) -> Call:
        rids = self._some(self._rids)
        words = [word for rid in rids for word in (rid, str(self._rng.choice([0, 0, 1, 2])))]
        return "give_back", [*self._closing(), self._sid(), *words]

    def _blame(self) -> Call:
        return "blame", self._some(self._rids)

    def _cancel(self) -> Call:
        rid = self._rid()
        tenant = self._fields[rid][4] if rid in self._fields else "nobody"
        tenant = self._rng.choice([tenant, tenant, "other"])
        return "cancel", [*self._closing(), rid, tenant, self._rng.choice("01")]

    def _join(self) -> Call:
        return "join", [self._rid()]

    def _withdraw(self) -> Call:
        return "withdraw", [self._rid(), self._idem()]

    def _leave(self) -> Call:
        return "leave", [*self._closing(), self._sid()]

    def _lease(self) -> Call:
        did, sid = self._rng.choice(["d1", "d2"]), self._sid()
        return "lease_decoder", [did, *self._rng.choice([[sid, ""], [sid, ""], ["", sid]])]

    def _leases(self) -> Call:
        return "leases", []

    def _announce(self) -> Call:
        rng = self._rng
        did, address = rng.choice(["d1", "d2"]), rng.choice(["d:1", "d:1", ""])
        said = rng.choice(
            [
                [],
                ["", "", "5"],
                ["", rng.choice(["a1", "b2"]), "700", "n1"],
                ["", "", "5", "", "{}"],
            ]
        )
        return "announce", ["decoder", did, address, "2500", "9000000", *said]

    def _members(self) -> Call:
        return "members", ["decoder"]

    def _follow(self) -> Call:
        return "follow", [word for rid in self._some(self._rids) for word in (rid, "30000")]

    def _abandoned(self) -> Call:
        return "abandoned", ["30000", *self._some(self._rids)]

    def _expire(self) -> Call:
        return "expire", [*self._closing(), *self._some(self._rids)]

    def _sweep(self) -> Call:
        return "sweep", [*self._closing(), "4000", _text(_CHANGED.SerializeToString())]

    def _report(self) -> Call:
        decoders = self._rng.sample(["d1", "d2", "d3"], self._rng.randrange(4))
        lease_ms = self._rng.choice(["0", "900000", "900000"])  # by the clock of Redis itself
        return "report", [self._rng.choice(["g1", "g2"]), lease_ms, *decoders]

    def _timeline(self) -> Call:
        if self._rng.random() < 0.4:
            return "traces", ["2"]
        due = self._rng.choice(["-1", "0", "60000"])
        words = [word for rid in self._some(self._rids) for word in (rid, f"seen of {rid}", due)]
        return "timeline", ["3", *words]

    def _errors(self) -> Call:
        words = [word for rid in self._some(self._rids) for word in (f"error of {rid}", "40")]
        return "errors", ["3", "900000", *words]

    def _refused(self) -> Call:
        words = [word for rid in self._some(self._rids) for word in (rid, "x", "head", f"of {rid}")]
        return "refused", ["2", "900", *words]

    def _queue_age(self) -> Call:
        return "queue_age", []

    def _check_run(self) -> Call:
        return "check_run", [self._rng.choice(["", "cafe"]), "900000"]

    def _recovery(self) -> Call:
        key = f"{PREFIX}:recovery"
        return self._rng.choice([("SET", [key, "x"]), ("DEL", [key]), ("DEL", [key])])

    def _weight(self) -> Call:
        weight = self._rng.choice(["2", "3", "0.7"])
        return "HSET", [f"{PREFIX}:weights", self._rng.choice(["x", "y"]), weight]

    def _restore(self) -> Call:
        rng = self._rng
        rid = self._rid()
        request = self._request(rid)
        owner = rng.choice(["", self._sid(), self._sid()])
        own_at = str(self.now_us - rng.choice([0, 1_000_000, 9_000_000]))
        logs = []
        for choice in range(int(request[6])):
            count = max(0, self._lengths.get((rid, choice), 0) + rng.choice([-1, 0, 0, 2]))
            tokens = [7 * i + choice + 2 for i in range(count)]
            if rng.random() < 0.1:
                tokens = [99, *tokens[1:]]
            ending = _text(rng.choice(_ENDINGS).SerializeToString()) if rng.random() < 0.1 else ""
            logs += [_text(encode_tokens(tokens)), ending]
        arrived = str(self.now_us // 1000 - 500)
        words = [owner, own_at, "1500", arrived, str(self.now_us - 500_000), ""]
        words += [str(rng.choice([0, 0, 1, 2])), rng.choice(["", "a1", "b2"])]
        words += [rng.choice(["", "n1", "n2"]), rng.choice(["0", "1"])]
        return "restore", [*self._closing(), *request, *words, *logs]

    def _media(self) -> Call:
        digest, size = self._rng.choice(["aa", "bb", "cc"]), str(self._rng.randint(1, 60))
        if self._rng.random() < 0.3:
            return "media_renew", ["5000", digest]
        return "media_reserve", [digest, size, "5000", "100"]

    def _response(self) -> Call:
        rng, rid = self._rng, self._rng.choice(self._rids)
        if rng.random() < 0.2:
            return "response_forget", [rid]
        fields = ["tenant", "x", "previous", "", "input", "i" * rng.randint(1, 60)]
        must = "0"
        if rng.random() < 0.5:
            must, fields = "1", rng.choice([[], ["response", "r" * rng.randint(1, 90)]])
        return "response_keep", [rid, "600000", "150", must, *fields]

    def _file(self) -> Call:
        rng = self._rng
        name, tenant = rng.choice(["file-a", "file-b"]), rng.choice(["x", "x", "y"])
        match rng.randrange(4):
            case 0:
                return "file_finish", [name, tenant, "9000", "pieces", "1"]
            case 1:
                return "file_forget", [name, tenant]
        return "file_add", [name, rng.choice("01"), "p" * rng.randint(1, 60), "3000", "9000"]

    def _adapter(self) -> Call:
        rng = self._rng
        digest, version = rng.choice(["d1", "d2", "d3"]), str(rng.randint(0, 4))
        match rng.randrange(5):
            case 0:
                why_not = rng.choice(["", "", "it does not fit"])
                return "adapter_report", [digest, rng.choice(["d1", "d2"]), why_not]
            case 1:
                return "adapter_progress", [rng.choice(["", digest]), version]
            case 2:
                return "adapters", [version, rng.choice(["", *self._sids])]
        changed = rng.choice([["", "", "0"], [digest, "/a b", "0"], [digest, "/c", "1"]])
        name = rng.choice(["sql", "chat", "" if changed[0] else "sql"])
        return "adapter_set", [name, *changed]

    def _batch(self) -> Call:
        rng = self._rng
        name, gateway = rng.choice(["batch_a", "batch_b"]), rng.choice(self._sids)
        line = rng.choice("123")
        match rng.randrange(11):
            case 0 | 1:
                words = ["x", "file-a", "20000", "9000", "2", "3000", "endpoint", "e"]
                return "batch_create", [name, *words]
            case 2 | 3:
                led = rng.sample(["batch_a", "batch_b"], rng.randint(0, 2))
                return "batch_lease", [gateway, "1500", "2", *led]
            case 4:
                kind = rng.choice(["completed", "failed", "unsent"])
                return "batch_result", [name, line, kind, "r" * rng.randint(1, 60)]
            case 5 | 6:
                return "batch_move", [name, gateway, "file-out", line, "9000", "piece", line]
            case 7:
                status = rng.choice(["in_progress", "finalizing", "completed", "cancelled"])
                return "batch_note", [name, gateway, status, "outcome", "completed"]
            case 8:
                return "batch_release", [gateway, *rng.sample(["batch_a", "batch_b"], 2)]
            case 9:
                return "batch_forget", [name, rng.choice(["x", "x", "y"]), "file-out"]
        return "batch_cancel", [name, rng.choice(["x", "x", "y"])]

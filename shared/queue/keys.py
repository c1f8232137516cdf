"""Every Redis key of Tessera. `m` is the model's tag and the keys' hash tag: all keys of one model live in one slot.

    t:{m}                         (never stored) the prefix handed to scripts as KEYS[1]
    t:{m}:meta                    hash    run_id seen, recovered_run (the run_id that the last recovery was for),
                                          live_tokens, tokens_per_s, mean_output (tokens of a request), takes,
                                          turn_ms (mean from one request's first token to the next one's while
                                          others waited), turn_since_ms (the last one's, if it left others waiting),
                                          floor:<prio> (virtual time of the tenant served last), checked_ms and
                                          up_since_ms (since when Redis has been up without a break), content and
                                          content_ms (of the decoder that was loaded last of those that are bound: it
                                          gets the new requests), adapters_version (how often names of adapters have
                                          changed)
    t:{m}:recovery                str     PX 3000 after a new Redis run_id was seen: no take, no fence while it exists
    t:{m}:live                    hash    rid -> cost in tokens, for every request reserved, waiting or running
    t:{m}:traces                  zset    rid -> when (ms) its trace is due, of requests whose traces are exported
    t:{m}:begun                   set     rids of them that have a first token
    t:{m}:resv                    zset    rid -> deadline (ms): reserved, in preprocessing, not yet admitted
    t:{m}:tenants:<prio>          zset    tenant -> virtual time, only tenants with waiting work
    t:{m}:idle:<prio>             zset    the same for tenants that had waiting work not long ago
    t:{m}:weights                 hash    tenant -> its share against others, 1 if not named
    t:{m}:due                     zset    rid -> until when (ms) it may wait: timeouts, follower's deadline
    t:{m}:w:<prio>:<tenant>       zset    rid -> rank (us of arrival): waiting; a returned request keeps its rank
    t:{m}:late:<prio>:<tenant>    zset    rid -> rank: those of them that have waited longer than the goal for a first
                                          token, and come behind the others
    t:{m}:goal                    zset    rid -> rank of those that wait and can become late; +inf once they are
    t:{m}:turns                   hash    tenant -> requests taken of it since the last late one, while such wait
    t:{m}:scheds                  zset    sid -> lease deadline (ms)
    t:{m}:load                    hash    sid -> GetLoadResponse, refreshed with the lease
    t:{m}:served                  hash    sid -> contents of the decoders that it has bound, refreshed with the lease
    t:{m}:own:<sid>               set     rids it owns
    t:{m}:instances:<service>     zset    instance id -> deadline (ms)
    t:{m}:addresses:<service>     hash    instance id -> gRPC address
    t:{m}:numerics:<service>      hash    instance id -> what the bits of its results depend on, where it says so
    t:{m}:loads:<service>         hash    instance id -> what it does at the moment, as JSON, where it says so
    t:{m}:contents                hash    did -> when it was loaded (ms) and the content of its checkpoint (hex)
    t:{m}:wanted                  hash    rid -> the content that it began with, of those that wait
    t:{m}:missing                 hash    content that requests wait for and no decoder has -> since when (ms)
    t:{m}:parts                   hash    service -> ServedPart as JSON, of the instance that announced itself last
    t:{m}:errors                  zset    an error that a request ended with (error_store.py) -> when (ms): the latest
                                          of all gateways
    t:{m}:reporter                str     PX: the gateway whose metrics page shows the metrics of the whole system
    t:{m}:engines                 hash    did -> the decoder's number there
    t:{m}:adapters                hash    name -> digest of the LoRA adapter that it serves, and the version since which
    t:{m}:adapters:folders        hash    digest -> version and folder, also of adapters that have no name any more
    t:{m}:adapters:served         hash    gateway -> the version (`adapters_version`) by which it serves
    t:{m}:adapter:<digest>        hash    did -> why it could not load the adapter, empty where it has it
    t:{m}:leases                  hash    did -> the number of the last lease
    t:{m}:bound                   hash    did -> sid: which scheduler a decoder is bound to
    t:{m}:r:<rid>                 hash    spec, head, state queued|running|ended, owner, own_at, cancel, arrived_ms,
                                          taken_ms, first_token_ms, ended_ms, follow_until_ms, timeout_ms,
                                          queue_timeout_ms, first_token_timeout_ms, tenant, prio, rank, cost, charged,
                                          n, open, stride, prompt_tokens, media_cost, attempts, idem, joined,
                                          lost_decoders (while they computed something of it), e0 .. e(n-1),
                                          seen (chunks of its timeline, their number), seen1 .. (timeline_store.py),
                                          exported (1: a gateway has taken its trace to export it),
                                          content (the weights that its logs are computed with, from the first record),
                                          numerics (those that its first record was computed in), inexact (1: its logs
                                          need not be those of an undisturbed run)
    t:{m}:refused:<rid>           hash    of a request that was not accepted: tenant, head, chunk (its timeline)
    t:{m}:refusals                zset    rid -> when (ms): those of which that is kept
    t:{m}:l:<rid>:<c>             str     the token log of choice c: records of a fixed size (shared/queue/token_log.py)
    t:{m}:l:<rid>:p               str     log-probabilities of the prompt, a record for each token but the first
    t:{m}:idem:<tenant>:<hash>    hash    rid, fingerprint
    t:{m}:tok                     channel one LogBatch for each append call
    t:{m}:ctl                     channel "q" (work arrived), "c<rid>" (cancelled while running)
    t:{m}:response:<rid>          hash    tenant, previous (a rid); JSON: input, begun, response (once it has ended)
    t:{m}:responses:expiry        zset    rid -> when it is forgotten (ms)
    t:{m}:responses:sizes|total           bytes of each, and of all
    t:{m}:responses:open          zset    rid -> since when (ms) it has no response yet
    t:{m}:stored:<id>             hash    a file (`file-...`, `inner-...` of a message batch) or a batch (`batch_...`,
                                          `msgbatch_...`): tenant, created_ms, expires_ms and what `file_store.py`
                                          and `batch_store.py` list
    t:{m}:stored:<id>:pieces      hash    number -> a piece of a file, of about 1 MiB
    t:{m}:stored:<id>:results     hash    number of a line of a batch -> c, f or u (completed, failed, unsent) and its
                                          result, until they are moved into files
    t:{m}:stored:of:<kind>:<tenant> zset  id -> us of its creation: the files, or the batches, of a tenant
    t:{m}:stored:expiry|sizes|total       until when (ms) each is kept, bytes of each, and of all
    t:{m}:batches:open            zset    id -> until when (ms) a gateway leads it, of batches that have not ended
    t:media:{<digest>}            list    raw media in pieces of 1 MiB (shared/queue/stores/media_store.py)
    t:{media}:expiry|sizes|total          what the media store holds in all
    t:media-name:{<digest>}       str     the digest of the media that a tenant has named (likewise)

A request has an owner exactly while its state is `running`. The field `owner` is the only fence: every script that
writes for a request compares it. All times are Redis TIME, never a service's clock.
"""

import hashlib

from shared.environment import random_hex


def model_tag(model_name: str) -> str:
    """8 hex digits that name a served model in keys and request ids."""
    return hashlib.blake2b(model_name.encode(), digest_size=4).hexdigest()


def new_request_id(tag: str) -> str:
    """A request id from which any gateway finds the model's keys: `r_<tag>_<128 random bits>`."""
    return f"r_{tag}_{random_hex(16)}"


def new_instance_id() -> str:
    """The name of one process incarnation; never used again."""
    return random_hex(8)


class Keys:
    """The keys of one model that Python touches; those of the scripts are derived in `scripts/prelude.lua`."""

    def __init__(self, model_name: str) -> None:
        self.tag = model_tag(model_name)
        self.prefix = f"t:{{{self.tag}}}"
        self.token_channel = f"{self.prefix}:tok"
        self.control_channel = f"{self.prefix}:ctl"
        self.load = f"{self.prefix}:load"
        self.parts = f"{self.prefix}:parts"
        self.errors = f"{self.prefix}:errors"
        self.live = f"{self.prefix}:live"
        self.meta = f"{self.prefix}:meta"
        self.weights = f"{self.prefix}:weights"
        self.stored_bytes = f"{self.prefix}:stored:total"
        self.open_batches = f"{self.prefix}:batches:open"
        self.open_responses = f"{self.prefix}:responses:open"

    def request(self, request_id: str) -> str:
        """The hash of one request."""
        return f"{self.prefix}:r:{request_id}"

    def refused(self, request_id: str) -> str:
        """The hash of one request that was not accepted."""
        return f"{self.prefix}:refused:{request_id}"

    def loads(self, service: str) -> str:
        """What the processes of a service do at the moment."""
        return f"{self.prefix}:loads:{service}"

    def response(self, request_id: str) -> str:
        """The hash of what is kept of one response."""
        return f"{self.prefix}:response:{request_id}"

    def stored(self, name: str) -> str:
        """The hash of one file or batch."""
        return f"{self.prefix}:stored:{name}"

    def stored_of(self, name: str, tenant: str) -> str:
        """The ids of all files, or of all batches, of a tenant; `name` is any id of the kind."""
        kind = name.partition("-")[0].partition("_")[0]
        return f"{self.prefix}:stored:of:{kind}:{tenant}"

    def log(self, request_id: str, choice: int) -> str:
        """The token log of one choice; choice -1 is the log of the prompt's log-probabilities."""
        return f"{self.prefix}:l:{request_id}:{'p' if choice < 0 else choice}"

"""Which adapters one decoder has, which it is told to read, and whose place another one gets."""

from collections import Counter
from collections.abc import Collection, Iterable

from services.scheduler.core.plan import StepPlan
from services.scheduler.core.sequence import Policy, Sequence


class AdapterPlaces:
    """A decoder has some adapters for as long as it runs, and places for others, which plans load and unload.

    Places are given by the rank of the sequences that wait for them. A sequence that has started keeps its adapter's
    place. Among the others that go the one used longest ago does first.
    """

    def __init__(self, fixed: Collection[str], places: int, policy: Policy) -> None:
        """fixed: those that stay."""
        self._fixed = fixed
        self._num_places = places
        self._policy = policy
        # By digest whether it is there, or still being read; the one used longest ago first.
        self._places: dict[str, bool] = {}
        self._early: dict[str, str] = {}  # folder by digest: to be read before a sequence asks
        self._unloads: list[str] = []  # for the next plan
        self._asked = False  # a waiting sequence may lack its adapter
        # While one waits for a place that running sequences hold: whose users start no more, if they rank behind it.
        self._closing = ""
        self._closed_behind: tuple[int, ...] = ()

    def adopt(self, loaded: Iterable[str]) -> None:
        """The decoder has these in its places, from an earlier binding."""
        self._places.update(dict.fromkeys(loaded, True))

    def has(self, lora_id: str) -> bool:
        """Whether an adapter is there; the model itself always is."""
        return not lora_id or lora_id in self._fixed or self._places.get(lora_id, False)

    def may_start(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence has its adapter, and does not keep it from making room."""
        lora_id = sequence.lora_id
        if not lora_id:
            return True
        if lora_id == self._closing and self._policy(sequence) > self._closed_behind:
            return False
        return self.has(lora_id)

    def ask(self, sequence: Sequence) -> None:
        """A sequence waits."""
        if not self.has(sequence.lora_id):
            self._asked = True

    def use(self, lora_id: str) -> None:
        """A sequence has started with it."""
        if lora_id in self._places:
            self._places[lora_id] = self._places.pop(lora_id)

    def read_early(self, lora_id: str, folder: str) -> None:
        """To be read as soon as there is a place that no sequence needs."""
        if lora_id not in self._fixed and lora_id not in self._places:
            self._early[lora_id] = folder

    def loaded(self, lora_id: str) -> None:
        """The decoder has read it."""
        if lora_id in self._places:
            self._places[lora_id] = True

    def failed(self, lora_id: str) -> bool:
        """The decoder could not read it. Returns whether it was waited for."""
        if self._places.get(lora_id, True):
            return False
        del self._places[lora_id]
        self._unloads.append(lora_id)
        return True

    def put_into(
        self, plan: StepPlan, waiting: Iterable[Sequence], running: Iterable[Sequence]
    ) -> None:
        """Gives places away, and has the plan say so. waiting: by rank."""
        plan.unload_adapters, self._unloads = self._unloads, []
        if not self._asked and not self._early:
            return
        waiting = list(waiting)
        users = Counter(s.lora_id for s in (*running, *waiting) if s.slot >= 0)
        claims = {lora_id: "" for lora_id in users if lora_id in self._places}
        self._closing, self._asked = "", False
        for sequence in waiting:
            lora_id = sequence.lora_id
            if not lora_id or lora_id in self._fixed or lora_id in claims:
                continue
            if len(claims) == self._num_places:
                self._asked = True
                self._close_one(users, sequence)
                break
            claims[lora_id] = sequence.lora_folder
        for lora_id, folder in claims.items():
            if lora_id not in self._places:
                self._load(plan, lora_id, folder, claims)
        for lora_id, folder in list(self._early.items()):
            if lora_id in self._places:
                del self._early[lora_id]
            elif len(claims) < self._num_places:
                claims[lora_id] = folder
                del self._early[lora_id]
                self._load(plan, lora_id, folder, claims)

    def _load(self, plan: StepPlan, lora_id: str, folder: str, claims: Collection[str]) -> None:
        if len(self._places) == self._num_places:
            oldest = next(other for other in self._places if other not in claims)
            del self._places[oldest]
            plan.unload_adapters.append(oldest)
        self._places[lora_id] = False
        plan.load_adapters.append((lora_id, folder))

    def _close_one(self, users: "Counter[str]", behind: Sequence) -> None:
        """The adapter with the fewest running sequences gets no more that rank behind the one without a place."""
        held = [lora_id for lora_id in self._places if users[lora_id]]
        if held:
            self._closing = min(held, key=users.__getitem__)
            self._closed_behind = self._policy(behind)

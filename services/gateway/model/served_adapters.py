"""The LoRA adapters that requests may name."""

from collections.abc import Iterator, Mapping


class ServedAdapters(Mapping[str, str]):
    """Digests of weights (`LoraAdapter.lora_id`) by name: those that were given at the start, and those loaded since.
    An empty one is the model itself, by another name. May be read on any thread; each read sees all or nothing of a
    change."""

    def __init__(self, fixed: Mapping[str, str] | None = None, default: str = "") -> None:
        """`default`: which of `fixed` answers where a request names the model; empty is none."""
        self.fixed: Mapping[str, str] = dict(fixed or {})
        self.default = default if self.fixed.get(default) else ""
        self._all = self.fixed

    def serve(self, loaded: Mapping[str, str]) -> None:
        """Serves these beside the ones that were given at the start, which keep their names."""
        self._all = {**self.fixed, **{k: v for k, v in loaded.items() if k not in self.fixed}}

    def __getitem__(self, name: str) -> str:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

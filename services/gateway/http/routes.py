"""The table of all routes, by path."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.gateway.http.endpoint import Endpoint, Route


@dataclass(frozen=True, slots=True)
class Path:
    """What there is at one path."""

    pattern: str
    endpoint: Endpoint
    methods: Mapping[str, Route]
    is_probe: bool
    generates: bool


class RouteTable:
    """Finds paths: literal ones by one look-up, those with a star by another."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        """Where the API of a path cannot be known, it is the first one."""
        self._default = endpoints[0]
        self._roots = {root: endpoint for endpoint in endpoints for root in endpoint.roots}
        self._paths: dict[str, Path] = {}
        self._prefixes: dict[str, Path] = {}
        for endpoint in endpoints:
            for pattern in dict.fromkeys(route.path for route in endpoint.routes):
                path = _path(endpoint, pattern)
                if pattern.endswith("/**"):
                    self._prefixes[pattern.removesuffix("**")] = path
                else:
                    self._paths[pattern] = path

    @property
    def patterns(self) -> Sequence[str]:
        """All paths that there are, as their routes name them."""
        return [*self._paths, *(f"{prefix}**" for prefix in self._prefixes)]

    def find(self, path: str) -> Path | None:
        """What there is at a path of a request; None for nothing."""
        found = self._paths.get(path)
        if found is not None:
            return found
        for prefix, found in self._prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return found
        return self._paths.get(_with_star(path))

    def endpoint_of(self, path: str) -> Endpoint:
        """The API that a path belongs to, also where there is nothing at it."""
        found = self.find(path)
        if found is not None:
            return found.endpoint
        at = path
        while at:
            if at in self._roots:
                return self._roots[at]
            at = at.rpartition("/")[0]
        return self._default


def _path(endpoint: Endpoint, pattern: str) -> Path:
    routes = [route for route in endpoint.routes if route.path == pattern]
    return Path(
        pattern,
        endpoint,
        {route.method: route for route in routes},
        any(route.is_probe for route in routes),
        any(route.generates for route in routes),
    )


def _with_star(path: str) -> str:
    """The path with its third part, which names something, as a star."""
    parts = path.split("/")
    if len(parts) > 3 and parts[3]:
        parts[3] = "*"
    return "/".join(parts)

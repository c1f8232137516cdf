"""The table of all routes, by path."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from services.gateway.http.by_body import ByBody, Mounted
from services.gateway.http.endpoint import Endpoint
from services.gateway.http.exchange import BodyLimits

_NAMES = (3, 4)  # the places of a name among the parts of a path
_MOST_BEHIND = 3  # parts behind a name


@dataclass(frozen=True, slots=True)
class Path:
    """What there is at one path."""

    pattern: str
    # The API that comes first, for methods that the path does not have.
    endpoint: Endpoint
    methods: Mapping[str, Mounted]
    is_probe: bool
    generates: bool


class RouteTable:
    """Finds paths: literal ones by one look-up, those with a star by others."""

    def __init__(self, endpoints: Sequence[Endpoint], limits: BodyLimits) -> None:
        """Where the API of a path cannot be known, it is the first one. `limits` of bodies that are read to find the
        API of a route that several have. Raises ValueError where they cannot be told apart.
        """
        self._default = endpoints[0]
        self._roots = {root: endpoint for endpoint in endpoints for root in endpoint.roots}
        self._paths: dict[str, Path] = {}
        self._prefixes: dict[str, Path] = {}
        by_pattern: dict[str, list[Mounted]] = {}
        for endpoint in endpoints:
            for route in endpoint.routes:
                by_pattern.setdefault(route.path, []).append(Mounted(endpoint, route))
        for pattern, mounted in by_pattern.items():
            path = _path(pattern, mounted, limits)
            if pattern.endswith("/**"):
                self._prefixes[pattern.removesuffix("**")] = path
            else:
                self._paths[pattern] = path

    @property
    def patterns(self) -> Sequence[str]:
        """All paths that there are, as their routes name them."""
        return [*self._paths, *(f"{prefix}**" for prefix in self._prefixes)]

    def generating(self) -> Sequence[str]:
        """The paths below /v1 whose POST asks for one answer."""
        return [
            path.pattern
            for path in self._paths.values()
            if path.pattern.startswith("/v1/")
            and "*" not in path.pattern
            and "POST" in path.methods
            and path.methods["POST"].route.generates
        ]

    def find(self, path: str) -> Path | None:
        """What there is at a path of a request; None for nothing."""
        found = self._paths.get(path)
        if found is not None:
            return found
        for prefix, found in self._prefixes.items():
            if path.startswith(prefix) and len(path) > len(prefix):
                return found
        return next(filter(None, map(self._paths.get, _with_star(path))), None)

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


def _path(pattern: str, mounted: Sequence[Mounted], limits: BodyLimits) -> Path:
    by_method: dict[str, list[Mounted]] = {}
    for one in mounted:
        by_method.setdefault(one.route.method, []).append(one)
    return Path(
        pattern,
        mounted[0].endpoint,
        {method: _one(found, limits) for method, found in by_method.items()},
        any(one.route.is_probe for one in mounted),
        any(one.route.generates for one in mounted),
    )


def _one(found: Sequence[Mounted], limits: BodyLimits) -> Mounted:
    if len(found) == 1:
        return found[0]
    endpoint, route = found[0]
    return Mounted(endpoint, replace(route, handler=ByBody(found, limits).handle))


def _with_star(path: str) -> Iterator[str]:
    """The path with its third part, which names something, as a star; then with more and more parts as that name. The
    same with its fourth one."""
    parts = path.split("/")
    for place in _NAMES:
        if len(parts) <= place or not parts[place]:
            return
        head = "/".join(parts[:place])
        most = len(parts) - place - 1
        for behind in range(min(most, _MOST_BEHIND), -1, -1):
            yield "/".join([head, "*", *parts[len(parts) - behind :]])

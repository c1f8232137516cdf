"""How many connections the process may have, by the files that it may open."""

import resource

import structlog

log = structlog.get_logger(__name__)

# Of the model, of Redis and of other services.
_OTHERS = 256


def connections_within_limits(wanted: int) -> int:
    """Raises the soft limit of open files as far as `wanted` connections need and the hard limit lets it; how many
    there may be then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHERS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            log.warning("fewer connections than --max-connections", open_files=soft, wanted=wanted)
            return max(1, soft - _OTHERS)
    return wanted

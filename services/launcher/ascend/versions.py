"""Which torch, torch_npu and CANN belong together.

Sources: https://github.com/Ascend/pytorch/blob/master/COMPATIBILITY.en.md of August 2026, and for the releases of
September and October those of https://gitcode.com/Ascend/pytorch (26.1.1) and https://gitcode.com/ascend/op-plugin
(26.2.0); of each the part with torch 2.8 and newer.
"""

import re
from pathlib import Path

# torch_npu -> CANN, the oldest that it is built for
CANN_OF = {
    "2.14.0": "9.2.0",
    "2.13.0": "9.2.0",
    "2.12.0.post3": "9.2.0",
    "2.12.0.post2": "9.1.0",
    "2.12.0": "9.1.0",
    "2.11.0.post3": "9.2.0",
    "2.11.0.post2": "9.1.0",
    "2.11.0": "9.1.0",
    "2.10.0.post7": "9.2.0",
    "2.10.0.post6": "9.1.0",
    "2.10.0.post4": "9.1.0",
    "2.10.0": "9.0.0",
    "2.9.0.post9": "9.2.0",
    "2.9.0.post8": "9.1.0",
    "2.9.0.post6": "9.1.0",
    "2.9.0.post2": "9.0.0",
    "2.9.0": "8.5.0",
    "2.8.0.post4": "9.0.0",
    "2.8.0.post2": "8.5.0",
    "2.8.0": "8.3.RC1",
}


def cann_for(torch_npu: str) -> str:
    """The oldest CANN for a torch_npu: that of the next older entry with the same torch. For a torch that is not in
    the table that of the newest one before it, without corrections; empty for one that is older than all.
    """
    given = number(torch_npu)
    older = [known for known in CANN_OF if number(known) <= given]
    of_same = [known for known in older if belong_together(known, torch_npu)]
    firsts = [known for known in older if "post" not in known]
    return CANN_OF[max(of_same or firsts, key=number)] if older else ""


def torch_npu_for(cann: str) -> list[str]:
    """Releases of torch_npu that were made for a CANN, or for the newest before it, the newest first."""
    older = [number(made_for) for made_for in CANN_OF.values() if number(made_for) <= number(cann)]
    return [
        name for name, made_for in CANN_OF.items() if number(made_for) == max(older, default=())
    ]


def belong_together(torch: str, torch_npu: str) -> bool:
    """torch_npu wants the torch of its own three numbers: 2.9.0.post2 wants 2.9.0, with any local label."""
    return number(torch)[:3] == number(torch_npu)[:3]


def number(version: str) -> tuple[int, ...]:
    """To compare versions by: "8.3.RC1" comes before "8.3.0", "2.9.0" before "2.9.0.post2". Labels do not count."""
    release, _, candidate = re.sub(r"[+-].*$", "", version).upper().partition("RC")
    found = [int(part) for part in re.findall(r"\d+", release)]
    found += [0] * (3 - len(found))
    # Before the release itself (0), which comes before its corrections (post2).
    return (*found[:3], int(candidate or 0) - 1000 if candidate else 0, *found[3:])


def installed_cann(home: Path) -> str:
    """The toolkit's version by its own files, or by its folder's name; empty if neither tells it."""
    for file in sorted(home.glob("*-linux/ascend_toolkit_install.info")):
        if found := re.search(r"^version=(\S+)", file.read_text(errors="replace"), re.MULTILINE):
            return found[1]
    by_name = re.search(r"(\d+\.\d+\.(?:RC)?\d+)", home.resolve().name)
    return by_name[1] if by_name else ""

"""The roles of a conversation's messages: the one table that the gateway's APIs and chat templates go by."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Role:
    """`older`: an older name for the same, for templates that do not know it. `is_served`: whether clients may send it,
    and templates are given it.
    """

    name: str
    older: str = ""
    is_served: bool = True


ROLES = {
    role.name: role
    for role in (
        Role("system"),
        Role("developer", older="system"),  # its name since OpenAI's newer models
        Role("user"),
        Role("assistant"),
        Role("tool"),  # what a tool gave
        Role("function", is_served=False),  # the older API's tool
    )
}
# What clients may send and a chat template may be given.
SERVED = tuple(role.name for role in ROLES.values() if role.is_served)


def for_older_templates(name: str) -> str:
    """What a role is called in templates that know only the first roles."""
    return ROLES[name].older or name

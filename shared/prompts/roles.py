"""The roles of a conversation's messages: the one table that the gateway's APIs and chat templates go by."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Role:
    """`older`: an older name for the same, for templates that do not know it. `of_tools`: what a tool gave, which no
    API takes yet. `in_templates`: whether templates are given it by this name.
    """

    name: str
    older: str = ""
    of_tools: bool = False
    in_templates: bool = True


ROLES = {
    role.name: role
    for role in (
        Role("system"),
        Role("developer", older="system"),  # its name since OpenAI's newer models
        Role("user"),
        Role("assistant"),
        Role("tool", of_tools=True),
        Role("function", of_tools=True, in_templates=False),  # the older API's tool
    )
}
# What clients may send, and what a chat template may be given.
OF_CLIENTS = tuple(role.name for role in ROLES.values() if not role.of_tools)
OF_TEMPLATES = tuple(role.name for role in ROLES.values() if role.in_templates)


def is_of_tools(name: str) -> bool:
    """Whether a message of this role is what a tool gave."""
    return name in ROLES and ROLES[name].of_tools


def for_older_templates(name: str) -> str:
    """What a role is called in templates that know only the first roles."""
    return ROLES[name].older or name

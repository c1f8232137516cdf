"""Roles of messages, as APIs and templates know them."""

from shared.prompts.roles import SERVED, for_older_templates


def test_clients_and_templates_have_their_roles_from_one_table() -> None:
    assert SERVED == ("system", "developer", "user", "assistant", "tool")


def test_only_a_role_with_an_older_name_is_renamed() -> None:
    renamed = {name: for_older_templates(name) for name in SERVED}
    assert renamed.pop("developer") == "system"
    assert all(old == new for old, new in renamed.items())

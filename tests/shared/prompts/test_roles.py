"""Roles of messages, as APIs and templates know them."""

from shared.prompts.roles import OF_CLIENTS, OF_TEMPLATES, for_older_templates, is_of_tools


def test_clients_and_templates_have_their_roles_from_one_table() -> None:
    assert OF_CLIENTS == ("system", "developer", "user", "assistant")
    assert set(OF_TEMPLATES) == {*OF_CLIENTS, "tool"}
    assert [name for name in ("tool", "function", "user", "wizard") if is_of_tools(name)] == [
        "tool",
        "function",
    ]


def test_only_a_role_with_an_older_name_is_renamed() -> None:
    renamed = {name: for_older_templates(name) for name in OF_TEMPLATES}
    assert renamed.pop("developer") == "system"
    assert all(old == new for old, new in renamed.items())

"""vLLM's rule for the chat templates that take a message's content as a list of parts."""

from collections.abc import Iterator

from jinja2 import nodes


def loops_over_content(template: nodes.Template) -> bool:
    """Whether a loop of the template goes over a message's content."""
    known: set[str] = set()
    while more := {name for name in _assigned(template, known) if name not in known}:
        known |= more
    return any(_is_content(loop.iter, known) for loop in template.find_all(nodes.For))


def _assigned(template: nodes.Template, known: set[str]) -> Iterator[str]:
    """Names that stand for a content, beside those that are `known` to."""
    for assignment in template.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, known):
            yield assignment.target.name


def _is_content(node: nodes.Node | None, known: set[str]) -> bool:
    """`message.content`, `message["content"]`, or a name that stands for it, sliced or through filters."""
    if isinstance(node, nodes.Name):
        return node.name in known
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, known)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, known)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False

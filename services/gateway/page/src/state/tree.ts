// A conversation is a tree: an edited question or another answer is one more child of the same parent.
import type { Node } from "./types";

const key = (parent: string | null) => parent ?? "";

export function childrenOf(nodes: Iterable<Node>, parent: string | null): Node[] {
  return [...nodes].filter((node) => node.parent === parent).sort((a, b) => a.created - b.created);
}

/** The branch that is shown, from the first question on. */
export function shownPath(nodes: readonly Node[], choice: Record<string, string>): Node[] {
  const path: Node[] = [];
  let parent: string | null = null;
  for (;;) {
    const children = childrenOf(nodes, parent);
    if (!children.length) return path;
    const chosen = children.find((node) => node.id === choice[key(parent)]) ?? children[children.length - 1]!;
    path.push(chosen);
    parent = chosen.id;
  }
}

/** From the first question to a node, this included. */
export function pathTo(nodes: readonly Node[], id: string | null): Node[] {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const path: Node[] = [];
  for (let at = id ? byId.get(id) : undefined; at; at = at.parent ? byId.get(at.parent) : undefined) path.unshift(at);
  return path;
}

export function choose(choice: Record<string, string>, node: Node): Record<string, string> {
  return { ...choice, [key(node.parent)]: node.id };
}

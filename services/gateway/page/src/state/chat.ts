// The conversations of this browser, and the answers that are being written.
import { computed, signal, type Signal } from "@preact/signals";
import * as store from "./store";
import { choose, pathTo, shownPath } from "./tree";
import type { Attachment, Conversation, Node } from "./types";

export interface Open {
  id: string;
  created: number;
  title: Signal<string>;
  nodes: Signal<Map<string, Signal<Node>>>;
  choice: Signal<Record<string, string>>;
}

export const list = signal<Conversation[]>([]);
export const current = signal<Open | null>(null);
const loaded = new Map<string, Open>();

/** The nodes that are shown, by name; what is in them is in `current.value.nodes`. */
export const shown = computed<string[]>(() => {
  const open = current.value;
  return open ? shownPath(plain(open), open.choice.value).map((node) => node.id) : [];
});

export const newId = () => crypto.getRandomValues(new Uint32Array(4)).reduce((all, one) => all + one.toString(36), "");

function plain(open: Open): Node[] {
  return [...open.nodes.value.values()].map((node) => node.peek());
}

function toOpen(kept: Conversation): Open {
  return {
    id: kept.id,
    created: kept.created,
    title: signal(kept.title),
    nodes: signal(new Map(kept.nodes.map((node) => [node.id, signal(node)]))),
    choice: signal(kept.choice),
  };
}

function toKept(open: Open): Conversation {
  const nodes = plain(open);
  const updated = Math.max(open.created, ...nodes.map((node) => node.created));
  return { id: open.id, title: open.title.peek(), created: open.created, updated, nodes, choice: open.choice.peek() };
}

/** Writes a conversation to the browser's store. */
export async function save(open: Open): Promise<void> {
  if (!loaded.has(open.id)) return; // it was deleted
  const kept = toKept(open);
  list.value = [kept, ...list.value.filter((one) => one.id !== kept.id)].sort((a, b) => b.updated - a.updated);
  await store.putConversation(kept);
}

export async function loadList(): Promise<void> {
  list.value = await store.allConversations();
}

export function begin(): void {
  current.value = null;
  remember("");
}

export async function show(id: string): Promise<Open | null> {
  let open = loaded.get(id);
  if (!open) {
    const kept = await store.getConversation(id);
    if (!kept) return null;
    open = toOpen(kept);
    loaded.set(id, open);
  }
  current.value = open;
  remember(id);
  return open;
}

function remember(id: string): void {
  history.replaceState(null, "", id ? `#${id}` : location.pathname + location.search);
}

/** The conversation that is shown, or a new one. */
export function ensureOpen(title: string): Open {
  if (current.value) return current.value;
  const id = newId();
  const kept = { id, title: title.trim().slice(0, 80), created: Date.now(), updated: 0, nodes: [], choice: {} };
  const open = toOpen(kept);
  loaded.set(id, open);
  current.value = open;
  remember(id);
  return open;
}

export function add(open: Open, node: Omit<Node, "id" | "created">): Signal<Node> {
  const created = Math.max(Date.now(), ...plain(open).map((one) => one.created + 1));
  const made = signal<Node>({ ...node, id: newId(), created });
  open.nodes.value = new Map(open.nodes.value).set(made.value.id, made);
  open.choice.value = choose(open.choice.value, made.value);
  return made;
}

/** Shows another child of the same parent. */
export function select(open: Open, node: Node): void {
  open.choice.value = choose(open.choice.value, node);
  void save(open);
}

export function siblings(open: Open, node: Node): Node[] {
  return plain(open)
    .filter((one) => one.parent === node.parent)
    .sort((a, b) => a.created - b.created);
}

export function path(open: Open, id: string | null): Node[] {
  return pathTo(plain(open), id);
}

export function rename(kept: Conversation, title: string): void {
  const text = title.trim();
  if (!text) return;
  const open = loaded.get(kept.id);
  if (open) open.title.value = text;
  const changed = { ...kept, title: text };
  list.value = list.value.map((one) => (one.id === kept.id ? changed : one));
  void store.putConversation(open ? toKept(open) : changed);
}

export async function forget(kept: Conversation): Promise<void> {
  loaded.delete(kept.id);
  list.value = list.value.filter((one) => one.id !== kept.id);
  if (current.value?.id === kept.id) begin();
  await store.removeConversation(kept);
}

/** The conversation as it is now, with what an answer has so far. */
export function latest(kept: Conversation): Conversation {
  const open = loaded.get(kept.id);
  return open ? toKept(open) : kept;
}

export function matches(kept: Conversation, words: string): boolean {
  const text = words.trim().toLowerCase();
  if (!text) return true;
  return kept.title.toLowerCase().includes(text) || kept.nodes.some((node) => node.text.toLowerCase().includes(text));
}

export function titleOf(text: string, attachments: readonly Attachment[]): string {
  return text.trim().split("\n")[0]?.slice(0, 80) || attachments[0]?.name || "…";
}

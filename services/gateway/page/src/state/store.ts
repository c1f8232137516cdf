// Conversations and media in the browser's IndexedDB; in memory where there is none.
import type { Conversation } from "./types";

const NAME = "tessera";
type Store = "conversations" | "media";

let opened: Promise<IDBDatabase | null> | undefined;
const memory: Record<Store, Map<string, unknown>> = { conversations: new Map(), media: new Map() };

function open(): Promise<IDBDatabase | null> {
  opened ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => {
        request.result.createObjectStore("conversations", { keyPath: "id" });
        request.result.createObjectStore("media", { keyPath: "id" });
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}

async function run<T>(store: Store, mode: IDBTransactionMode, work: (s: IDBObjectStore) => IDBRequest<T>): Promise<T | undefined> {
  const db = await open();
  if (!db) return undefined;
  return new Promise((resolve, reject) => {
    const request = work(db.transaction(store, mode).objectStore(store));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function put(store: Store, value: { id: string }): Promise<void> {
  if (await open()) await run(store, "readwrite", (s) => s.put(value));
  else memory[store].set(value.id, structuredClone(value));
}

async function get<T>(store: Store, id: string): Promise<T | undefined> {
  if (await open()) return (await run(store, "readonly", (s) => s.get(id))) as T | undefined;
  return memory[store].get(id) as T | undefined;
}

async function remove(store: Store, id: string): Promise<void> {
  if (await open()) await run(store, "readwrite", (s) => s.delete(id));
  else memory[store].delete(id);
}

export async function allConversations(): Promise<Conversation[]> {
  const found = (await open())
    ? ((await run("conversations", "readonly", (s) => s.getAll())) as Conversation[])
    : ([...memory.conversations.values()] as Conversation[]);
  return found.sort((a, b) => b.updated - a.updated);
}

export const getConversation = (id: string) => get<Conversation>("conversations", id);
export const putConversation = (conversation: Conversation) => put("conversations", conversation);

/** Removes a conversation and the media that it alone has. */
export async function removeConversation(conversation: Conversation): Promise<void> {
  await remove("conversations", conversation.id);
  for (const id of mediaOf(conversation)) await remove("media", id);
}

export function mediaOf(conversation: Conversation): Set<string> {
  return new Set(conversation.nodes.flatMap((node) => (node.attachments ?? []).map((one) => one.id)));
}

export const putMedia = (id: string, blob: Blob) => put("media", { id, blob } as { id: string });

export async function getMedia(id: string): Promise<Blob | undefined> {
  return (await get<{ blob: Blob }>("media", id))?.blob;
}

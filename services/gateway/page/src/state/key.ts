// The API key: kept for this tab, or for this browser where that is chosen. It is never shown.
import { signal } from "@preact/signals";
import { Failure } from "../api/failure";
import { t } from "../text/text";

const NAME = "tessera.key";

function stored(): string {
  try {
    return sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME) ?? "";
  } catch {
    return "";
  }
}

let key = stored();

/** Whether the dialog that asks for a key is open. */
export const asking = signal(false);
export const hasKey = signal(Boolean(key));
let waiting: ((given: boolean) => void)[] = [];

export function keyHeader(): Record<string, string> {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Opens the dialog, and waits until a key is given. Throws Failure where none is. */
export async function askForKey(signal?: AbortSignal): Promise<void> {
  asking.value = true;
  const given = await new Promise<boolean>((resolve) => {
    waiting.push(resolve);
    signal?.addEventListener("abort", () => resolve(false), { once: true });
  });
  if (signal?.aborted) throw new DOMException("stopped", "AbortError");
  if (!given) throw new Failure("refused", t("keyNeeded"), 401);
}

export function giveKey(text: string, remember: boolean): void {
  key = text.trim();
  hasKey.value = Boolean(key);
  try {
    sessionStorage.removeItem(NAME);
    localStorage.removeItem(NAME);
    if (key) (remember ? localStorage : sessionStorage).setItem(NAME, key);
  } catch {
    // a browser that keeps nothing: for this page alone
  }
  settle(Boolean(key));
}

export function refuseKey(): void {
  settle(false);
}

function settle(given: boolean): void {
  asking.value = false;
  const all = waiting;
  waiting = [];
  for (const resolve of all) resolve(given);
}

/** What `work` gives, asking for a key as often as the server wants one. */
export async function withKey<T>(work: () => Promise<T>): Promise<T> {
  for (;;) {
    try {
      return await work();
    } catch (error) {
      if (!(error instanceof Failure) || error.kind !== "key") throw error;
      await askForKey();
    }
  }
}

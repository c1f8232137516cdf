// Requests to the gateway that this page came from, wherever it is mounted.
import { keyHeader } from "../state/key";
import { Failure, failureOf, gone, notOurs } from "./failure";

const ROOT = new URL("./", document.baseURI);

export function address(path: string): string {
  return new URL(path, ROOT).href;
}

/** A response without an error status. Throws Failure. */
export async function call(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = { ...keyHeader(), ...(init.headers as Record<string, string>) };
  let response: Response;
  try {
    response = await fetch(address(path), { ...init, headers, cache: "no-store" });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw gone();
  }
  if (!response.ok) throw await failureOf(response);
  return response;
}

/** A JSON body. Throws Failure, also where what came is none. */
export async function json<T>(path: string, init: RequestInit = {}): Promise<T> {
  const response = await call(path, init);
  const text = await response.text().catch(() => {
    throw gone();
  });
  try {
    return JSON.parse(text) as T;
  } catch {
    throw notOurs(response);
  }
}

export function post<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
  const init: RequestInit = { method: "POST", body: JSON.stringify(body), headers: JSON_TYPE };
  if (signal) init.signal = signal;
  return json<T>(path, init);
}

export const JSON_TYPE = { "Content-Type": "application/json" };

export function isMissing(error: unknown): boolean {
  return error instanceof Failure && error.status === 404;
}

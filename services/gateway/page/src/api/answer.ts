// One answer, however often its connection breaks: docs/delivery.md, "Going on with a stream".
import { askForKey } from "../state/key";
import { eventsOf, Silence } from "./events";
import { Failure, gone, told } from "./failure";
import { call, JSON_TYPE } from "./http";
import type { Chunk } from "./types";

const SILENCE_MS = 25_000; // a gateway sends something every ten seconds
const GIVE_UP_MS = 90_000; // without an event
const KEEP_S = 60; // for which the server goes on without a reader
const PAUSES_MS = [100, 300, 700, 1500, 3000];

export interface Place {
  /** The same for every attempt: the request is computed once. */
  readonly key: string;
  requestId: string;
  eventId: string;
}

export interface Listener {
  /** The request has a name; it can be followed from anywhere. */
  accepted(requestId: string): void;
  chunk(chunk: Chunk, eventId: string): void;
  /** The connection is lost or refused; it is tried again in so many milliseconds. */
  waiting(failure: Failure, ms: number): void;
  /** It goes on behind a break. */
  resumed(): void;
}

/** Follows an answer to its end. `body` is null for one that was asked for before. Throws Failure or AbortError. */
export async function follow(body: string | null, place: Place, listener: Listener, signal: AbortSignal): Promise<void> {
  let tries = 0;
  let broken = false;
  let heardAt = performance.now();
  for (;;) {
    try {
      const response = await request(body, place, signal);
      const requestId = response.headers.get("x-tessera-request-id");
      if (requestId && !place.requestId) {
        place.requestId = requestId;
        listener.accepted(requestId);
      }
      if (broken) listener.resumed();
      broken = false;
      if (!response.body) throw gone();
      for await (const event of eventsOf(response.body, SILENCE_MS)) {
        if (event.data === "[DONE]") return;
        const chunk = JSON.parse(event.data) as Chunk;
        if (chunk.error) throw told(chunk.error);
        tries = 0;
        heardAt = performance.now();
        if (event.id) place.eventId = event.id;
        listener.chunk(chunk, place.eventId);
      }
      throw gone();
    } catch (error) {
      if (signal.aborted) throw new DOMException("stopped", "AbortError");
      const failure = asFailure(error);
      if (failure.kind === "key") {
        await askForKey(signal);
        continue;
      }
      if (!failure.passes || performance.now() - heardAt > GIVE_UP_MS) throw failure;
      const ms = failure.retryAfterS ? failure.retryAfterS * 1000 : (PAUSES_MS[tries] ?? 3000);
      tries += 1;
      broken = true;
      listener.waiting(failure, ms);
      await pause(ms, signal);
    }
  }
}

function request(body: string | null, place: Place, signal: AbortSignal): Promise<Response> {
  if (place.requestId && (place.eventId || body === null)) {
    const after = place.eventId ? `?after=${encodeURIComponent(place.eventId)}` : "";
    return call(`v1/requests/${place.requestId}/stream${after}`, { signal });
  }
  const headers = { ...JSON_TYPE, "Idempotency-Key": place.key, "X-Tessera-Resume": String(KEEP_S) };
  return call("v1/chat/completions", { method: "POST", body, headers, signal });
}

function asFailure(error: unknown): Failure {
  if (error instanceof Failure) return error;
  // Silence, what fetch throws for a connection that breaks, and an event that was cut.
  if (error instanceof Silence || error instanceof TypeError || error instanceof SyntaxError) return gone();
  throw error;
}

function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const timer = window.setTimeout(resolve, ms);
    signal.addEventListener(
      "abort",
      () => {
        window.clearTimeout(timer);
        reject(new DOMException("stopped", "AbortError"));
      },
      { once: true },
    );
  });
}

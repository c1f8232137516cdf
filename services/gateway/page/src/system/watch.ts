// Asks the gateway for the state of the system, again and again, and keeps the last minutes of it.
import { signal } from "@preact/signals";
import { sentence } from "../api/failure";
import { json } from "../api/http";
import type { DecoderState, Load, SystemState } from "../api/types";
import { withKey } from "../state/key";

const EVERY_MS = 2000;
const MOST = 150; // points of a curve: five minutes

export interface Point {
  running: number;
  waiting: number;
  kv: number; // part of all blocks, 0 to 1
  tokensPerS: number;
}

/** Means over the time between two looks, in milliseconds. */
export interface StepMeans {
  step: number;
  forward: number;
  plan: number;
}

/** What grew between two looks, of each replica that says what it does; from its start on the first look. */
export const grown = signal<Readonly<Record<string, Load>>>({});

export const state = signal<SystemState | null>(null);
export const points = signal<readonly Point[]>([]);
export const means = signal<Readonly<Record<string, StepMeans | null>>>({});
export const trouble = signal("");
export const heardAt = signal(0);
export const now = signal(Date.now());

let before: SystemState | null = null;

export async function watch(): Promise<void> {
  for (;;) {
    try {
      const found = await withKey(() => json<SystemState>("v1/system"));
      take(found);
      trouble.value = "";
      heardAt.value = Date.now();
    } catch (error) {
      trouble.value = sentence(error);
    }
    now.value = Date.now();
    await new Promise((wake) => setTimeout(wake, EVERY_MS));
  }
}

function take(found: SystemState): void {
  const seconds = before ? found.now_unix_s - before.now_unix_s : 0;
  const earlier = new Map((before?.decoders ?? []).map((one) => [one.id, one]));
  let tokens = 0;
  const steps: Record<string, StepMeans | null> = {};
  for (const decoder of found.decoders) {
    const last = earlier.get(decoder.id);
    const same = last && decoder.steps.steps >= last.steps.steps ? last : null; // a new lease begins at 0
    if (same) tokens += decoder.steps.tokens - same.steps.tokens;
    steps[decoder.id] = meansOf(decoder, same) ?? means.value[decoder.id] ?? null;
  }
  const used = found.decoders.reduce((sum, one) => sum + one.kv_blocks_used, 0);
  const all = found.decoders.reduce((sum, one) => sum + one.kv_blocks_total, 0);
  const { running, waiting } = found.queue;
  const tokensPerS = seconds > 0 ? tokens / seconds : 0;
  points.value = [...points.value.slice(1 - MOST), { running, waiting, kv: all ? used / all : 0, tokensPerS }];
  means.value = steps;
  grown.value = grownOf(found);
  before = state.value = found;
}

function grownOf(found: SystemState): Record<string, Load> {
  const earlier = new Map((before?.services ?? []).flatMap(({ replicas }) => replicas.map((one) => [one.id, one.load])));
  const since: Record<string, Load> = {};
  for (const { id, load } of found.services.flatMap(({ replicas }) => replicas)) {
    if (!load) continue;
    const last = earlier.get(id);
    const more = Object.fromEntries(Object.entries(load).map(([name, value]) => [name, value - (last?.[name] ?? 0)]));
    const worked = more.items || more.prompts;
    since[id] = worked ? more : (grown.value[id] ?? more); // while it rests the figures of its last work stay
  }
  return since;
}

function meansOf(decoder: DecoderState, last: DecoderState | null): StepMeans | null {
  const { steps } = decoder;
  const since = last?.steps;
  const count = steps.steps - (since?.steps ?? 0);
  if (count <= 0) return null;
  const mean = (name: "step_us" | "forward_us" | "plan_us") => (steps[name] - (since?.[name] ?? 0)) / count / 1000;
  return { step: mean("step_us"), forward: mean("forward_us"), plan: mean("plan_us") };
}

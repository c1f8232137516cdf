// What this page knows of its server: models, limits, kinds of media.
import { computed, signal } from "@preact/signals";
import { sentence } from "../api/failure";
import { json } from "../api/http";
import type { ModelCard, SystemState } from "../api/types";
import { withKey } from "./key";
import { settings } from "./settings";

export const models = signal<ModelCard[]>([]);
export const trouble = signal(""); // why the models are not known
const system = signal<SystemState | null>(null);

/** The model that questions go to. */
export const model = computed<ModelCard | undefined>(
  () => models.value.find((card) => card.id === settings.value.model) ?? models.value[0],
);
/** The name of that, once the server has told its models. Rejects when `until` is aborted before. */
export function modelName(until: AbortSignal): Promise<string> {
  return new Promise((found, failed) => {
    until.addEventListener("abort", () => failed(until.reason), { once: true });
    const leave = model.subscribe((card) => {
      if (!card) return;
      found(card.id);
      queueMicrotask(() => leave()); // it may be called before `subscribe` returns
    });
  });
}

/** Bytes of the largest request; the gateway's default until it is known. */
export const mostBytes = computed(() => system.value?.limits.max_body_bytes ?? 32 << 20);
/** Tokens of a prompt with its answer; 0 until that is known. */
export const mostTokens = computed(() => model.value?.max_model_len ?? 0);

export function takes(kind: "image" | "video"): boolean {
  return !system.value || system.value.takes.includes(kind);
}

/** Whether it is known to take videos. */
export const takesVideos = computed(() => system.value?.takes.includes("video") ?? false);

/** Asks until the server answers. */
export async function findServer(): Promise<void> {
  for (;;) {
    try {
      models.value = (await withKey(() => json<{ data: ModelCard[] }>("v1/models"))).data;
      trouble.value = "";
      break;
    } catch (error) {
      trouble.value = sentence(error);
      await new Promise((wake) => setTimeout(wake, 2000));
    }
  }
  try {
    system.value = await json<SystemState>("v1/system");
  } catch {
    // Redis is away, for instance: the defaults hold
  }
}

// The messages of a request, made of a branch of a conversation.
import { Failure } from "../api/failure";
import { bytes, t } from "../text/text";
import { mostBytes } from "./server";
import { fieldsOf, settings } from "./settings";
import { getMedia } from "./store";
import type { Attachment, Node } from "./types";

type Part = Record<string, unknown>;

export async function dataUrl(blob: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(reader.error ?? new Error("unreadable"));
    reader.readAsDataURL(blob);
  });
}

/** A picture or video as a part of a message. */
export async function mediaPart(kind: Attachment["kind"], type: string, blob: Blob): Promise<Part> {
  const url = await dataUrl(blob.type === type ? blob : new Blob([blob], { type }));
  return kind === "image" ? { type: "image_url", image_url: { url } } : { type: "video_url", video_url: { url } };
}

async function userMessage(node: Node): Promise<Part> {
  if (!node.attachments?.length) return { role: "user", content: node.text };
  const content: Part[] = [];
  for (const one of node.attachments) {
    const blob = await getMedia(one.id);
    if (!blob) throw new Failure("forgotten", t("mediaGone"));
    content.push(await mediaPart(one.kind, one.type, blob));
  }
  if (node.text) content.push({ type: "text", text: node.text });
  return { role: "user", content };
}

function assistantMessage(node: Node): Part {
  const message: Part = { role: "assistant", content: node.text || (node.calls?.length ? null : "") };
  if (node.calls?.length) {
    message["tool_calls"] = node.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return message;
}

function systemMessages(): Part[] {
  const text = settings.value.system.trim();
  return text ? [{ role: "system", content: text }] : [];
}

/** The body of a request for the answer behind `path`. Throws Failure for what cannot be sent. */
export async function bodyOf(path: readonly Node[], model: string): Promise<string> {
  const messages = systemMessages();
  for (const node of path) {
    if (node.role === "user") messages.push(await userMessage(node));
    else if (node.role === "tool") {
      for (const result of node.results ?? []) {
        messages.push({ role: "tool", tool_call_id: result.callId, content: result.text });
      }
    } else if (node.text || node.calls?.length) messages.push(assistantMessage(node));
  }
  let fields: Record<string, unknown>;
  try {
    fields = fieldsOf(settings.value);
  } catch {
    throw new Failure("refused", t("settingsWrong"));
  }
  const body = JSON.stringify({ model, messages, stream: true, stream_options: { include_usage: true }, ...fields });
  const size = new Blob([body]).size;
  if (size > mostBytes.value) {
    throw new Failure("large", t("bodyTooLarge", { size: bytes(size), most: bytes(mostBytes.value) }));
  }
  return body;
}

/** The words of a branch, for counting their tokens: media are counted by themselves. */
export function wordsOf(path: readonly Node[], question: string): Part[] {
  const turns = path
    .filter((node) => node.role !== "tool")
    .map((node) => ({ role: node.role, content: node.text }));
  return [...systemMessages(), ...turns, { role: "user", content: question }];
}

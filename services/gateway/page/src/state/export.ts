// Conversations as files.
import { t } from "../text/text";
import { latest } from "./chat";
import { dataUrl } from "./messages";
import { getMedia, mediaOf } from "./store";
import { shownPath } from "./tree";
import type { Conversation, Node } from "./types";

export function exportMarkdown(kept: Conversation): void {
  const now = latest(kept);
  const turns = shownPath(now.nodes, now.choice).map(turn);
  save(`# ${now.title}\n\n${turns.join("\n\n")}\n`, now.title, "md", "text/markdown");
}

function turn(node: Node): string {
  const files = (node.attachments ?? []).map((one) => `*[${one.name}]*\n\n`).join("");
  const calls = (node.calls ?? []).map((one) => `\n\n\`\`\`json\n${one.name}(${one.arguments})\n\`\`\``).join("");
  const results = (node.results ?? []).map((one) => one.text).join("\n\n");
  const who = node.role === "user" ? t("you") : node.role === "tool" ? t("toolResult", { name: "" }) : t("assistant");
  return `## ${who.trim()}\n\n${files}${node.text}${results}${calls}`;
}

/** With all branches, and media as data URLs. */
export async function exportJson(kept: Conversation): Promise<void> {
  const now = latest(kept);
  const media: Record<string, string> = {};
  for (const id of mediaOf(now)) {
    const blob = await getMedia(id);
    if (blob) media[id] = await dataUrl(blob);
  }
  save(JSON.stringify({ ...now, media }, null, 1), now.title, "json", "application/json");
}

function save(text: string, title: string, suffix: string, type: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = `${title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "conversation"}.${suffix}`;
  link.click();
  window.setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

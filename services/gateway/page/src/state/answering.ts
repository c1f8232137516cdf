// Asks, and takes in what comes: the one place that changes nodes of answers.
import { signal, type Signal } from "@preact/signals";
import { follow, type Place } from "../api/answer";
import { Failure, sentence } from "../api/failure";
import { call, json } from "../api/http";
import type { CallDelta, Chunk, RequestState } from "../api/types";
import { t } from "../text/text";
import { add, ensureOpen, newId, path, save, titleOf, type Open } from "./chat";
import { bodyOf } from "./messages";
import { modelName } from "./server";
import type { Attachment, Figures, Node, ToolCall, ToolResult } from "./types";

const SHOW_MS = 40; // between two looks of the page at a growing text
const SAVE_MS = 1000;

const running = new Map<string, AbortController>();
/** Names of the nodes that are being written. */
export const writing = signal<ReadonlySet<string>>(new Set());
/** Of a node: that its connection is lost, or its server busy. */
export const notices = signal<Readonly<Record<string, string>>>({});

export function ask(text: string, attachments: Attachment[], parent: string | null): void {
  const open = ensureOpen(titleOf(text, attachments));
  const node: Omit<Node, "id" | "created"> = { parent, role: "user", text };
  if (attachments.length) node.attachments = attachments;
  answer(open, add(open, node).value.id);
}

export function answer(open: Open, parent: string): void {
  const node = add(open, { parent, role: "assistant", text: "", status: "running" });
  void save(open);
  void run(open, node, async (until) => {
    const name = await modelName(until); // a question may be quicker than the list of models
    node.value = { ...node.value, model: name };
    return bodyOf(path(open, parent), name);
  });
}

export function sendResults(open: Open, parent: string, results: ToolResult[]): void {
  answer(open, add(open, { parent, role: "tool", text: "", results }).value.id);
}

/** Follows answers that were being written when the page was left. */
export function goOn(open: Open): void {
  for (const node of open.nodes.value.values()) {
    const { status, id, requestId } = node.value;
    if (status !== "running" || running.has(id)) continue;
    if (requestId) void run(open, node, null);
    else node.value = { ...node.value, status: "stopped" };
  }
}

export function stop(id: string): void {
  running.get(id)?.abort();
}

export function stopAll(): boolean {
  const any = running.size > 0;
  for (const control of running.values()) control.abort();
  return any;
}

async function run(open: Open, node: Signal<Node>, makeBody: ((until: AbortSignal) => Promise<string>) | null): Promise<void> {
  const control = new AbortController();
  const { id } = node.value;
  running.set(id, control);
  writing.value = new Set(running.keys());
  const writer = new Writer(open, node, makeBody === null);
  const place: Place = { key: newId(), requestId: node.value.requestId ?? "", eventId: "" };
  try {
    await follow(makeBody && (await makeBody(control.signal)), place, writer, control.signal);
    writer.end({ status: "done" });
  } catch (error) {
    if (control.signal.aborted) {
      writer.end({ status: "stopped" });
      if (place.requestId) call(`v1/requests/${place.requestId}`, { method: "DELETE" }).catch(() => undefined);
    } else {
      const lost = makeBody === null && error instanceof Failure && error.status === 404;
      writer.end({ status: "failed", error: lost ? t("goneTimeline") : sentence(error) });
    }
  }
  running.delete(id);
  writing.value = new Set(running.keys());
  await save(open);
  if (place.requestId && node.value.status === "done") {
    await writer.askForTimes(place.requestId);
    await save(open);
  }
}

/** What has come of one answer, shown and kept from time to time. */
class Writer {
  private text: string;
  private reasoning: string;
  private calls: ToolCall[];
  private finish = "";
  private readonly figures: Figures = {};
  private readonly began = performance.now();
  private timer = 0;
  private savedAt = performance.now();

  constructor(
    private readonly open: Open,
    private readonly node: Signal<Node>,
    afresh: boolean,
  ) {
    // A stream that is followed from elsewhere comes from its beginning.
    this.text = afresh ? "" : node.value.text;
    this.reasoning = "";
    this.calls = [];
  }

  accepted(requestId: string): void {
    this.node.value = { ...this.node.value, requestId };
    void save(this.open);
  }

  chunk(chunk: Chunk): void {
    if (chunk.usage) this.figures.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
    if (content || thought || calls) this.figures.firstMs ??= performance.now() - this.began;
    this.text += content ?? "";
    this.reasoning += thought ?? "";
    for (const delta of calls ?? []) this.takeCall(delta);
    this.finish = choice.finish_reason ?? this.finish;
    this.timer ||= window.setTimeout(() => this.show(), SHOW_MS);
  }

  waiting(failure: Failure, ms: number): void {
    const text =
      failure.kind === "busy" && failure.code !== "shutting_down"
        ? t("busyWait", { why: failure.message, s: Math.ceil(ms / 1000) })
        : t("reconnecting");
    notices.value = { ...notices.value, [this.node.value.id]: text };
  }

  resumed(): void {
    this.clearNotice();
    if (this.text || this.reasoning || this.calls.length) {
      this.node.value = { ...this.node.value, resumed: (this.node.value.resumed ?? 0) + 1 };
    }
  }

  end(part: Partial<Node>): void {
    this.figures.totalMs = performance.now() - this.began;
    this.show();
    this.clearNotice();
    this.node.value = { ...this.node.value, ...part, finish: this.finish, figures: this.figures };
  }

  /** The server's own clock: how long it waited, was computed, was written. */
  async askForTimes(requestId: string): Promise<void> {
    try {
      const state = await json<RequestState>(`v1/requests/${requestId}`);
      const { arrived_ms: arrived, taken_ms: taken, first_token_ms: first, ended_ms: ended } = state.timeline;
      const figures: Figures = { ...this.figures, attempts: state.attempts, exact: state.exact };
      if (taken) figures.waitMs = taken - arrived;
      if (taken && first) figures.prefillMs = first - taken;
      if (first && ended) figures.decodeMs = ended - first;
      this.node.value = { ...this.node.value, figures };
    } catch {
      // the answer is whole without them
    }
  }

  private takeCall(delta: CallDelta): void {
    const known = this.calls[delta.index] ?? { id: "", name: "", arguments: "" };
    const calls = [...this.calls];
    calls[delta.index] = {
      id: delta.id ?? known.id,
      name: delta.function?.name ?? known.name,
      arguments: known.arguments + (delta.function?.arguments ?? ""),
    };
    this.calls = calls;
  }

  private show(): void {
    window.clearTimeout(this.timer);
    this.timer = 0;
    const next: Node = { ...this.node.value, text: this.text };
    if (this.reasoning) next.reasoning = this.reasoning;
    if (this.calls.length) next.calls = this.calls;
    this.node.value = next;
    if (performance.now() - this.savedAt > SAVE_MS) {
      this.savedAt = performance.now();
      void save(this.open);
    }
  }

  private clearNotice(): void {
    const { [this.node.value.id]: _, ...others } = notices.value;
    notices.value = others;
  }
}

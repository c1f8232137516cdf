// Files that were chosen for the next question, while they are read, previewed and counted.
import { signal } from "@preact/signals";
import { Failure } from "../api/failure";
import { post } from "../api/http";
import { newId } from "../state/chat";
import { mediaPart } from "../state/messages";
import { mostBytes, takes } from "../state/server";
import { putMedia } from "../state/store";
import type { Attachment } from "../state/types";
import { bytes, t } from "../text/text";
import { kindOf } from "./kinds";

const TEXT_BYTES = 200_000;
const OVERHEAD = 64 << 10; // of a request beside a file
const PLACE = /^messages\[0\]\.content\[0\]\S*: /; // where the server found a fault: in this very file
const COUNTED_BYTES = 8 << 20; // what is larger is no longer counted once it is sent itself

export interface Pending {
  id: string;
  name: string;
  size: number;
  url: string;
  attachment: Attachment | null; // null while it is read
}

/** The files of one composer. */
export class Files {
  readonly list = signal<Pending[]>([]);
  readonly refusals = signal<string[]>([]);
  private reading = new Map<string, Promise<void>>();
  private counting = new Map<string, AbortController>(); // of large files

  /** `putText` gets the words of a text file. */
  constructor(private readonly putText: (text: string) => void) {}

  add(files: Iterable<File>): void {
    this.refusals.value = [];
    for (const file of files) {
      const id = newId();
      this.list.value = [...this.list.value, { id, name: file.name || "picture", size: file.size, url: "", attachment: null }];
      const work = this.read(id, file)
        .catch((error: unknown) => this.refuse(id, t("fileUnreadable", { name: file.name, why: String(error) })))
        .finally(() => this.reading.delete(id));
      this.reading.set(id, work);
    }
  }

  /** Takes attachments of an earlier question. */
  async restore(attachments: readonly Attachment[], load: (id: string) => Promise<Blob | undefined>): Promise<void> {
    for (const one of attachments) {
      const blob = await load(one.id);
      if (!blob) continue;
      const pending = { id: one.id, name: one.name, size: one.size, url: URL.createObjectURL(blob), attachment: one };
      this.list.value = [...this.list.value, pending];
    }
  }

  remove(id: string): void {
    this.counting.get(id)?.abort();
    const found = this.list.value.find((one) => one.id === id);
    if (found?.url) URL.revokeObjectURL(found.url);
    this.list.value = this.list.value.filter((one) => one.id !== id);
  }

  /** All of them once each is read; the list is empty then. */
  async take(): Promise<Attachment[]> {
    await Promise.all(this.reading.values());
    const taken = this.list.value.flatMap((one) => (one.attachment ? [one.attachment] : []));
    for (const control of this.counting.values()) control.abort();
    for (const one of this.list.value) if (one.url) URL.revokeObjectURL(one.url);
    this.list.value = [];
    return taken;
  }

  get isReading(): boolean {
    return this.list.value.some((one) => !one.attachment);
  }

  private refuse(id: string, why: string): void {
    this.remove(id);
    this.refusals.value = [...this.refusals.value, why];
  }

  private async read(id: string, file: File): Promise<void> {
    const name = file.name || "picture";
    const found = await kindOf(file);
    if (found.kind === "svg") return this.refuse(id, t("noSvg", { name }));
    if (found.kind === "other") return this.refuse(id, t("noKind", { name }));
    if (!file.size) return this.refuse(id, t("fileEmpty", { name }));
    if (found.kind === "text") return this.readText(id, file);
    if (!takes(found.kind)) {
      return this.refuse(id, t("notTaken", { name, kind: t(found.kind === "image" ? "pictures" : "videos") }));
    }
    const most = mostBytes.value;
    if (Math.ceil(file.size / 3) * 4 + OVERHEAD > most) {
      return this.refuse(id, t("fileTooLarge", { name, size: bytes(file.size), most: bytes(most) }));
    }
    const blob = new Blob([await file.arrayBuffer()], { type: found.type }); // the file may change
    await putMedia(id, blob);
    const attachment: Attachment = { id, kind: found.kind, name, type: found.type, size: blob.size };
    this.update(id, { url: URL.createObjectURL(blob), attachment });
    void this.count(id, attachment, blob);
  }

  private async readText(id: string, file: File): Promise<void> {
    if (file.size > TEXT_BYTES) {
      const size = { size: bytes(file.size), most: bytes(TEXT_BYTES) };
      return this.refuse(id, t("textTooLong", { name: file.name, ...size }));
    }
    const text = await file.text();
    this.remove(id);
    const fence = "`".repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length + 1)));
    this.putText(`${file.name}:\n${fence}\n${text.trimEnd()}\n${fence}\n`);
  }

  /** What it costs: the prompt with it, less the prompt without. What the server refuses is not kept. */
  private async count(id: string, attachment: Attachment, blob: Blob): Promise<void> {
    const control = new AbortController();
    if (blob.size > COUNTED_BYTES) this.counting.set(id, control);
    try {
      const part = await mediaPart(attachment.kind, attachment.type, blob);
      const [with_, without] = await Promise.all([countTokens([part], control.signal), countTokens("", control.signal)]);
      attachment.tokens = with_ - without;
      this.update(id, {});
    } catch (error) {
      // For any other reason it is sent without that figure.
      const refused = error instanceof Failure && error.status === 400;
      if (refused && this.list.value.some((one) => one.id === id)) {
        this.refuse(id, `${attachment.name}: ${error.message.replace(PLACE, "")}`);
      }
    } finally {
      this.counting.delete(id);
    }
  }

  private update(id: string, part: Partial<Pending>): void {
    this.list.value = this.list.value.map((one) => (one.id === id ? { ...one, ...part } : one));
  }
}

async function countTokens(content: unknown, signal: AbortSignal): Promise<number> {
  return countPrompt([{ role: "user", content }], signal);
}

/** The tokens of a prompt. */
export async function countPrompt(messages: unknown[], signal: AbortSignal): Promise<number> {
  return (await post<{ count: number }>("tokenize", { messages }, signal)).count;
}

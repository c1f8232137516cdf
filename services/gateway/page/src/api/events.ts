// Server-sent events, read from a response.

export interface ServerEvent {
  id: string;
  data: string;
}

/** Nothing came for longer than a gateway is ever silent. */
export class Silence extends Error {}

/** The whole events of a stream, until it ends. Throws Silence, or what the network throws. */
export async function* eventsOf(body: ReadableStream<Uint8Array>, silenceMs: number): AsyncGenerator<ServerEvent> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await withinTime(reader.read(), silenceMs);
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const parts = rest.split(/\r?\n\r?\n/);
      rest = parts.pop() ?? "";
      for (const part of parts) {
        const event = read(part);
        if (event) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

function read(part: string): ServerEvent | null {
  let id = "";
  const data: string[] = [];
  for (const line of part.split(/\r?\n/)) {
    const [, name, value] = /^([^:]*):? ?(.*)$/s.exec(line) ?? [];
    if (name === "id") id = value ?? "";
    if (name === "data") data.push(value ?? "");
  }
  return data.length ? { id, data: data.join("\n") } : null;
}

async function withinTime<T>(work: Promise<T>, ms: number): Promise<T> {
  let timer = 0;
  const late = new Promise<never>((_, reject) => {
    timer = window.setTimeout(() => reject(new Silence()), ms);
  });
  try {
    return await Promise.race([work, late]);
  } finally {
    window.clearTimeout(timer);
  }
}

// What may go wrong between the page and the server, each with a sentence for people.
import { t } from "../text/text";

export type Kind = "key" | "gone" | "proxy" | "busy" | "refused" | "large" | "forgotten";

export class Failure extends Error {
  constructor(
    readonly kind: Kind,
    message: string,
    readonly status = 0,
    readonly code = "",
    readonly retryAfterS = 0,
  ) {
    super(message);
  }

  /** Whether the same request may succeed in a moment. */
  get passes(): boolean {
    return this.kind === "gone" || this.kind === "busy" || (this.kind === "proxy" && this.status >= 500);
  }
}

/** The failure that an error event or body in OpenAI's form tells of. */
export function told(error: { message?: string; code?: string | null }, status = 0, retryAfterS = 0): Failure {
  const message = error.message || t("unknownError");
  const code = error.code ?? "";
  const kind = status === 401 ? "key" : status === 429 || status === 503 || code === "shutting_down" ? "busy" : "refused";
  return new Failure(kind, message, status, code, retryAfterS);
}

/** The failure that a response with an error status is. Whatever its body is, the sentence is one for people. */
export async function failureOf(response: Response): Promise<Failure> {
  const wait = Number(response.headers.get("retry-after")) || 0;
  const text = await response.text().catch(() => "");
  try {
    const body = JSON.parse(text) as { error?: { message?: string; code?: string } };
    if (body.error?.message) return told(body.error, response.status, wait);
  } catch {
    // no JSON: a proxy's page, for instance
  }
  return notOurs(response);
}

/** The failure that a response is which no gateway of Tessera has made. */
export function notOurs(response: Response): Failure {
  const status = `${response.status} ${response.statusText}`.trim();
  return new Failure("proxy", t("proxyError", { status }), response.status);
}

export function gone(): Failure {
  return new Failure("gone", t("serverGone"));
}

/** The sentence for whatever was thrown. */
export function sentence(error: unknown): string {
  if (error instanceof Failure) return error.kind === "key" ? t("wrongKey") : error.message;
  if (error instanceof TypeError) return t("serverGone");
  return error instanceof Error ? error.message : String(error);
}

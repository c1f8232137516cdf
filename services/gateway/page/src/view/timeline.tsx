import { useEffect, useState } from "preact/hooks";
import { sentence } from "../api/failure";
import { isMissing, json } from "../api/http";
import { duration, t } from "../text/text";

interface Span {
  name: string;
  service: string;
  replica: string;
  start_ms: number;
  duration_ms: number;
}

interface Told {
  duration_ms: number;
  spans: Span[];
  parts?: Record<string, number>;
  notes?: string[];
  text?: string;
}

const MOST = 80; // rows
const SERVICES = ["gateway", "preprocess", "vision_encoder", "queue", "scheduler", "decoder"];

/** What the server has kept of the request's way, where it keeps any. */
export function ServerTimeline({ requestId }: { requestId: string }) {
  const [trouble, setTrouble] = useState("");
  const [told, setTold] = useState<Told | null>(null);
  useEffect(() => {
    json<Told>(`v1/requests/${requestId}/timeline`).then(setTold, async (error: unknown) => {
      if (!isMissing(error)) return setTrouble(sentence(error));
      // Either the server has none, or it no longer knows the request.
      const known = await json(`v1/requests/${requestId}`).then(() => true, () => false);
      setTrouble(t(known ? "noTimeline" : "goneTimeline"));
    });
  }, [requestId]);
  if (!told) return trouble ? <p class="quiet">{trouble}</p> : null;
  return (
    <section class="timeline">
      <h3>{t("timeline")}</h3>
      {told.text && <p class="quiet" lang="en">{told.text}</p>}
      <Spans told={told} />
      {told.notes?.map((note) => <p class="quiet" lang="en" key={note}>{note}</p>)}
    </section>
  );
}

function Spans({ told }: { told: Told }) {
  const { spans } = told;
  const whole = Math.max(told.duration_ms, ...spans.map((span) => span.start_ms + span.duration_ms), 0.001);
  return (
    <ol>
      {spans.slice(0, MOST).map((span, index) => (
        <li key={index} title={[span.service, span.replica].filter(Boolean).join(" ")}>
          <span class="span-name">
            {span.name}
            <i>{span.service}</i>
          </span>
          <span class="track" aria-hidden="true">
            <span
              class={`bar service-${Math.max(0, SERVICES.indexOf(span.service))}`}
              style={{ left: `${(100 * span.start_ms) / whole}%`, width: `${(100 * span.duration_ms) / whole}%` }}
            />
          </span>
          <b>{duration(span.duration_ms)}</b>
        </li>
      ))}
      {spans.length > MOST && <li>… {spans.length - MOST}</li>}
    </ol>
  );
}

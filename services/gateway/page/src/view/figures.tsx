import { useState } from "preact/hooks";
import type { Figures, Node } from "../state/types";
import { duration, number, t } from "../text/text";
import { Dialog } from "./dialog";
import { ServerTimeline } from "./timeline";

const FEWEST = 8; // tokens whose rate says something

function rateOf({ usage, firstMs, totalMs, decodeMs }: Figures): number | null {
  const tokens = (usage?.completion_tokens ?? 0) - 1;
  if (tokens < FEWEST) return null;
  const ms = decodeMs ?? (totalMs !== undefined && firstMs !== undefined ? totalMs - firstMs : 0);
  return ms > 0 ? tokens / (ms / 1000) : null;
}

/** A line of figures under an answer; a click opens all of them. */
export function FiguresRow({ node }: { node: Node }) {
  const [opened, setOpened] = useState(false);
  const figures = node.figures;
  if (!figures?.usage) return null;
  const { usage, firstMs } = figures;
  const rate = rateOf(figures);
  const cached = usage.prompt_tokens_details?.cached_tokens;
  const parts = [t("figTokens", { n: number(usage.completion_tokens) })];
  if (rate !== null) parts.push(t("figRate", { n: rate.toFixed(rate < 10 ? 1 : 0) }));
  if (firstMs !== undefined) parts.push(t("figFirst", { ms: duration(firstMs) }));
  if (cached) parts.push(t("figCached", { n: number(cached) }));
  return (
    <>
      <button type="button" class="figures" aria-label={`${t("figures")}: ${parts.join(", ")}`} onClick={() => setOpened(true)}>
        {parts.join(" · ")}
      </button>
      {opened && <FiguresDialog node={node} figures={figures} onClose={() => setOpened(false)} />}
    </>
  );
}

function FiguresDialog({ node, figures, onClose }: { node: Node; figures: Figures; onClose: () => void }) {
  const { usage } = figures;
  const rate = rateOf(figures);
  const rows: [string, string | undefined][] = [
    [t("promptCount"), usage && number(usage.prompt_tokens)],
    [t("cachedCount"), figureOf(usage?.prompt_tokens_details?.cached_tokens)],
    [t("answerCount"), usage && number(usage.completion_tokens)],
    [t("reasoningCount"), figureOf(usage?.completion_tokens_details?.reasoning_tokens)],
    [t("rate"), rate === null ? undefined : rate.toFixed(1)],
    [t("firstToken"), timeOf(figures.firstMs)],
    [t("totalTime"), timeOf(figures.totalMs)],
    [t("attemptCount"), figureOf(figures.attempts)],
    [t("exactText"), figures.exact === undefined ? undefined : t(figures.exact ? "yes" : "no")],
    [t("model"), node.model],
    [t("requestName"), node.requestId],
  ];
  return (
    <Dialog title={t("figures")} onClose={onClose} kind="wide">
      <Spans figures={figures} />
      <dl class="table-list">
        {rows
          .filter(([, value]) => value !== undefined)
          .map(([name, value]) => (
            <div key={name}>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </div>
          ))}
      </dl>
      {node.requestId && <ServerTimeline requestId={node.requestId} />}
    </Dialog>
  );
}

const figureOf = (value: number | undefined) => (value === undefined ? undefined : number(value));
const timeOf = (value: number | undefined) => (value === undefined ? undefined : duration(value));

/** Queue, prefill and writing as parts of one bar, by the server's clock. */
function Spans({ figures }: { figures: Figures }) {
  const all: [string, string, number | undefined][] = [
    ["wait", t("queueTime"), figures.waitMs],
    ["prefill", t("prefillTime"), figures.prefillMs],
    ["decode", t("decodeTime"), figures.decodeMs],
  ];
  const spans = all.filter((span): span is [string, string, number] => span[2] !== undefined);
  if (!spans.length) return null;
  return (
    <div class="spans">
      <div class="span-bar" aria-hidden="true">
        {spans.map(([kind, , ms]) => (
          <span key={kind} class={`span-${kind}`} style={{ flexGrow: Math.max(ms, 1) }} />
        ))}
      </div>
      <ul>
        {spans.map(([kind, name, ms]) => (
          <li key={kind}>
            <span class={`dot span-${kind}`} aria-hidden="true" />
            {name} <b>{duration(ms)}</b>
          </li>
        ))}
      </ul>
    </div>
  );
}

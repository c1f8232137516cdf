// The services that requests pass before a decoder, one card for each of their replicas.
import type { Load, Replica, SystemState } from "../api/types";
import { number, t } from "../text/text";
import { Row, shortAddress } from "./parts";
import { grown } from "./watch";

type Figure = (name: string) => number;
type Rows = (now: Figure, lately: Figure) => [string, string][];

const ROWS: Record<string, Rows> = {
  preprocess: (now, lately) => [
    [t("sysRunning"), number(now("running"))],
    [t("sysWaitingItems"), number(now("waiting_items"))],
    [t("sysTokenize"), mean(lately("tokenize_us"), lately("prompts"))],
    [t("sysMedia"), mean(lately("fetch_us") + lately("media_us"), lately("cache_queries"))],
    [t("sysCache"), hits(now)],
    [t("sysFailures"), number(now("failures"))],
  ],
  vision_encoder: (now, lately) => [
    [t("sysRunning"), number(now("running"))],
    [t("sysWaiting"), number(now("waiting"))],
    [t("sysQueueTime"), mean(lately("wait_us"), lately("items"))],
    [t("sysBatch"), lately("batches") ? t("sysBatchOf", { n: (lately("items") / lately("batches")).toFixed(1) }) : "–"],
    [t("sysTower"), mean(lately("compute_us"), lately("batches"))],
    [t("sysCache"), hits(now)],
    [t("sysFailures"), number(now("failures"))],
  ],
};

const figureOf = (load: Load): Figure => (name) => load[name] ?? 0;

function mean(us: number, count: number): string {
  return count ? `${(us / count / 1000).toFixed(1)} ms` : "–";
}

function hits(now: Figure): string {
  const asked = now("cache_queries");
  return asked ? t("sysHitsOf", { n: Math.round((100 * now("cache_hits")) / asked) }) : "–";
}

/** What preprocess and vision encoders do. */
export function Services({ state, names }: { state: SystemState; names: Readonly<Record<string, string>> }) {
  const shown = state.services.flatMap(({ service, replicas }) => (service in ROWS ? replicas.map((one) => ({ service, one })) : []));
  if (!shown.length) return null;
  return (
    <section>
      <h2>{t("sysPreparing")}</h2>
      <div class="decoders">
        {shown.map(({ service, one }) => (
          <Service key={one.id} service={service} name={names[service] ?? service} one={one} />
        ))}
      </div>
    </section>
  );
}

function titleOf(name: string, address: string): string {
  const short = shortAddress(address);
  return short === address ? `${name} ${address}` : short;
}

function Service({ service, name, one }: { service: string; name: string; one: Replica }) {
  const { load } = one;
  const rows = load && ROWS[service]?.(figureOf(load), figureOf(grown.value[one.id] ?? load));
  return (
    <article class="card decoder" data-service={service}>
      <h3 title={one.id}>
        {titleOf(name, one.address)}
      </h3>
      {rows && (
        <dl class="table-list">
          {rows.map(([what, value]) => (
            <Row key={what} name={what} value={value} />
          ))}
        </dl>
      )}
    </article>
  );
}

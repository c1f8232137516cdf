import type { DecoderState, SystemState } from "../api/types";
import { Logo } from "../view/icons";
import { number, t } from "../text/text";
import { Curve } from "./curve";
import { Errors } from "./errors";
import { Row, shortAddress } from "./parts";
import { Services } from "./services";
import { heardAt, means, now, points, state, trouble } from "./watch";

const SERVICES: Record<string, string> = {
  gateway: "gateway",
  preprocess: "preprocess",
  vision_encoder: "vision encoder",
  scheduler: "scheduler",
  decoder: "decoder",
};

export function SystemView() {
  const found = state.value;
  return (
    <div class="system">
      <header class="system-head">
        <a class="brand" href="./" aria-label={`Tessera: ${t("chat")}`}>
          <Logo />
          <span>Tessera</span>
        </a>
        <h1>{t("sysTitle")}</h1>
        <Liveness found={found} />
      </header>
      <main>
        {trouble.value && (
          <p class="warning box" role="alert">
            {trouble.value}
          </p>
        )}
        {found && <Content found={found} />}
      </main>
    </div>
  );
}

function Liveness({ found }: { found: SystemState | null }) {
  if (!found) return null;
  if (trouble.value) {
    return <span class="badge bad">{t("sysLost", { s: Math.round((now.value - heardAt.value) / 1000) })}</span>;
  }
  const ready = !found.missing.length;
  return (
    <span class="liveness">
      <span class={ready ? "badge good" : "badge bad"}>{t(ready ? "sysReady" : "sysNotReady")}</span>
      <span class="quiet">
        {found.model} · {found.version}
      </span>
    </span>
  );
}

function Content({ found }: { found: SystemState }) {
  const all = points.value;
  const last = all.at(-1)!;
  return (
    <>
      {found.missing.map((why) => (
        <p class="warning box" key={why}>
          {why}
        </p>
      ))}
      <section class="cards" aria-label={t("sysServices")}>
        {found.services
          .filter(({ service, replicas }) => service !== "vision_encoder" || replicas.length || found.takes.length)
          .map(({ service, replicas }) => (
            <article class="card" key={service}>
              <h2>
                <span class={replicas.length ? "light good" : "light bad"} aria-hidden="true" />
                {SERVICES[service] ?? service}
                <b>{replicas.length}</b>
              </h2>
              {replicas.length ? (
                <ul>
                  {replicas.map((one) => (
                    <li key={one.id} title={[one.id, one.numerics].filter(Boolean).join(" · ")}>
                      {shortAddress(one.address)}
                      {one.load?.open_answers ? ` · ${t("sysOpen", { n: one.load.open_answers })}` : ""}
                    </li>
                  ))}
                </ul>
              ) : (
                <p class="warning">{t("sysNone")}</p>
              )}
            </article>
          ))}
      </section>
      <section class="curves">
        <Curve title={t("sysLoad")} values={all.map((p) => p.running)} over={all.map((p) => p.waiting)} shown={`${last.running} ${t("sysRunning")} · ${last.waiting} ${t("sysWaiting")}`} />
        <Curve title={t("sysKv")} values={all.map((p) => p.kv)} most={1} shown={`${(100 * last.kv).toFixed(1)} %`} />
        <Curve title={t("sysTokens")} values={all.map((p) => p.tokensPerS)} shown={number(Math.round(last.tokensPerS))} />
      </section>
      <section>
        <h2>{t("sysDecoders")}</h2>
        {found.decoders.length ? (
          <div class="decoders">
            {found.decoders.map((one) => (
              <Decoder key={one.id} one={one} />
            ))}
          </div>
        ) : (
          <p class="quiet">{t("sysNone")}</p>
        )}
      </section>
      <Services state={found} names={SERVICES} />
      <Errors found={found} />
    </>
  );
}

function Decoder({ one }: { one: DecoderState }) {
  const used = one.kv_blocks_total ? one.kv_blocks_used / one.kv_blocks_total : 0;
  const mean = means.value[one.id];
  const hits = one.prefix_queries ? Math.round((100 * one.prefix_hits) / one.prefix_queries) : null;
  return (
    <article class="card decoder">
      <h3 title={one.id}>{shortAddress(one.address)}</h3>
      <div class="meter" role="meter" aria-label={t("sysKv")} aria-valuenow={one.kv_blocks_used} aria-valuemin={0} aria-valuemax={one.kv_blocks_total}>
        <span style={{ width: `${100 * used}%` }} />
      </div>
      <p class="quiet">{t("sysKvOf", { used: number(one.kv_blocks_used), all: number(one.kv_blocks_total) })}</p>
      <dl class="table-list">
        <Row name={t("sysRunning")} value={number(one.running)} />
        <Row name={t("sysWaiting")} value={number(one.waiting)} />
        {one.waiting_for_media > 0 && <Row name={t("sysWaitingMedia")} value={number(one.waiting_for_media)} />}
        <Row name={t("sysStep")} value={mean ? `${mean.step.toFixed(1)} ms` : t("sysIdle")} />
        {mean && <Row name={`– ${t("sysForward")}`} value={`${mean.forward.toFixed(1)} ms`} />}
        {mean && <Row name={`– ${t("sysPlan")}`} value={`${mean.plan.toFixed(2)} ms`} />}
        {hits !== null && <Row name={t("sysHits")} value={t("sysHitsOf", { n: hits })} />}
        {one.preemptions > 0 && <Row name={t("sysPreemptions")} value={number(one.preemptions)} />}
        {one.adapters.length > 0 && <Row name="LoRA" value={one.adapters.join(", ")} />}
      </dl>
    </article>
  );
}

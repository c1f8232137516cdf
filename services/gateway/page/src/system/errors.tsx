import type { SystemState } from "../api/types";
import { t } from "../text/text";
import { shortAddress } from "./parts";

const MOST = 20;

/** The latest errors of all gateways. */
export function Errors({ found }: { found: SystemState }) {
  const gateways = new Map(found.services.find(({ service }) => service === "gateway")?.replicas.map((one) => [one.id, shortAddress(one.address)]));
  return (
    <section>
      <h2>{t("sysErrors")}</h2>
      {found.errors.length ? (
        <div class="table" tabIndex={0}>
          <table>
            <thead>
              <tr>
                <th>{t("sysWhen")}</th>
                <th>{t("sysCode")}</th>
                <th>{t("sysGateway")}</th>
                <th>{t("sysWhere")}</th>
              </tr>
            </thead>
            <tbody>
              {found.errors.slice(0, MOST).map((error, index) => (
                <tr key={index}>
                  <td>{ago(found.now_unix_s - error.at_unix_s)}</td>
                  <td>
                    {error.status} <code>{error.code}</code>
                  </td>
                  <td title={error.gateway}>{gateways.get(error.gateway) ?? t("sysGone", { id: error.gateway.slice(0, 8) })}</td>
                  <td title={error.request_id}>{error.path || error.request_id}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : (
        <p class="quiet">{t("sysNoErrors")}</p>
      )}
    </section>
  );
}

function ago(seconds: number): string {
  if (seconds < 90) return t("secondsAgo", { n: Math.max(0, Math.round(seconds)) });
  if (seconds < 5400) return t("minutesAgo", { n: Math.round(seconds / 60) });
  return t("hoursAgo", { n: Math.round(seconds / 3600) });
}

import { asking, giveKey, hasKey } from "../state/key";
import { models, model } from "../state/server";
import { change, DEFAULTS, isJson, settings, type Settings } from "../state/settings";
import type { Texts } from "../text/en";
import { t } from "../text/text";
import { Dialog } from "./dialog";

type Numeric = "maxTokens" | "temperature" | "topP" | "topK" | "minP" | "repetition" | "presence" | "frequency" | "seed";

const NUMBERS: { name: Numeric; min?: number; max?: number; step: string }[] = [
  { name: "maxTokens", min: 1, step: "1" },
  { name: "temperature", min: 0, max: 2, step: "0.1" },
  { name: "topP", min: 0, max: 1, step: "0.05" },
  { name: "topK", min: 0, step: "1" },
  { name: "minP", min: 0, max: 1, step: "0.01" },
  { name: "repetition", min: 0, max: 100, step: "0.05" },
  { name: "presence", min: -2, max: 2, step: "0.1" },
  { name: "frequency", min: -2, max: 2, step: "0.1" },
  { name: "seed", step: "1" },
];

function NumberField({ name, min, max, step }: (typeof NUMBERS)[number]) {
  return (
    <label class="field">
      {t(name)}
      <input
        type="number"
        min={min}
        max={max}
        step={step}
        placeholder={t("asModel")}
        value={settings.value[name]}
        onInput={(event) => change({ [name]: event.currentTarget.value })}
      />
    </label>
  );
}

function TextField({ name, rows, hint, json }: { name: keyof Settings & keyof Texts; rows: number; hint?: string; json?: "object" | "array" }) {
  const value = settings.value[name as keyof Settings];
  const wrong = json !== undefined && !isJson(value, json);
  return (
    <label class="field wide">
      {t(name)}
      <textarea
        rows={rows}
        spellcheck={json === undefined}
        class={json ? "mono" : ""}
        value={value}
        aria-invalid={wrong}
        onInput={(event) => change({ [name]: event.currentTarget.value })}
      />
      {hint && <span class="quiet">{hint}</span>}
      {wrong && <span class="warning">{t("notJson", { kind: t(json === "array" ? "array" : "object") })}</span>}
    </label>
  );
}

function Choice({ name, options }: { name: "theme" | "language"; options: [string, string][] }) {
  return (
    <label class="field">
      {t(name)}
      <select value={settings.value[name]} onChange={(event) => change({ [name]: event.currentTarget.value } as Partial<Settings>)}>
        {options.map(([value, text]) => (
          <option key={value} value={value}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

export function ModelChoice() {
  const cards = models.value;
  if (cards.length < 2) return <span class="model-name">{model.value?.id ?? "…"}</span>;
  return (
    <select class="model-name" aria-label={t("model")} value={model.value?.id} onChange={(event) => change({ model: event.currentTarget.value })}>
      {cards.map((card) => (
        <option key={card.id} value={card.id}>
          {card.parent ? t("adapter", { name: card.id }) : card.id}
        </option>
      ))}
    </select>
  );
}

export function SettingsDialog({ onClose }: { onClose: () => void }) {
  const reset = () => {
    const { theme, language, model: name, system } = settings.value;
    settings.value = { ...DEFAULTS, theme, language, model: name, system };
  };
  return (
    <Dialog title={t("settings")} onClose={onClose} kind="wide">
      <div class="settings">
        <section>
          <h3>{t("model")}</h3>
          <ModelChoice />
          <SystemPrompt />
        </section>
        <section>
          <h3>{t("sampling")}</h3>
          <div class="grid">
            {NUMBERS.map((one) => (
              <NumberField key={one.name} {...one} />
            ))}
          </div>
          <label class="field wide">
            {t("stopTexts")}
            <textarea rows={2} class="mono" value={settings.value.stop} onInput={(e) => change({ stop: e.currentTarget.value })} />
          </label>
        </section>
        <section>
          <h3>{t("structured")}</h3>
          <TextField name="schema" rows={4} json="object" />
          <TextField name="tools" rows={4} json="array" />
          <button type="button" onClick={reset}>
            {t("reset")}
          </button>
        </section>
        <section>
          <h3>{t("appearance")}</h3>
          <div class="grid">
            <Choice name="theme" options={[["auto", t("auto")], ["light", t("light")], ["dark", t("dark")]]} />
            <Choice name="language" options={[["auto", t("auto")], ["en", "English"], ["zh", "中文"]]} />
          </div>
        </section>
        <section>
          <h3>{t("apiKey")}</h3>
          <p class="quiet">{t("keyHint")}</p>
          <div class="actions start">
            <button type="button" onClick={() => (asking.value = true)}>
              {t("keyChange")}
            </button>
            {hasKey.value && (
              <button type="button" onClick={() => giveKey("", false)}>
                {t("keyForget")}
              </button>
            )}
          </div>
        </section>
      </div>
    </Dialog>
  );
}

function SystemPrompt() {
  return (
    <label class="field wide">
      {t("systemPrompt")}
      <textarea rows={3} value={settings.value.system} onInput={(e) => change({ system: e.currentTarget.value })} />
      <span class="quiet">{t("systemPromptHint")}</span>
    </label>
  );
}

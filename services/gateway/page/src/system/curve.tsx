const WIDTH = 300;
const HEIGHT = 72;
const MOST = 150;

function lineOf(values: readonly number[], most: number): string {
  const step = WIDTH / (MOST - 1);
  const from = WIDTH - (values.length - 1) * step;
  return values.map((value, at) => `${(from + at * step).toFixed(1)},${(HEIGHT - 2 - (value / most) * (HEIGHT - 6)).toFixed(1)}`).join(" ");
}

interface Props {
  title: string;
  shown: string;
  values: readonly number[];
  over?: readonly number[]; // drawn as a second line
  most?: number;
}

/** The last minutes of a figure. */
export function Curve({ title, shown, values, over, most }: Props) {
  const top = most ?? Math.max(1, ...values, ...(over ?? []));
  const line = lineOf(values, top);
  const first = line.split(",")[0];
  return (
    <figure class="card curve">
      <figcaption>
        <span>{title}</span>
        <b>{shown}</b>
      </figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
        <polygon points={`${first},${HEIGHT} ${line} ${WIDTH},${HEIGHT}`} />
        <polyline points={line} />
        {over && <polyline class="over" points={lineOf(over, top)} />}
      </svg>
    </figure>
  );
}

/** A figure in a card. */
export function Row({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

export function shortAddress(address: string): string {
  return address.replace(/^unix:.*\//, "unix:…/");
}

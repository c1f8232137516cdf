/** A figure in a card. */
export function Row({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

/** A socket's file says which replica it is; other addresses stay as they are. */
export function shortAddress(address: string): string {
  return address.replace(/^unix:.*\/(.+)\.sock$/, "$1");
}

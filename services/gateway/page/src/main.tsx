import { render } from "preact";
import { goOn } from "./state/answering";
import { loadList, show } from "./state/chat";
import { findServer } from "./state/server";
import { App } from "./view/app";
import "./style/base.css";
import "./style/chat.css";
import "./style/text.css";

async function open(): Promise<void> {
  const id = location.hash.slice(1);
  const found = id ? await show(id) : null;
  if (found) goOn(found); // answers that were being written when the page was left
}

render(<App />, document.getElementById("app")!);
void loadList();
void findServer().then(open);

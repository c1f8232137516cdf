import { render } from "preact";
import { KeyDialog } from "./view/key-dialog";
import { SystemView } from "./system/view";
import { watch } from "./system/watch";
import "./style/base.css";
import "./style/chat.css";
import "./style/system.css";

function Page() {
  return (
    <>
      <SystemView />
      <KeyDialog />
    </>
  );
}

render(<Page />, document.getElementById("app")!);
void watch();

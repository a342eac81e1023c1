/** On a narrow screen, the lists beside the conversation lie over it while they are open. */

import { by } from "./dom.js";

export function startNarrow() {
  const aside = by("aside");
  const show = open => {
    aside.classList.toggle("open", open);
    by("show-aside").ariaExpanded = String(open);
  };
  by("show-aside").addEventListener("click", () => { show(true); by("hide-aside").focus() });
  by("hide-aside").addEventListener("click", () => by("show-aside").focus());
  aside.addEventListener("keydown", ({ key }) => { if (key === "Escape") by("show-aside").focus() });
  const leave = ({ target }) => { if (!target.closest("#aside, dialog")) show(false) };
  addEventListener("focusin", leave);
  document.body.addEventListener("click", event => { if (event.target !== by("show-aside")) leave(event) });
}

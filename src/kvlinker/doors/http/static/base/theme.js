/** Light, dark, or as the system has it: kept by the browser where it is not the system's. */

import { by } from "./dom.js";

const KEPT = "theme";
const SIGNS = { system: "◐", light: "☀", dark: "☾" };

export function startTheme() {
  use(localStorage.getItem(KEPT));
  by("theme").addEventListener("click", () => {
    const names = Object.keys(SIGNS);
    use(names[(names.indexOf(by("theme").dataset.theme) + 1) % names.length]);
  });
}

function use(name) {
  const theme = SIGNS[name] ? name : "system";
  if (theme === "system") localStorage.removeItem(KEPT); else localStorage.setItem(KEPT, theme);
  document.documentElement.dataset.theme = theme;
  by("theme").dataset.theme = theme;
  by("theme").textContent = SIGNS[theme];
  by("theme").ariaLabel = by("theme").title = `Theme: ${theme}`;
}

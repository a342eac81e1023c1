/** Light, dark, or as the system has it: kept by the browser where it is not the system's. */

import { by } from "./dom.js";

const KEPT = "theme";
const SIGNS = { system: "◐", light: "☀", dark: "☾" };

export function startTheme() {
  use(kept());
  by("theme").addEventListener("click", () => {
    const names = Object.keys(SIGNS);
    use(names[(names.indexOf(by("theme").dataset.theme) + 1) % names.length]);
  });
}

function kept() {
  try {
    return localStorage.getItem(KEPT);
  } catch { // some browsers keep nothing for some pages
    return null;
  }
}

function keep(theme) {
  try {
    if (theme === "system") localStorage.removeItem(KEPT); else localStorage.setItem(KEPT, theme);
  } catch { /* then it ends with the page */ }
}

function use(name) {
  const theme = SIGNS[name] ? name : "system";
  keep(theme);
  document.documentElement.dataset.theme = theme;
  by("theme").dataset.theme = theme;
  by("theme").textContent = SIGNS[theme];
  by("theme").ariaLabel = by("theme").title = `Theme: ${theme}`;
}

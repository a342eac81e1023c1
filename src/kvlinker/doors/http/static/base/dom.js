/** Makes elements, and writes numbers. Texts become text nodes, never markup. */

export const by = id => document.getElementById(id);

/** Return an element with these properties, and children that are nodes or texts. */
export function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** Return a button that does something when it is pressed. */
export function button(words, action, properties = {}) {
  const made = make("button", { type: "button", ...properties }, words);
  made.addEventListener("click", action);
  return made;
}

export const number = value => value.toLocaleString("en");
export const percent = share => `${(100 * share).toFixed(1)}%`;
export const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
export const milliseconds = value => (value < 1000 ? `${value.toFixed(value < 10 ? 1 : 0)} ms` : `${(value / 1000).toFixed(2)} s`);

/** Return a number of bytes as `kvlinker ingest` writes it: in decimal units. */
export function bytes(value) {
  const power = value ? Math.min(4, Math.floor(Math.log10(value) / 3)) : 0;
  return `${(value / 1000 ** power).toFixed(power ? 1 : 0)} ${["B", "KB", "MB", "GB", "TB"][power]}`;
}

/** Return how long something will take, roughly. */
export function duration(seconds) {
  if (seconds < 60) return `${Math.max(1, Math.round(seconds))} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export const STATES = ["cached", "recomputed", "fresh"];

/** Return how many tokens of a prompt have each state, from an answer's usage; vLLM's own tells less. */
export function usedTokens(usage) {
  const { cached_tokens: cached = 0, recomputed_tokens: recomputed = 0 } = usage.prompt_tokens_details || {};
  return { cached, recomputed, fresh: usage.prompt_tokens - cached - recomputed };
}

/** Fill a bar with the shares of tokens by state. */
export function fillBar(bar, tokens) {
  const total = STATES.reduce((sum, state) => sum + tokens[state], 0);
  bar.replaceChildren(...STATES.map(state => {
    const part = make("i", { className: state });
    part.style.width = `${total ? (100 * tokens[state]) / total : 0}%`;
    return part;
  }));
  bar.role = "img";
  bar.ariaLabel = STATES.map(state => `${tokens[state]} ${state}`).join(", ");
}

/** Return a line of a legend for each state. */
export function legendOf(tokens) {
  return STATES.map(state => {
    const key = make("i", { className: `key ${state}` });
    return make("li", { className: "legend-entry" }, key, `${state} ${number(tokens[state])}`);
  });
}

/** Have the browser save a text as a file. */
export function save(name, content, type) {
  const link = make("a", { download: name, href: URL.createObjectURL(new Blob([content], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href));
}

/** Put a text into the clipboard, and tell so on the button that was pressed. */
export async function copy(content, pressed) {
  try {
    await navigator.clipboard.writeText(content);
  } catch { // only pages that came encrypted, or from this machine, have a clipboard
    const area = make("textarea", { value: content });
    (pressed.closest("dialog") || document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const words = pressed.textContent;
  pressed.textContent = "Copied";
  pressed.addEventListener("blur", () => { pressed.textContent = words }, { once: true });
  pressed.focus();
}

/** Tabs: each shows its panel, which several may share, and hides the others'; the arrow keys go through them. */

const panelOf = tab => document.getElementById(tab.getAttribute("aria-controls"));

/** Start the tabs in an element with the role `tablist`. */
export function startTabs(list) {
  const tabs = Array.from(list.querySelectorAll("[role=tab]"));
  const show = tab => {
    for (const each of tabs) {
      each.ariaSelected = String(each === tab);
      each.tabIndex = each === tab ? 0 : -1;
      panelOf(each).hidden = true;
    }
    panelOf(tab).hidden = false;
    panelOf(tab).setAttribute("aria-labelledby", tab.id);
    tab.dispatchEvent(new CustomEvent("shown", { bubbles: true, detail: tab.id }));
  };
  list.addEventListener("click", ({ target }) => { if (target.role === "tab") show(target) });
  list.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    next.focus();
    show(next);
  });
  return show;
}

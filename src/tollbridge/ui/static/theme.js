// Light, dark, or as the system has it; the choice is kept in this browser.

const KEY = "tollbridge-theme";
const NAMES = ["auto", "light", "dark"];

export function followTheme(button, changed) {
  const apply = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.textContent = `Theme: ${name}`;
    changed();
  };
  let name = NAMES.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "auto";
  button.addEventListener("click", () => {
    name = NAMES[(NAMES.indexOf(name) + 1) % NAMES.length];
    localStorage.setItem(KEY, name);
    apply(name);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  apply(name);
}

/** The value of a colour of style.css, as it is now. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

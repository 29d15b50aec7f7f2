// Light, dark, or as the system wants it. No module, so that it runs before the page is painted.

(() => {
  const SAVED = "pipeinfer.theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const sheet = document.getElementById("dark");
  const tell = () => document.dispatchEvent(new Event("theme"));

  function get() {
    try {
      return localStorage.getItem(SAVED) ?? "system";
    } catch {
      return "system";
    }
  }

  function use(theme) {
    sheet.media = { light: "not all", dark: "all" }[theme] ?? "(prefers-color-scheme: dark)";
    tell();
  }

  dark.addEventListener("change", tell);
  sheet.addEventListener("load", tell);
  addEventListener("storage", (event) => {
    if (event.key === SAVED) use(get());
  });
  document.addEventListener("DOMContentLoaded", () => {
    const choice = document.getElementById("theme");
    choice.value = get();
    choice.addEventListener("change", () => {
      try {
        localStorage.setItem(SAVED, choice.value);
      } finally {
        use(choice.value);
      }
    });
  });
  use(get());
})();

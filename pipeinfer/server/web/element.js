// Makes elements.

export function element(name, style = "", text = "") {
  const made = document.createElement(name);
  if (style) made.className = style;
  if (text) made.textContent = text;
  return made;
}

export function button(text, style = "quiet", onClick = null) {
  const made = element("button", style, text);
  made.type = "button";
  if (onClick) made.addEventListener("click", onClick);
  return made;
}

// A button whose click copies `text`; see `copies`.
export function copyButton(text) {
  const made = button("Copy");
  made.dataset.copy = text;
  return made;
}

// Lets every copy button of the page work.
export function copies() {
  document.addEventListener("click", async (event) => {
    const pressed = event.target.closest("button[data-copy]");
    if (!pressed) return;
    pressed.textContent = await copied(pressed.dataset.copy) ? "Copied" : "Cannot copy";
    setTimeout(() => { pressed.textContent = "Copy"; }, 1500);
  });
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // without TLS, beyond this machine, browsers have no clipboard but this way
    const field = element("textarea", "hidden");
    field.value = text;
    document.body.append(field);
    const before = document.activeElement;
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    before?.focus();
    return done;
  }
}

// Lets the browser save a text as a file.
export function download(name, text, type) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

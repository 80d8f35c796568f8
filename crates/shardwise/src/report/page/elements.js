// Elements, numbers as text, and the data of the page.

const page = JSON.parse(document.getElementById("data").textContent);

/** An element with attributes (functions are listeners) and children (texts or elements). */
function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** As el, for SVG. */
function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Bytes in decimal units with three digits; below 10,000 all digits. The command prints the same (`picture::bytes_text`). */
function bytes(count) {
  if (count < 9999.5) return `${Math.round(count)} B`;
  // Rounded to three digits first, so that 999,999 is 1.00 MB and not 1000 kB.
  const [size, unit] = [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"]].find(([size]) => count >= size * 0.9995)
    ?? [1e3, "kB"];
  const scaled = count / size;
  return `${scaled.toFixed(scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0)} ${unit}`;
}

/** Nanoseconds with a unit. */
function time(nanoseconds) {
  // From two minutes and two hours on, as the command prints them.
  for (const [unit, size, from] of [["h", 3.6e12, 7.2e12], ["min", 6e10, 1.2e11], ["s", 1e9], ["ms", 1e6], ["us", 1e3]]) {
    if (nanoseconds >= (from ?? size)) return `${(nanoseconds / size).toFixed(nanoseconds >= 100 * size ? 0 : 2)} ${unit}`;
  }
  return `${nanoseconds} ns`;
}

/** A share in percent. */
function percent(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "-";
}

/** A table: titles (a leading # aligns to the right) and rows of texts or elements. */
function table(caption, titles, rows) {
  const cell = (tag, title, content, scope) =>
    el(tag, { class: title.startsWith("#") ? "number" : null, scope }, content);
  const name = (title) => title.replace(/^#/, "");
  return el("div", { class: "scroll" }, el("table", {},
    caption ? el("caption", {}, caption) : null,
    el("thead", {}, el("tr", {}, ...titles.map((title) => cell("th", title, name(title), "col")))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((content, i) => cell("td", titles[i], content)))))));
}

/** A section of the page with a heading; the navigation lists all sections. */
function section(id, title, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);
}

/** An element that opens: its content is built when it is first opened. */
function lazy(summary, content, attributes = {}) {
  const inside = el("div", { class: "inside" });
  let built = false;
  return el("details", {
    ...attributes,
    toggle: (event) => {
      if (event.target.open && !built) {
        built = true;
        inside.append(...content());
      }
    },
  }, el("summary", {}, ...summary), inside);
}

/** A button that shows and hides what `content` builds, below it. */
function disclosure(label, text, content) {
  const shown = el("div", { hidden: "" });
  const button = el("button", {
    type: "button", "aria-expanded": "false", "aria-label": label,
    click: () => {
      const open = button.getAttribute("aria-expanded") !== "true";
      if (open && !shown.hasChildNodes()) shown.append(content());
      shown.hidden = !open;
      button.setAttribute("aria-expanded", String(open));
    },
  }, text);
  return [button, shown];
}

/** Colours of ranks: neighbours differ in hue and lightness. */
function rankColor(rank, alpha = 1) {
  return `hsl(${(rank * 137.5) % 360} 60% ${rank % 2 ? 45 : 60}% / ${alpha})`;
}

/** A chooser of a rank of a run, if there are several. */
function rankChooser(run, id, change) {
  if (run.ranks.length < 2) return null;
  const options = run.ranks.map((rank, i) => el("option", { value: i }, `rank ${rank.rank}`));
  return el("label", {}, "Rank ", el("select", { id, change: (event) => change(Number(event.target.value)) }, ...options));
}

/** A legend of colours, which are names of variables of the style. */
function legend(entries) {
  return el("div", { class: "legend" }, ...entries.map(([color, name]) =>
    el("span", {}, el("i", { style: `background: var(--${color})` }), name)));
}

const KINDS = ["parameters", "gradients", "optimizer_state", "activations", "buffers"];
const SPANS = ["module", "operator", "gradient", "redistribution", "collective"];
const PHASES = ["forward", "backward", "update"];
const LANES = ["compute", "moving", "waiting"];

/** A span of a rank with its texts. */
function spanOf(rank, index) {
  const row = rank.spans[index];
  const text = (number) => (number === null ? null : rank.strings[number]);
  return {
    index, kind: SPANS[row[0]], name: text(row[1]), parent: row[2], start: row[3], duration: row[4], waiting: row[5],
    module: text(row[6]), phase: PHASES[row[7]], inputs: row[8].map(text), outputs: row[9].map(text), axes: text(row[10]),
    bytes: row[11], flops: row[12], site: text(row[13]), reason: text(row[14]), redistribution: text(row[15]),
  };
}

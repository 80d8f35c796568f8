// Puts the page together: overview, mesh, comparison, search.

function overviewSection(run) {
  const mean = (field) => Math.round(run.ranks.reduce((sum, rank) => sum + rank[field], 0) / run.ranks.length);
  const peak = Math.max(...run.ranks.map((rank) => rank.peak.bytes));
  const sent = run.ranks.reduce((sum, rank) => sum + rank.traffic.reduce((all, row) => all + row.bytes, 0), 0);
  const card = (value, name) => el("div", { class: "card" }, el("b", {}, value), el("span", {}, name));
  const step = mean("duration");
  return el("div", { class: "cards", id: "overview" },
    card(time(step), run.is_dry ? "step, estimated" : "profiled step"),
    card(percent(mean("compute"), step), "computing"), card(percent(mean("moving"), step), "moving data"),
    card(percent(mean("waiting"), step), "waiting"), card(bytes(peak), "peak memory of a rank"),
    card(bytes(sent / run.ranks.length), "sent by a rank"), card(String(run.size), run.size === 1 ? "rank" : "ranks"));
}

function meshSection(run) {
  const rows = run.axes.map((axis) => [axis.name, String(axis.size), `${axis.latency_us} us`, `${axis.gb_per_s} GB/s`]);
  return section("mesh", "Mesh", table(null, ["axis", "#ranks", "#latency", "#bandwidth"], rows), meshPicture(run));
}

/** The first ranks as a grid: the last axis along the rows. */
function meshPicture(run) {
  const columns = run.axes.length ? run.axes[run.axes.length - 1].size : 1;
  const [wide, tall] = [Math.min(columns, 16), Math.min(Math.ceil(run.size / columns), 8)];
  const picture = svg("svg", {
    viewBox: `0 0 ${wide * 56 + 2} ${tall * 36 + 2}`, width: wide * 56 + 2, height: tall * 36 + 2, role: "img",
    "aria-label": `${run.size} ranks; ${run.axes.map((axis) => `${axis.size} along ${axis.name}`).join(", ")}`,
  });
  for (let row = 0; row < tall; row += 1) {
    for (let column = 0; column < wide; column += 1) {
      const rank = row * columns + column;
      if (rank >= run.size) continue;
      picture.append(
        svg("rect", { x: column * 56 + 1, y: row * 36 + 1, width: 52, height: 32, rx: 5, fill: rankColor(rank, 0.6) }),
        svg("text", { x: column * 56 + 27, y: row * 36 + 21, "text-anchor": "middle" }, String(rank)));
    }
  }
  const hidden = run.size - wide * tall;
  return el("div", {}, picture, hidden > 0 ? el("p", { class: "muted" }, `and ${hidden} more ranks`) : null);
}

function comparisonSection([first, second]) {
  const mean = (run, field) => run.ranks.reduce((sum, rank) => sum + rank[field], 0) / run.ranks.length;
  const change = (a, b, text) => {
    const better = b < a ? "better" : b > a ? "worse" : null;
    const delta = a > 0 ? `${b >= a ? "+" : ""}${(((b - a) / a) * 100).toFixed(1)} %` : b > 0 ? "new" : "";
    return [text(a), text(b), el("span", { class: better }, delta)];
  };
  const nanoseconds = (value) => time(Math.round(value));
  const rows = ["duration", "compute", "moving", "waiting"].map((field) =>
    [field === "duration" ? "step" : field, ...change(mean(first, field), mean(second, field), nanoseconds)]);
  const peak = (run) => Math.max(...run.ranks.map((rank) => rank.peak.bytes));
  rows.push(["peak memory", ...change(peak(first), peak(second), bytes)]);
  const sent = (run) => {
    const found = new Map();
    for (const rank of run.ranks) {
      for (const row of rank.traffic) {
        const key = `${row.call} over ${row.axes}`;
        found.set(key, (found.get(key) ?? 0) + row.bytes / run.ranks.length);
      }
    }
    return found;
  };
  const [before, after] = [sent(first), sent(second)];
  for (const key of new Set([...before.keys(), ...after.keys()])) {
    rows.push([key, ...change(before.get(key) ?? 0, after.get(key) ?? 0, bytes)]);
  }
  const layouts = new Map(first.parameters.map((p) => [p.path, p.layout]));
  const moved = second.parameters.filter((p) => layouts.get(p.path) !== p.layout)
    .map((p) => [el("code", {}, p.path), el("code", {}, layouts.get(p.path) ?? "-"), el("code", {}, p.layout)]);
  return section("comparison", "Comparison",
    table(null, ["", `#${first.title}`, `#${second.title}`, "#change"], rows),
    moved.length ? lazy([`${moved.length} parameters in other layouts`], () =>
      [table(null, ["parameter", first.title, second.title], moved.slice(0, 200))]) : el("p", {}, "All layouts are equal."));
}

/** Everything of a run that contains a text: parameters, and spans of the first rank, each kind of call once. */
function found(run, text) {
  const wanted = text.toLowerCase();
  const hits = [];
  for (const parameter of run.parameters) {
    if (`${parameter.path} ${parameter.layout}`.toLowerCase().includes(wanted)) hits.push({ parameter });
  }
  const rank = run.ranks[0];
  const seen = new Set();
  const matching = new Set(rank.strings.map((s, i) => (s.toLowerCase().includes(wanted) ? i : -1)));
  rank.spans.forEach((row, index) => {
    const numbers = [row[1], row[6], ...row[8], ...row[9], row[10], row[13], row[14]];
    if (!numbers.some((number) => number !== null && matching.has(number))) return;
    const key = numbers.join();
    if (!seen.has(key)) {
      seen.add(key);
      hits.push({ span: spanOf(rank, index) });
    }
  });
  return hits;
}

const MOST_RESULTS = 60;

function showResults(run, text, results) {
  if (text.length < 2) {
    results.replaceChildren();
    return;
  }
  const hits = found(run, text);
  const more = hits.length > MOST_RESULTS ? `, the first ${MOST_RESULTS} are shown` : "";
  const rank = run.ranks[0];
  const view = (hit) => hit.parameter
    ? lazy([el("code", {}, hit.parameter.path), " ", el("span", { class: "badge" }, "parameter")],
      () => [el("code", {}, hit.parameter.layout), layoutView(run, hit.parameter.layout)], { class: "result" })
    : lazy([spanTitle(hit.span) || hit.span.module || "module", " ", el("span", { class: "badge" }, hit.span.kind),
      el("span", { class: "facts" }, [hit.span.module, hit.span.phase].filter(Boolean).join(" · "))],
      () => [spanDetails(run, rank, hit.span)], { class: "result" });
  results.replaceChildren(el("div", { class: "panel" }, el("p", { role: "status" }, `${hits.length} found${more}`),
    ...hits.slice(0, MOST_RESULTS).map(view)));
}

/** Builds what is seen first, lets the browser paint it, and then builds the rest: a large step takes a while. */
function build() {
  const main = document.getElementById("main");
  const [run] = page.runs;
  const links = el("nav", { "aria-label": "Sections" });
  const results = el("div", { id: "results" });
  const search = run ? el("input", {
    type: "search", id: "search", placeholder: "search operators, modules, lines", "aria-label": "Search the report",
    input: (event) => showResults(run, event.target.value.trim(), results),
  }) : null;
  const add = (parts) => {
    for (const part of parts) {
      const link = el("a", { href: `#${part.id}` }, part.querySelector("h2").textContent);
      links.insertBefore(link, search);
      main.append(part);
    }
  };
  if (search) links.append(search);
  main.append(el("header", {}, el("h1", {}, run ? run.title : "Failed run")), links, results);
  if (run) main.append(overviewSection(run));
  if (page.failures.length) add([failuresSection(page.failures)]);
  if (page.runs.length > 1) add([comparisonSection(page.runs)]);
  if (run) add([meshSection(run)]);
  requestAnimationFrame(() => setTimeout(() => {
    if (run) add([modulesSection, stepSection, timelineSection, memorySection, trafficSection].map((make) => make(run)));
    document.body.dataset.complete = "true";
  }));
}

build();

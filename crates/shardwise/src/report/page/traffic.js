// Bytes by mesh axis and collective, and from rank to rank.

function trafficSection(run) {
  const rows = new Map();
  for (const rank of run.ranks) {
    for (const row of rank.traffic) {
      const key = `${row.axes} ${row.call}`;
      const sum = rows.get(key) ?? { ...row, calls: 0, bytes: 0, moving: 0, waiting: 0 };
      for (const field of ["calls", "bytes", "moving", "waiting"]) sum[field] += row[field] / run.ranks.length;
      rows.set(key, sum);
    }
  }
  const sorted = [...rows.values()].sort((a, b) => b.bytes - a.bytes);
  return section("traffic", "Communication",
    table(run.ranks.length > 1 ? "Mean of a rank" : "One rank",
      ["mesh axes", "collective", "#calls", "#sent", "#moving", "#waiting"],
      sorted.map((row) => [row.axes, row.call, String(Math.round(row.calls)), bytes(row.bytes),
        time(Math.round(row.moving)), time(Math.round(row.waiting))])),
    matrixView(run));
}

function matrixView(run) {
  const ranks = [...new Set(run.matrix.flatMap(([from, to]) => [from, to]))].sort((a, b) => a - b).slice(0, 64);
  if (ranks.length === 0) return el("p", {}, "Nothing is sent from rank to rank.");
  const sent = new Map(run.matrix.map(([from, to, amount]) => [`${from},${to}`, amount]));
  const most = Math.max(...run.matrix.map((entry) => entry[2]));
  const cell = (from, to) => {
    const amount = sent.get(`${from},${to}`) ?? 0;
    const share = Math.round((70 * amount) / most);
    const attributes = { style: `background: color-mix(in srgb, var(--moving) ${share}%, var(--page))` };
    const text = ranks.length > 16 ? "" : amount > 0 ? bytes(amount) : "";
    return el("td", { ...attributes, title: `${from} to ${to}: ${bytes(amount)}` }, text);
  };
  const note = run.is_dry ? "Every rank does on its own groups what the first rank does. " : "";
  const caption = `Bytes from rank (row) to rank (column). ${note}What a collective sends is divided evenly among its group.`;
  return el("div", { class: "scroll" }, el("p", { class: "muted", id: "matrix-title" }, caption),
    el("table", { class: "matrix", "aria-labelledby": "matrix-title" },
    el("thead", {}, el("tr", {}, el("th", {}, ""), ...ranks.map((to) => el("th", { scope: "col" }, String(to))))),
    el("tbody", {}, ...ranks.map((from) =>
      el("tr", {}, el("th", { scope: "row" }, String(from)), ...ranks.map((to) => cell(from, to)))))));
}

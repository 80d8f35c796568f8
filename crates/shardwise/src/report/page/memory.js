// Memory over the step, stacked by kind, and who allocated what is in use at the peak.

/** Width of a column of the picture. Wide enough to be seen, so that a peak of a nanosecond is. */
const COLUMN = 2;

/** The bytes by kind to draw in each of `count` columns of time: those of the moment in it with the most bytes. */
function memoryColumns(rank, count) {
  const total = (kinds) => kinds.reduce((a, b) => a + b, 0);
  const column = (at) => Math.min(count - 1, Math.floor((at / Math.max(1, rank.duration)) * count));
  const columns = new Array(count);
  rank.memory.forEach(([at, kinds], i) => {
    // The bytes stay as they are until the next sample.
    const end = column(rank.memory[i + 1]?.[0] ?? rank.duration);
    for (let c = column(at); c <= end; c += 1) {
      if (!columns[c] || total(kinds) > total(columns[c])) columns[c] = kinds;
    }
  });
  return Array.from(columns, (kinds) => kinds ?? KINDS.map(() => 0));
}

function memoryPicture(rank) {
  const [width, height, left, bottom] = [1120, 240, 70, 22];
  const columns = memoryColumns(rank, (width - left) / COLUMN);
  const most = Math.max(1, rank.peak.bytes);
  const x = (at) => left + (at / Math.max(1, rank.duration)) * (width - left);
  const y = (amount) => 7 + (height - bottom - 7) * (1 - amount / most);
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Memory of rank ${rank.rank}, at most ${bytes(rank.peak.bytes)}; the table below has the peak by kind`,
  });
  let below = columns.map(() => 0);
  KINDS.forEach((kind, index) => {
    const above = columns.map((kinds, i) => below[i] + kinds[index]);
    if (above.some((amount, i) => amount > below[i])) {
      const edge = (heights) => heights.flatMap((amount, i) =>
        [[left + i * COLUMN, y(amount)], [left + (i + 1) * COLUMN, y(amount)]]);
      const points = [...edge(above), ...edge(below).reverse()].map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`);
      picture.append(svg("polygon", { points: points.join(" "), fill: `var(--${kind})`, "fill-opacity": 0.85 }));
    }
    below = above;
  });
  for (let i = 0; i <= 4; i += 1) {
    const amount = (most * i) / 4;
    picture.append(svg("text", { x: left - 6, y: y(amount) + 4, "text-anchor": "end" }, bytes(amount)));
    const at = (rank.duration * i) / 4;
    const anchor = i === 0 ? "start" : i === 4 ? "end" : "middle";
    picture.append(svg("text", { x: x(at), y: height - 4, "text-anchor": anchor }, time(Math.round(at))));
  }
  // A mark above the curve, which does not hide the peak.
  picture.append(svg("path", { d: `M${x(rank.peak.at) - 5} 0h10l-5 6z`, fill: "var(--text)" }));
  return picture;
}

function memorySection(run) {
  const shown = el("div");
  const show = (index) => {
    const rank = run.ranks[index];
    const kinds = KINDS.map((kind, i) => [kind.replace("_", " "), bytes(rank.peak.by_kind[i])]);
    const sites = rank.peak.sites.map((site) => [bytes(site.bytes), site.tensors ? String(site.tensors) : "",
      site.kind.replace("_", " "), site.operator, el("code", {}, site.module), el("code", {}, site.site)]);
    shown.replaceChildren(memoryPicture(rank),
      el("h3", {}, `At the peak of ${bytes(rank.peak.bytes)}, after ${time(rank.peak.at)}`),
      table(null, ["kind", "#bytes"], kinds),
      table("Who allocated it", ["#bytes", "#tensors", "kind", "operator", "module", "line"], sites));
  };
  show(0);
  return section("memory", "Memory",
    legend(KINDS.map((kind) => [kind, kind.replace("_", " ")])),
    el("div", { class: "controls" }, rankChooser(run, "memory-rank", show)), shown);
}

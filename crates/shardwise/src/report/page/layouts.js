// A layout: a picture of the last two dimensions, and the boxes of every rank.

/** What a rank holds, as `[0:4, 8:16]`. */
function boxText(box) {
  return `[${box.offsets.map((from, d) => `${from}:${from + box.sizes[d]}`).join(", ")}]`;
}

/** The picture and the table of a layout. */
function layoutView(run, key) {
  const layout = run.layouts[key];
  if (!layout) return el("p", {}, key);
  const rows = layout.ranks.map((rank) => [
    String(rank.rank), `[${rank.local_shape.join(", ")}]`,
    rank.boxes.length ? el("span", { class: "code" }, rank.boxes.map(boxText).join(" ")) : "nothing",
  ]);
  const rest = run.size > layout.ranks.length ? ` (the first ${layout.ranks.length} of ${run.size} ranks)` : "";
  const placements = run.axes.map((axis, i) => `${axis.name}: ${layout.placements[i] ?? "-"}`).join(", ");
  return el("div", { class: "panel layout", "data-layout": key },
    el("p", {}, `Shape [${layout.shape.join(", ")}]; ${placements}`),
    layoutPicture(layout),
    table(`Boxes by rank${rest}`, ["rank", "local shape", "boxes of the full tensor"], rows));
}

/** Boxes in the last two dimensions, coloured by the first rank that holds them. */
function layoutPicture(layout) {
  const ndim = layout.shape.length;
  if (ndim === 0 || layout.shape.includes(0)) return null;
  const places = new Map();
  for (const rank of layout.ranks) {
    for (const box of rank.boxes) {
      // Boxes that differ in earlier dimensions would cover each other: the first one is shown.
      if (box.offsets.slice(0, Math.max(ndim - 2, 0)).some((offset) => offset > 0)) continue;
      const y = ndim > 1 ? [box.offsets[ndim - 2], box.sizes[ndim - 2]] : [0, 1];
      const x = [box.offsets[ndim - 1], box.sizes[ndim - 1]];
      const place = [...y, ...x].join();
      if (!places.has(place)) places.set(place, { y, x, ranks: [] });
      places.get(place).ranks.push(rank.rank);
    }
  }
  // The listed ranks of a large mesh hold a small part of the tensor: that part is drawn.
  const all = [...places.values()];
  const rows = Math.max(1, ...all.map(({ y }) => y[0] + y[1]));
  const columns = Math.max(1, ...all.map(({ x }) => x[0] + x[1]));
  const [width, height] = [440, Math.min(220, Math.max(36, (440 * rows) / columns))];
  const picture = svg("svg", {
    viewBox: `-1 -1 ${width + 2} ${height + 2}`, width: width + 2, height: height + 2, role: "img",
    "aria-label": `${places.size} different boxes in the last two dimensions`,
  });
  for (const { y, x, ranks } of places.values()) {
    const [left, top] = [(x[0] / columns) * width, (y[0] / rows) * height];
    const [wide, high] = [(x[1] / columns) * width, (y[1] / rows) * height];
    const shown = ranks.length > 8 ? `${ranks.slice(0, 8).join(",")},…` : ranks.join(",");
    picture.append(svg("rect", {
      x: left, y: top, width: wide, height: high, fill: rankColor(ranks[0], 0.75),
      stroke: wide > 4 && high > 4 ? "var(--page)" : "none",
    }, svg("title", {}, `ranks ${ranks.join(", ")}`)));
    if (wide > 7 * shown.length && high > 12) {
      picture.append(svg("text", { x: left + wide / 2, y: top + high / 2 + 4, "text-anchor": "middle" }, shown));
    }
  }
  const part = `rows 0 to ${rows}, columns 0 to ${columns} of the last two dimensions`;
  return el("div", {}, picture, el("p", { class: "muted" }, ndim > 1 ? part : `elements 0 to ${columns}`));
}

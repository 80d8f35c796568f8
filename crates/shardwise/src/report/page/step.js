// The step as a tree: part of the step, modules, operators, redistributions, collectives.

/** Spans of a rank below each other, and by part of the step and module. */
function stepTree(rank) {
  const spans = rank.spans.map((_, index) => spanOf(rank, index));
  const inside = spans.map(() => []);
  const phases = new Map();
  for (const span of spans) {
    if (span.kind === "module") continue;
    let parent = span.parent;
    while (parent !== null && spans[parent].kind === "module") parent = spans[parent].parent;
    if (parent !== null) {
      inside[parent].push(span);
      continue;
    }
    if (!phases.has(span.phase)) phases.set(span.phase, { name: span.phase, children: new Map(), spans: [] });
    let node = phases.get(span.phase);
    for (const name of span.module ? span.module.split(".") : []) {
      if (!node.children.has(name)) node.children.set(name, { name, children: new Map(), spans: [] });
      node = node.children.get(name);
    }
    node.spans.push(span);
  }
  const total = (span) => span.bytes + inside[span.index].reduce((sum, inner) => sum + total(inner), 0);
  const sum = (node) => {
    node.duration = node.spans.reduce((all, span) => all + span.duration, 0);
    node.bytes = node.spans.reduce((all, span) => all + total(span), 0);
    node.operators = node.spans.length;
    for (const child of node.children.values()) {
      sum(child);
      node.duration += child.duration;
      node.bytes += child.bytes;
      node.operators += child.operators;
    }
    // Times are left out: equal blocks take slightly different times.
    const own = node.spans.map((span) => [span.kind, span.name, span.inputs, span.outputs, total(span)].join("|"));
    node.sign = `${own.join(";")}[${[...node.children.values()].map((c) => `${c.name}:${c.sign}`).join(",")}]`;
  };
  for (const phase of phases.values()) sum(phase);
  return { phases, inside, total };
}

/** All that is known about a span. */
function spanDetails(run, rank, span) {
  const rows = [];
  const add = (name, value) => value && rows.push([name, value]);
  const layouts = (keys) => keys.length && el("div", {}, ...keys.map((key) => {
    const [button, shown] = disclosure(`boxes of ${key}`, "boxes", () => layoutView(run, key));
    return el("div", {}, el("div", { class: "row" }, el("code", {}, key), run.layouts[key] ? button : null), shown);
  }));
  add("from", layouts(span.inputs));
  add("to", layouts(span.outputs));
  add("module", span.module && el("code", {}, span.module));
  add("part of the step", span.phase);
  add("time", `${time(span.duration)}${run.is_dry ? " (estimated)" : ""}`);
  add("waiting", span.waiting > 0 && time(span.waiting));
  add("mesh axes", span.axes);
  add("sent", span.bytes > 0 && bytes(span.bytes));
  add("operations", span.flops > 0 && span.flops.toLocaleString("en"));
  add("line", span.site && el("code", {}, span.site));
  add("reason", span.reason);
  const plan = span.redistribution && run.redistributions[span.redistribution];
  if (plan) {
    add("plan", el("div", {}, ...plan.steps.map((step) => el("div", {}, step))));
    add("rejected", plan.rejected.length && el("div", {}, ...plan.rejected.map(([us, steps]) =>
      el("div", {}, `${time(Math.round(us * 1000))}: ${steps}`))));
  }
  return table(null, ["property", "value"], rows);
}

function spanTitle(span) {
  const names = { gradient: `gradient of ${span.name}` };
  return names[span.kind] ?? span.name;
}

function spanView(run, rank, tree, span) {
  const moved = tree.total(span);
  const facts = [time(span.duration), moved > 0 ? bytes(moved) : null, span.outputs[0] ?? span.axes ?? null];
  return lazy(
    [el("span", {}, spanTitle(span)), " ", el("span", { class: "badge" }, span.kind),
      el("span", { class: "facts" }, facts.filter(Boolean).join(" · "))],
    () => [spanDetails(run, rank, span), ...tree.inside[span.index].map((inner) => spanView(run, rank, tree, inner))],
    { class: "span", "data-span": span.index });
}

/** The views of spans; more than three equal ones after each other are one entry. */
function repeatedViews(run, rank, tree, spans) {
  const views = [];
  for (let from = 0, to = 0; from < spans.length; from = to) {
    const same = (span) => [span.kind, span.name, span.outputs].join("|") === [spans[from].kind, spans[from].name, spans[from].outputs].join("|");
    while (to < spans.length && same(spans[to])) to += 1;
    const equal = spans.slice(from, to).map((span) => () => spanView(run, rank, tree, span));
    if (equal.length > 3) {
      const duration = spans.slice(from, to).reduce((sum, span) => sum + span.duration, 0);
      views.push(lazy([spanTitle(spans[from]), el("span", { class: "facts" }, `${equal.length} times · ${time(duration)}`)],
        () => equal.map((view) => view())));
    } else {
      views.push(...equal.map((view) => view()));
    }
  }
  return views;
}

function placeView(run, rank, tree, group, open = false) {
  const node = group.first;
  const facts = `${group.count > 1 ? `${group.count} alike, each ` : ""}${time(node.duration)}, ` +
    `${node.operators} operator${node.operators === 1 ? "" : "s"}${node.bytes > 0 ? `, ${bytes(node.bytes)} sent` : ""}`;
  return lazy([el("b", {}, group.name), el("span", { class: "facts" }, facts)], () => [
    ...alike(node.children.values(), (child) => child.sign).map((child) => placeView(run, rank, tree, child)),
    ...repeatedViews(run, rank, tree, node.spans),
  ], { open: open ? "" : null });
}

function stepSection(run) {
  const shown = el("div", { id: "step-tree" });
  const show = (index) => {
    const rank = run.ranks[index];
    const tree = stepTree(rank);
    shown.replaceChildren(...[...tree.phases.values()].map((phase) =>
      placeView(run, rank, tree, { first: phase, count: 1, name: phase.name }, true)));
  };
  show(0);
  return section("step", "The step",
    el("p", { class: "muted" }, "Part of the step, modules, operators, and what each of them moved and why. Opens on demand."),
    el("div", { class: "controls" }, rankChooser(run, "step-rank", show)), shown);
}

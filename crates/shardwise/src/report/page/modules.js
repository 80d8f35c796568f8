// The modules of a model as a tree, with their parameters. Numbered modules that are alike are shown once.

/** The tree of a run's modules: { name, path, kind, children, parameters }. */
function moduleTree(run) {
  const root = { name: "model", path: "", kind: "", children: new Map(), parameters: [] };
  const find = (path) => {
    let node = root;
    for (const name of path === "" ? [] : path.split(".")) {
      if (!node.children.has(name)) {
        const inner = node.path === "" ? name : `${node.path}.${name}`;
        node.children.set(name, { name, path: inner, kind: "", children: new Map(), parameters: [] });
      }
      node = node.children.get(name);
    }
    return node;
  };
  for (const module of run.modules) find(module.path).kind = module.kind;
  for (const parameter of run.parameters) {
    const cut = parameter.path.lastIndexOf(".");
    find(cut < 0 ? "" : parameter.path.slice(0, cut)).parameters.push(parameter);
  }
  return root;
}

/** Everything that makes two modules alike, as text. */
function signature(node) {
  const own = node.parameters.map((p) => `${p.path.split(".").pop()} ${p.dtype} ${p.layout}`).join(";");
  return `${node.kind}(${own})[${[...node.children.values()].map((c) => `${c.name}:${signature(c)}`).join(",")}]`;
}

/** Neighbours of a list with numbers as names and equal signatures, together: [{ first, count, name }]. */
function alike(nodes, sign) {
  const groups = [];
  let previous = null;
  for (const node of nodes) {
    const same = /^\d+$/.test(node.name) ? sign(node) : null;
    const group = groups[groups.length - 1];
    if (same !== null && same === previous) {
      group.count += 1;
      group.name = `${group.first.name}-${node.name}`;
    } else {
      groups.push({ first: node, count: 1, name: node.name });
    }
    previous = same;
  }
  return groups;
}

function localBytes(node) {
  const own = node.parameters.reduce((sum, p) => sum + p.local_bytes, 0);
  return [...node.children.values()].reduce((sum, child) => sum + localBytes(child), own);
}

function parameterView(run, parameter) {
  const [button, shown] = disclosure(`boxes of ${parameter.path}`, "boxes", () => layoutView(run, parameter.layout));
  return el("div", { class: "parameter", "data-path": parameter.path },
    el("div", { class: "row" }, button, el("code", {}, parameter.path.split(".").pop()),
      el("span", { class: "badge" }, `${parameter.dtype}${parameter.is_buffer ? ", buffer" : ""}`),
      el("code", {}, parameter.layout),
      el("span", { class: "muted" }, `${bytes(parameter.local_bytes)} per rank`)),
    shown);
}

function moduleView(run, group, open) {
  const node = group.first;
  const repeated = group.count > 1 ? `${group.count} alike, each ` : "";
  return lazy(
    [el("b", {}, group.name), el("span", { class: "facts" }, `${node.kind} ${repeated}${bytes(localBytes(node))} per rank`)],
    () => [
      ...node.parameters.map((parameter) => parameterView(run, parameter)),
      ...alike(node.children.values(), signature).map((child) => moduleView(run, child, false)),
    ],
    { open: open || node.path === "blocks" ? "" : null, "data-path": node.path });
}

function modulesSection(run) {
  const root = moduleTree(run);
  const total = run.parameters.length;
  return section("modules", "Modules and placements",
    el("p", { class: "muted" }, `${total} parameters and buffers. The button of a parameter shows which rank holds which part.`),
    moduleView(run, { first: root, count: 1, name: root.name }, true));
}

// The time line: three lanes per rank on a canvas, and their sums as a table.

function timelineSection(run) {
  const longest = Math.max(1, ...run.ranks.map((rank) => rank.duration));
  const view = { from: 0, to: longest };
  const [lane, gap, left] = [14, 10, 60];
  const height = run.ranks.length * (3 * lane + gap) + 26;
  const canvas = el("canvas", {
    tabindex: "0", role: "img", style: `width: 100%; height: ${height}px`,
    "aria-label": "Time line of all ranks; the table below has the sums. Plus, minus and arrow keys zoom and move.",
  });
  const details = el("div", { "aria-live": "polite" });

  const draw = () => {
    const [width, scale] = [canvas.clientWidth || 1000, window.devicePixelRatio || 1];
    [canvas.width, canvas.height] = [width * scale, height * scale];
    const context = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`);
    context.scale(scale, scale);
    context.font = "12px system-ui, sans-serif";
    const x = (at) => left + ((at - view.from) / (view.to - view.from)) * (width - left);
    run.ranks.forEach((rank, row) => {
      const top = row * (3 * lane + gap);
      context.fillStyle = color("text");
      context.fillText(`rank ${rank.rank}`, 0, top + 2 * lane);
      LANES.forEach((name, i) => {
        context.fillStyle = color("panel");
        context.fillRect(left, top + i * lane, width - left, lane - 1);
      });
      for (const [number, start, length] of rank.lanes) {
        if (start + length < view.from || start > view.to) continue;
        const [begin, end] = [Math.max(x(start), left), x(start + length)];
        context.fillStyle = color(LANES[number]);
        context.fillRect(begin, top + number * lane, Math.max(end - begin, 0.5), lane - 1);
      }
    });
    context.fillStyle = color("muted");
    for (let i = 0; i <= 5; i += 1) {
      const at = view.from + ((view.to - view.from) * i) / 5;
      context.textAlign = i === 5 ? "right" : i === 0 ? "left" : "center";
      context.fillText(time(Math.round(at)), x(at), height - 8);
    }
    context.textAlign = "left";
  };
  const change = (center, factor, shift) => {
    const length = Math.min(longest, (view.to - view.from) * factor);
    const from = center - length / 2 + shift * length;
    view.from = Math.min(Math.max(0, from), longest - length);
    view.to = view.from + length;
    draw();
  };
  const middle = () => (view.from + view.to) / 2;
  const actions = {
    "+": () => change(middle(), 0.5, 0), "-": () => change(middle(), 2, 0), "0": () => change(0, Infinity, 0),
    ArrowLeft: () => change(middle(), 1, -0.25), ArrowRight: () => change(middle(), 1, 0.25),
  };
  canvas.addEventListener("keydown", (event) => {
    if (actions[event.key]) {
      event.preventDefault();
      actions[event.key]();
    }
  });
  canvas.addEventListener("click", (event) => {
    const area = canvas.getBoundingClientRect();
    const rank = run.ranks[Math.floor((event.clientY - area.top) / (3 * lane + gap))];
    const at = view.from + ((event.clientX - area.left - left) / (area.width - left)) * (view.to - view.from);
    const hit = rank?.lanes.find(([, start, length]) => start <= at && at <= start + length);
    details.replaceChildren(...(hit ? [el("h3", {}, `rank ${rank.rank}: ${spanTitle(spanOf(rank, hit[3]))}`),
      spanDetails(run, rank, spanOf(rank, hit[3]))] : []));
  });
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  requestAnimationFrame(draw);

  const button = (key, name) => el("button", { type: "button", "aria-label": name, click: actions[key] }, name);
  const rows = run.ranks.map((rank) => [String(rank.rank), time(rank.duration),
    ...LANES.map((name) => `${time(rank[name])} (${percent(rank[name], rank.duration)})`)]);
  return section("timeline", "Time line",
    el("p", { class: "muted" }, run.is_dry
      ? "Estimated: operations by the rate of the machine, collectives by the links, one after the other."
      : "Measured. A collective is drawn as waiting first, then moving. Click a stretch for its details."),
    legend([["compute", "computing"], ["moving", "moving data"], ["waiting", "waiting for other ranks"]]),
    el("div", { class: "controls" }, button("+", "zoom in"), button("-", "zoom out"), button("ArrowLeft", "earlier"),
      button("ArrowRight", "later"), button("0", "all")),
    canvas, details,
    table("Sums", ["rank", "#step", "#compute", "#moving", "#waiting"], rows));
}

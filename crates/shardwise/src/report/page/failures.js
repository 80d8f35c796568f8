// What ranks were doing when their run failed.

function callText(call) {
  return `${call.call} of ranks [${call.group.join(", ")}]${call.axes ? ` along ${call.axes}` : ""}`;
}

function failureView(dump, isOpen) {
  const calls = dump.recent.map((call, i) => [String(i - dump.recent.length), callText(call), call.operator ?? "",
    el("code", {}, call.module ?? ""), bytes(call.bytes), time(call.duration), time(call.waiting), el("code", {}, call.site)]);
  const state = dump.pending
    ? `in ${callText(dump.pending)} for ${time(dump.pending.duration)}, at ${dump.pending.site}`
    : "in no collective";
  return lazy(
    [el("b", {}, `rank ${dump.rank}`), el("span", { class: "facts" }, state)],
    () => [
      el("p", {}, dump.error ?? "This rank returned without an error."),
      dump.unreceived.length ? table("Messages that were sent and not received", ["to", "tag", "tensor", "line"],
        dump.unreceived.map((sent) => [String(sent.to), String(sent.tag), sent.what, el("code", {}, sent.site)])) : "",
      calls.length ? table("Last calls, the latest at the end",
        ["#", "call", "operator", "module", "#sent", "#time", "#waiting", "line"], calls) : el("p", {}, "It had made no call before."),
    ],
    { open: isOpen ? "" : null, class: "failure", "data-rank": dump.rank });
}

// The rank that failed, and why. An error that a rank shared with the others names that rank, whichever of them returned first.
function cause(dumps) {
  const first = dumps.find((dump) => dump.is_first);
  const shared = /^on rank (\d+): ([^]*)/.exec(first?.error ?? "");
  return shared ? { rank: Number(shared[1]), error: shared[2] } : first;
}

function failuresSection(dumps) {
  const failed = cause(dumps);
  return section("failure", "What failed",
    el("p", {}, failed ? `Rank ${failed.rank} failed first: ${failed.error}` : "No rank failed by itself before the others."),
    ...dumps.map((dump) => failureView(dump, dump.rank === failed?.rank)));
}

// The turns of a response, folded: what the policy said, what its environment answered, and what it gave for it.
"use strict";

// Calls of tools as models write them: Hermes and Qwen in tags, Llama 3 as an object alone; and what a template writes around an answer.
const CALL = /<tool_call>\s*\{[^]*?"name"\s*:\s*"([^"]+)"|<function=([\w.-]+)>|^\s*\{[^]*?"name"\s*:\s*"([^"]+)"[^]*?"(?:parameters|arguments)"/g;
// The notation for tiny models, whose only tool has no name in it.
const SHORT_CALL = /^\?/, SHORT_ANSWER = /^=[^]*:$/;
const TOOL_ANSWER = /<tool_response>|^\s*(?:tool|ipython)\b/;

// `turns` are [end, until, reward] in places, `drawn` makes nodes of the places from one to another, `plain` their text. Open are the last
// turn and those with the text that was searched for.
function turnList(turns, drawn, plain, sought = "") {
  return el("div", { class: "turns" }, turns.map(([end, until, reward], at) => {
    const start = at ? turns[at - 1][1] : 0;
    const [said, heard] = [plain(start, end), plain(end, until)];
    const calls = [...said.matchAll(CALL)].map((match) => match.slice(1).find((name) => name !== undefined));
    if (SHORT_CALL.test(said) && SHORT_ANSWER.test(heard)) calls.push("the tool");
    const facts = [el("b", {}, `turn ${at + 1}`), el("span", {}, reward === null ? "not answered" : `reward ${number(reward)}`),
      calls.map((name) => el("span", { class: "call" }, "calls ", el("bdi", {}, name))), TOOL_ANSWER.test(heard) ? el("span", { class: "call" }, "a tool answers") : null,
      el("span", { class: "preview" }, el("bdi", {}, shortened(said)), heard ? [" → ", el("bdi", {}, shortened(heard))] : null)];
    const open = at === turns.length - 1 || (sought !== "" && `${said}\n${heard}`.toLowerCase().includes(sought.toLowerCase()));
    return el("details", { open }, el("summary", {}, facts), el("pre", {}, el("bdi", {}, drawn(start, end, true))),
      heard ? el("pre", { class: "heard", title: "the environment's answer, which the policy read and did not say" }, el("bdi", {}, drawn(end, until, false))) : null);
  }));
}

function shortened(text) {
  const line = text.trim().replace(/\s+/g, " ");
  const letters = [...line];
  return letters.length > 60 ? `${letters.slice(0, 59).join("")}…` : line;
}

// Places in a text whose middle may be left out: `head` is its beginning, `tail` its end, `letters` count all of it.
function pieces(head, tail, letters) {
  const [first, last] = [[...head], [...tail]];
  const skipped = letters - last.length;
  return (from, to) => [first.slice(from, to).join(""), tail && from < skipped && to > first.length ? "…" : "",
    last.slice(Math.max(0, from - skipped), Math.max(0, to - skipped)).join("")].join("");
}

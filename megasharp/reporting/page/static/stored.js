// Stored samples of evaluations: filters, the verdicts of two judgements on one sample, two models side by side on one problem.
"use strict";

function storedState() {
  return { suite: "", left: null, right: null, verdict: "", outcome: "", problem: "", finish: "", greedy: "", text: "", page: 0 };
}

function storedSection(data, state, again) {
  const heading = ["stored", "Stored samples of evaluations"];
  if (!data.stored.length) return part(...heading, el("p", { class: "note" }, "No samples are stored (eval.keep, or --keep of megasharp eval)."));
  const filter = state.stored;
  const suite = data.stored.find((one) => one.suite === filter.suite) || data.stored[0];
  const sides = sidesOf(suite, filter);
  const set = (key) => (value) => { filter[key] = value; filter.page = 0; again("stored"); };
  // Two judgements share their samples: the left one's verdicts count.
  const of = sides.two ? [sides.left, sides.right] : [sides.left];
  const found = suite.rows.filter((row) => of.some((side) => row.set === side.of && passesStored(suite, row, side, sides, filter)));
  return part(...heading, el("p", { class: "note" }, suite.note), judgementTable(suite), storedControls(data, suite, sides, filter, set, () => {
    state.stored = { ...storedState(), suite: filter.suite, left: filter.left, right: filter.right };
    again("stored");
  }), sides.two ? twoSets(suite, sides, filter, found, again)
    : paged("stored", filter, found, again, "samples", (row) => storedCard(suite, row, sides, false, filter.text)));
}

// Until somebody chooses: two judgements of the same samples, else the last models of two runs, else a run's first and last.
function sidesOf(suite, filter) {
  const all = suite.sets.flatMap((one, of) => one.judgements.map((judgement, at) => (
    { of, at, run: one.run, name: judgement.name, label: one.judgements.length > 1 ? `${one.name}: ${judgement.name}` : one.name })));
  const second = all.find((one) => one.at > 0);
  const lasts = all.filter((one, place) => one.run < 0 || !all.slice(place + 1).some((other) => other.run === one.run));
  const usual = second ? all.filter((one) => one.of === second.of) : lasts.length > 1 ? lasts : all;
  const by = (label, otherwise) => all.find((one) => one.label === label) || otherwise;
  const left = by(filter.left, usual[0]);
  const right = filter.right === "" ? null : by(filter.right, usual[usual.length - 1]);
  return { all, left, right: right === left ? null : right, two: right !== null && right.of !== left.of };
}

function judgementTable(suite) {
  const share = (correct, of) => (of ? percent(correct / of) : "");
  const rows = suite.sets.flatMap((one) => one.judgements.map((judgement, at) => [one.name, judgement.name, judgement.samples.toLocaleString("en"),
    share(judgement.correct, judgement.samples), share(judgement.greedy_correct, judgement.greedy),
    at ? `${judgement.gained.toLocaleString("en")} to correct, ${judgement.lost.toLocaleString("en")} from correct` : ""]));
  const heads = ["model", "judgement", "samples, greedy ones apart", "correct", "greedy correct", "changed since the first judgement"];
  return el("div", { class: "scroll" }, el("table", { class: "plain counts" }, el("tr", {}, heads.map((name) => el("th", {}, name))),
    rows.map((row) => el("tr", {}, row.map((value) => el("td", {}, value))))));
}

function storedControls(data, suite, sides, filter, set, clear) {
  const any = (values) => [["", "all"], ...values.map((value) => [value, value])];
  const outcomes = [...new Set(suite.rows.flatMap((row) => row.verdicts.map((one) => one.outcome)))].sort();
  const labels = sides.all.map((one) => [one.label, one.label]);
  const search = el("input", { type: "search", value: filter.text, placeholder: "text of question, response or answer", "aria-label": "search",
    oninput: (event) => searched("stored", event.target.value, set("text")) });
  return el("div", { class: "controls" },
    data.stored.length > 1 ? choice("suite", data.stored.map((one) => [one.suite, one.suite]), suite.suite, set("suite")) : null,
    choice("samples of", labels, sides.left.label, set("left")),
    labels.length > 1 ? choice("beside", [["", "nothing"], ...labels], sides.right ? sides.right.label : "", set("right")) : null,
    choice("verdict", any(["correct", "wrong", ...(sides.right ? ["changed"] : [])]), filter.verdict, set("verdict")),
    choice("outcome", any(outcomes), filter.outcome, set("outcome")),
    sides.two ? null : choice("problem", any([...new Set(suite.problems.map((one) => one.id))]), filter.problem, set("problem")),
    choice("finish", any(["truncated", "whole"]), filter.finish, set("finish")),
    choice("kind", any(["greedy", "sampled"]), filter.greedy, set("greedy")),
    el("label", {}, "search", search), el("button", { onclick: clear }, "clear filters"));
}

function isCorrect(row, side) {
  return row.verdicts[side.at].outcome === "correct";
}

// Two judgements differ on a sample; two models on a problem, by the share that is correct or by the greedy sample.
function hasChanged(suite, row, sides) {
  const { left, right } = sides;
  if (right === null) return true;
  if (left.of === right.of) return isCorrect(row, left) !== isCorrect(row, right);
  const [one, other] = [left, right].map((side) => suite.problems[row.problem].counts[side.of][side.at]);
  const [first, second] = [left, right].map((side) => suite.rows.find((each) => each.set === side.of && each.problem === row.problem && each.greedy));
  return one[1] * other[0] !== other[1] * one[0] || Boolean(first && second && isCorrect(first, left) !== isCorrect(second, right));
}

function passesStored(suite, row, side, sides, filter) {
  const problem = suite.problems[row.problem];
  const verdicts = { correct: () => isCorrect(row, side), wrong: () => !isCorrect(row, side), changed: () => hasChanged(suite, row, sides) };
  const words = () => [problem.question, row.text, row.tail, ...row.verdicts.map((one) => one.answer)].join("\n").toLowerCase();
  return (filter.verdict === "" || verdicts[filter.verdict]()) &&
    (filter.outcome === "" || row.verdicts[side.at].outcome === filter.outcome) &&
    (sides.two || filter.problem === "" || problem.id === filter.problem) &&
    (filter.finish === "" || (filter.finish === "truncated") === (row.finish === "length")) &&
    (filter.greedy === "" || (filter.greedy === "greedy") === row.greedy) &&
    (filter.text === "" || words().includes(filter.text.toLowerCase()));
}

// One problem and the samples of two models; those that they solve most unequally come first.
function twoSets(suite, sides, filter, found, again) {
  const both = [sides.left, sides.right];
  const share = (place, side) => { const [samples, correct] = suite.problems[place].counts[side.of][side.at]; return samples ? correct / samples : 0; };
  const gap = (place) => Math.abs(share(place, sides.left) - share(place, sides.right));
  const places = [...new Set(found.map((row) => row.problem))].sort((a, b) => gap(b) - gap(a) || a - b);
  if (!places.length) return el("p", { class: "count" }, "0 problems, with these filters.");
  filter.page = Math.min(filter.page, places.length - 1);
  const problem = suite.problems[places[filter.page]];
  const told = (one) => both.map((side) => { const [samples, correct] = one.counts[side.of][side.at]; return `${correct}/${samples}`; }).join(" and ");
  const turn = (by, text) => el("button", { disabled: places[filter.page + by] === undefined, onclick: () => { filter.page += by; again("stored"); } }, text);
  const chooser = el("div", { class: "controls" }, el("span", { class: "count" }, `${places.length} problems`), turn(-1, "earlier"), turn(1, "later"),
    choice("problem", places.map((place, at) => [at, `${suite.problems[place].id}: correct ${told(suite.problems[place])}`]), filter.page,
      (value) => { filter.page = Number(value); again("stored"); }));
  const columns = both.map((side) => {
    const rows = found.filter((row) => row.set === side.of && suite.problems[row.problem] === problem);
    return [el("h3", { style: { color: setColour(side) } }, side.label), rows.map((row) => storedCard(suite, row, { left: side, right: null }, true, filter.text))];
  });
  return el("div", {}, chooser, problemLine(problem), pairOf(columns));
}

function problemLine(problem) {
  return el("p", {}, el("bdi", {}, problem.id), problem.question ? [": ", el("code", {}, el("bdi", {}, problem.question))] : null,
    problem.known ? [" known answer ", el("code", {}, el("bdi", {}, problem.known))] : null);
}

function setColour(side) {
  return side.run < 0 ? "var(--base)" : runColour(side.run);
}

function storedCard(suite, row, sides, bare = false, sought = "") {
  const problem = suite.problems[row.problem];
  const judged = [sides.left, sides.right].filter((side) => side !== null);
  const verdicts = judged.map((side) => {
    const one = row.verdicts[side.at];
    return el("span", {}, judged.length > 1 ? `${side.name}: ` : null, el("span", { class: `outcome ${one.outcome}` }, one.outcome), ` reward ${number(one.reward)}`,
      one.answer ? [" answer ", el("bdi", {}, one.answer)] : null, one.detail ? [" (", el("bdi", {}, one.detail), ")"] : null);
  });
  const finish = { length: "truncated", stop: "ended", abort: "aborted" }[row.finish] || row.finish;
  const facts = [bare ? null : el("bdi", {}, problem.id), el("span", {}, row.greedy ? "greedy" : `sample ${row.index}`), verdicts,
    problem.known && !bare ? el("span", {}, "known answer ", el("bdi", {}, problem.known)) : null, el("span", {}, finish),
    el("span", {}, `${row.tokens.toLocaleString("en")} tokens`), row.turns.length ? el("span", {}, `${row.turns.length} turns`) : null, el("span", {}, `seed ${row.seed}`)];
  const left = row.letters - row.text.length - row.tail.length;
  const plain = pieces(row.text, row.tail, row.letters);
  const said = row.letters < 0 ? el("p", { class: "note" }, "Its text was not kept.")
    : row.turns.length ? [bare ? null : el("pre", {}, el("bdi", { class: "prompt" }, problem.question)), turnList(row.turns, plain, plain, sought)]
    : el("pre", {}, bare ? null : el("bdi", { class: "prompt" }, problem.question), el("bdi", {}, row.text),
      row.tail ? [el("span", { class: "note" }, `… ${left.toLocaleString("en")} letters left out …`), el("bdi", {}, row.tail)] : null);
  return el("article", { class: "card", style: { "--colour": setColour(sides.left) } }, el("header", {}, facts), said);
}

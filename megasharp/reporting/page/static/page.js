// The parts of the page in order, and what is chosen on it. A part is drawn anew as a whole when something in it changes.
"use strict";

const RUN_COLOURS = 8;
const MARKS = { restart: "1 3", reset: "7 3", stage: "7 3 1 3" };
const BESIDE_TIME = ["Throughput", "GPUs (NVML)"], REST = "Everything else";

let data = JSON.parse(document.getElementById("data").textContent);
const state = { hidden: new Set(), log: false, smooth: 0, models: null, passLog: false, probes: {}, browser: browserState(), rest: false };

function runColour(run) {
  return `var(--run-${run % RUN_COLOURS})`;
}

// Of runs that nearly coincide, the one beneath is seen through the gaps of the other.
function runDash(run) {
  return ["solid", "dashed", "dotted"][run % 3];
}

// A base model is grey and dashed; a run's earlier models are paler than its last.
function modelStyle(model) {
  const one = data.models[model];
  if (one.run < 0) return { label: one.label, colour: runColour(data.runs.length + model - data.models.findIndex((other) => other.run < 0)), dash: "dashed", opacity: 1 };
  if (one.shared || (one.step === 0 && data.runs.length === 1)) return { label: one.label, colour: "var(--base)", dash: "dashed", opacity: 1 };
  const steps = data.models.filter((other) => other.run === one.run).map((other) => other.step);
  const share = one.step / Math.max(1, ...steps);
  return { label: one.label, colour: runColour(one.run), dash: one.last ? "solid" : one.step === 0 ? "dashed" : "dotted", opacity: 0.45 + 0.55 * share };
}

// Until somebody chooses: the bases and each run's last, whichever that is by now.
function chosenModels() {
  const chosen = (model) => (state.models === null ? model.last || model.step === 0 : state.models.has(nameOf(model)));
  return data.models.flatMap((model, at) => (chosen(model) ? [at] : []));
}

function nameOf(model) {
  return `${model.run} ${model.step} ${model.label}`;
}

function modelChips(among) {
  const shown = new Set(chosenModels());
  return el("div", { class: "controls models" }, among.map((at) => {
    const style = modelStyle(at), name = nameOf(data.models[at]);
    return chip(style.label, style.colour, shown.has(at), () => {
      state.models = new Set(chosenModels().map((one) => nameOf(data.models[one])));
      if (!state.models.delete(name)) state.models.add(name);
      ["passk", "candidates", "success"].forEach(redraw);
    }, style.dash);
  }));
}

function runChips(parts) {
  return data.runs.map((run, at) => chip(run.name, runColour(at), !state.hidden.has(at), () => {
    if (!state.hidden.delete(at)) state.hidden.add(at);
    parts.forEach(redraw);
  }, runDash(at)));
}

function head() {
  const cards = data.runs.map((run, at) => el("div", { class: "run", style: { "--colour": runColour(at) } }, el("strong", {}, run.name),
    el("ul", {}, run.facts.map((fact) => el("li", {}, fact)), run.marks.length ? el("li", {}, happened(run.marks)) : null,
      run.warnings.map((line) => el("li", { class: "warning" }, line)))));
  const words = data.words.length ? data.words : ["No evaluation has a successor yet: there is nothing to say about pass@k."];
  return [el("h1", {}, data.title), el("small", {}, `made ${data.made}${data.live ? ", refreshes while training goes on" : ""}`),
    el("ul", { class: "words" }, words.map((line) => el("li", {}, line))), el("div", { class: "runs" }, cards)];
}

function happened(marks) {
  const count = (kind) => marks.filter((mark) => mark.kind === kind).length;
  return Object.keys(MARKS).filter(count).map((kind) => `${count(kind)} ${kind}${count(kind) > 1 ? "s" : ""}`).join(", ");
}

function panel(figure) {
  const lines = [], marks = [];
  for (const one of figure.series.filter((series) => !state.hidden.has(series.run))) {
    const style = one.label
      ? { label: `${data.runs[one.run].name}: ${one.label}`, colour: runColour(one.run), dash: one.label.startsWith("discarded") ? "dashed" : "solid",
        opacity: one.label.endsWith("mean") ? 1 : 0.5 }
      : { label: data.runs[one.run].name, colour: runColour(one.run), dash: runDash(one.run) };
    const smooth = figure.noisy ? smoothed(one.points, state.smooth) : one.points;
    if (smooth !== one.points) lines.push({ ...style, dash: "solid", points: one.points, faint: true });
    lines.push({ ...style, points: smooth });
  }
  const last = Math.max(0, ...lines.flatMap((line) => line.points.map((point) => point[0])));
  data.runs.forEach((run, at) => state.hidden.has(at) || run.marks.filter((mark) => mark.step <= last).forEach((mark) =>
    marks.push({ x: mark.step, colour: runColour(at), dash: MARKS[mark.kind], text: `${run.name}, after step ${mark.step}: ${mark.text}` })));
  return el("figure", { "data-figure": figure.name }, el("figcaption", {}, figure.title), chart({ lines, marks, log: state.log, name: figure.name }));
}

function curves() {
  const parts = ["curves", "time"];
  const used = new Set(data.runs.flatMap((run) => run.marks.map((mark) => mark.kind)));
  const slider = el("input", { type: "range", min: 0, max: 0.3, step: 0.02, value: state.smooth, "aria-label": "smoothing",
    onchange: (event) => { state.smooth = Number(event.target.value); parts.forEach(redraw); } });
  const log = el("input", { type: "checkbox", checked: state.log, onchange: (event) => { state.log = event.target.checked; parts.forEach(redraw); } });
  const legend = Object.keys(MARKS).filter((kind) => used.has(kind)).map((kind) => ({ restart: "dotted", reset: "dashed", stage: "dash-dotted" }[kind] + ": " + kind));
  const sections = [...new Set(data.figures.map((figure) => figure.section))].filter((name) => !BESIDE_TIME.includes(name) && name !== REST);
  const rest = data.figures.filter((figure) => figure.section === REST);
  return el("section", { id: "curves" }, el("h2", {}, "Curves over steps"),
    el("div", { class: "controls" }, runChips(parts), el("label", {}, log, "logarithmic"), el("label", {}, "smoothing", slider),
      el("small", {}, state.smooth ? `means over ${percent(state.smooth)} of the points` : "as recorded")),
    legend.length ? el("p", { class: "note" }, `Vertical lines in a run's colour: ${legend.join(", ")}. Bands: 95% intervals.`) : null,
    sections.map((name) => [el("h3", {}, name), el("div", { class: "grid" }, data.figures.filter((figure) => figure.section === name).map(panel))]),
    rest.length ? el("details", { open: state.rest, ontoggle: (event) => {
      if (event.target.open !== state.rest) { state.rest = event.target.open; redraw("curves"); }
    } }, el("summary", {}, `${rest.length} more figures`), state.rest ? el("div", { class: "grid" }, rest.map(panel)) : null) : null);
}

function passk() {
  const part = el("section", { id: "passk" }, el("h2", {}, "pass@k versus k"));
  if (!data.pass_at_k.length) return fill(part, {}, [el("p", { class: "note" }, "No evaluation was recorded (eval.suites).")]);
  const shown = new Set(chosenModels());
  const among = [...new Set(data.pass_at_k.flatMap((suite) => suite.models.map((one) => one.model)))].sort((a, b) => a - b);
  const log = el("input", { type: "checkbox", checked: state.passLog, onchange: (event) => { state.passLog = event.target.checked; redraw("passk"); } });
  const lines = (models) => models.filter((one) => shown.has(one.model)).map((one) => ({ ...modelStyle(one.model), points: one.points }));
  const x = "k (tries a problem)";
  part.append(modelChips(among), el("div", { class: "controls" }, el("label", {}, log, "logarithmic")),
    ...data.pass_at_k.flatMap((suite) => [el("p", { class: "note" }, `${suite.suite}: ${suite.note}.`), el("div", { class: "pictures" },
      el("figure", { "data-figure": `pass@k ${suite.suite}` }, el("figcaption", {}, suite.suite),
        chart({ lines: lines(suite.models), axis: "log2", log: state.passLog, x, ends: true, name: `pass@k of ${suite.suite}` })),
      suite.changes.length ? el("figure", { "data-figure": `change ${suite.suite}` },
        el("figcaption", {}, `gained and lost against ${modelStyle(suite.base).label} `, el("span", {}, "the same problems; each run against its own samples of it")),
        chart({ lines: lines(suite.changes), axis: "log2", x, ends: true, zero: true, name: `change of pass@k of ${suite.suite}` })) : null)]));
  return part;
}

function candidatesPart() {
  const part = el("section", { id: "candidates" }, el("h2", {}, "What else might have been said"));
  if (!data.probes.length) {
    return fill(part, {}, [el("p", { class: "note" }, "No probe was recorded: eval.probe makes one at every evaluation, and `megasharp probe RUN` of what checkpoints there are.")]);
  }
  const shown = new Set(chosenModels());
  data.probes.forEach((probe, at) => part.append(...probePart(probe, at, probe.models.filter((one) => shown.has(one.model)))));
  return part;
}

function probePart(probe, at, models) {
  const chosen = (state.probes[at] = state.probes[at] || { text: 0, start: 0 });
  const again = () => redraw("candidates");
  const text = probe.texts[Math.min(chosen.text, probe.texts.length - 1)];
  const most = Math.max(0, text.tokens.length - SEGMENT);
  chosen.start = Math.min(chosen.start, most);
  const move = (by) => el("button", { disabled: by < 0 ? chosen.start === 0 : chosen.start >= most,
    onclick: () => { chosen.start = Math.max(0, Math.min(most, chosen.start + by)); again(); } }, by < 0 ? "earlier" : "later");
  const whose = data.probes.length > 1 ? `${probe.runs.map((run) => data.runs[run].name).join(", ")}: ` : "";
  const style = (one) => modelStyle(one.model);
  const bars = (of) => models.map((one) => ({ ...style(one), shares: of(one) }));
  return [el("p", {}, `${whose}${probe.note}. A column is a position: its likeliest tokens, the likeliest on top, until they hold 0.95 of the probability, at most 12; the stronger the colour, the likelier. Framed: the token of the response. Few candidates mean a distribution that has collapsed.`),
    modelChips(probe.models.map((one) => one.model)),
    el("div", { class: "controls" }, choice("response", probe.texts.map((one, place) => [place, `${one.problem}: ${one.prompt.slice(0, 60)}`]), chosen.text,
      (value) => { chosen.text = Number(value); chosen.start = 0; again(); }), most ? [move(-SEGMENT), move(SEGMENT)] : null,
      el("small", {}, `tokens ${chosen.start + 1} to ${Math.min(chosen.start + SEGMENT, text.tokens.length)} of ${text.whole}`)),
    el("div", { class: "wide matrices" }, models.map((one) => el("figure", { "data-figure": `candidates ${style(one).label}` },
      el("figcaption", { style: { color: style(one).colour } }, style(one).label, el("span", {}, ` mean entropy ${number(one.mean_entropy)} nats over ${one.tokens.toLocaleString("en")} tokens`)),
      el("div", { class: "scroll" }, matrix(one.cells[Math.min(chosen.text, one.cells.length - 1)] || [], text.tokens, probe.words, chosen.start))))),
    el("h3", {}, "All tokens of all responses"),
    el("div", { class: "grid" },
      el("figure", { "data-figure": "rank means" }, el("figcaption", {}, "mean probability by rank"),
        chart({ lines: models.map((one) => ({ ...style(one), points: one.rank_means.map((mean, rank) => [rank + 1, mean]) })), log: true, x: "rank of the candidate", name: "mean probability by rank" })),
      el("figure", { "data-figure": "entropy histogram" }, el("figcaption", {}, "token entropy ", el("span", {}, "share of tokens, log")),
        outlines({ bars: bars((one) => one.entropy), edges: probe.edges, log: true, x: "nats", name: "token entropy" })),
      [0, 1, 2].map((rank) => el("figure", { "data-figure": `rank ${rank + 1} bins` }, el("figcaption", {}, `probability of rank ${rank + 1} `, el("span", {}, "share of tokens, log")),
        outlines({ bars: bars((one) => one.rank_bins[rank]), edges: Array.from({ length: 21 }, (_, place) => place / 20), log: true, x: "probability", name: `probability of rank ${rank + 1}` }))))];
}

function success() {
  const part = el("section", { id: "success" }, el("h2", {}, "How often each prompt is solved"),
    el("p", {}, "Share of prompts by the share of their responses that is correct. Collapse moves prompts to both ends. Those at 0 have no correct response among these: more samples may still find one."));
  if (!data.success.length) return fill(part, {}, [el("p", { class: "note" }, "Neither evaluations nor responses were recorded.")]);
  const shown = new Set(chosenModels());
  part.append(modelChips([...new Set(data.success.flatMap((one) => one.bars.flatMap((bar) => (bar.model === null ? [] : [bar.model]))))]),
    el("div", { class: "wide" }, data.success.map((one) => {
      const bars = one.bars.filter((bar) => bar.model === null || shown.has(bar.model)).map((bar, at, all) => {
        if (bar.model !== null) return { ...modelStyle(bar.model), shares: bar.shares };
        const mine = all.filter((other) => other.run === bar.run);
        const place = mine.indexOf(bar);
        return { label: `${data.runs[bar.run].name}, ${bar.label}`, colour: runColour(bar.run), dash: place === mine.length - 1 ? "solid" : place ? "dashed" : "dotted",
          opacity: 0.5 + (0.5 * (place + 1)) / mine.length, shares: bar.shares };
      });
      const training = one.bars.some((bar) => bar.model === null);
      return el("figure", { "data-figure": `success ${one.source}` }, el("figcaption", {}, one.source, " ",
        el("span", {}, training ? "dotted: first third of the steps, solid: last" : "share of samples that is correct")),
      outlines({ bars, labels: one.labels, x: "share correct", name: one.source }));
    })));
  return part;
}

function errors() {
  const lines = data.code_errors.series.map((one) => ({ label: data.runs[one.run].name, colour: runColour(one.run), dash: runDash(one.run), points: one.points.map((point) => point.slice(0, 2)) }));
  const some = data.code_errors.series.some((one) => one.points.some((point) => point[2] > 0));
  return el("section", { id: "errors" }, el("h2", {}, "Correct responses with errors of code"), el("p", { class: "note" }, `${data.code_errors.note}. 2510.04028, section 4.2: such steps are reinforced with the rest of a correct response.`),
    lines.length && some ? el("div", { class: "wide" }, el("figure", { "data-figure": "code errors" }, el("figcaption", {}, "share of correct responses"), chart({ lines, name: "code errors" }))) : null);
}

function time() {
  const order = [...new Set(data.stages.flatMap((one) => one.names))];
  const beside = data.figures.filter((figure) => BESIDE_TIME.includes(figure.section));
  return el("section", { id: "time" }, el("h2", {}, "Time, throughput, GPUs"),
    el("div", { class: "wide" }, data.stages.map((one) => el("figure", { "data-figure": `stages ${data.runs[one.run].name}` },
      el("figcaption", { style: { color: runColour(one.run) } }, data.runs[one.run].name, el("span", {}, " seconds of a step and of the evaluation and save after it, by stage")), stacked({ ...one, order, name: `stages of ${data.runs[one.run].name}` }),
      el("p", { class: "note" }, one.names.map((name) => el("span", { class: "stage" }, el("span", { class: "swatch", style: { "--colour": stageColour(order.indexOf(name)) } }), name))),
      el("p", { class: "note" }, one.totals.map(([name, value]) => `${name} ${value}`).join(", "))))),
    el("div", { class: "grid" }, beside.map(panel)), data.telemetry ? el("p", { class: "note" }, data.telemetry) : null);
}

function settings() {
  const part = el("section", { id: "settings" }, el("h2", {}, "Settings that differ"));
  if (data.runs.length < 2) return fill(part, {}, [el("p", { class: "note" }, "One run: there is nothing to differ from.")]);
  if (!data.differences.length) return fill(part, {}, [el("p", { class: "note" }, "The same configuration.")]);
  part.append(el("div", { class: "scroll" }, el("table", { class: "plain" }, el("tr", {}, el("th", {}, "key"), data.runs.map((run) => el("th", {}, run.name))),
    data.differences.map((one) => el("tr", {}, el("td", {}, el("code", {}, one.key)), one.values.map((value) => el("td", {}, value)))))));
  return part;
}

const PARTS = {
  curves: [curves, "Curves"], passk: [passk, "pass@k"], candidates: [candidatesPart, "Candidates"], success: [success, "Prompts"],
  rollouts: [() => rolloutSection(data, state, redraw), "Responses"], errors: [errors, "Code errors"], time: [time, "Time"], settings: [settings, "Settings"],
};

function redraw(name) {
  tip.hide();
  document.getElementById(name).replaceWith(PARTS[name][0]());
}

function draw() {
  document.title = data.title;
  document.getElementById("head").replaceChildren(...head());
  document.getElementById("main").replaceChildren(...Object.values(PARTS).map(([part]) => part()));
  document.getElementById("foot").replaceChildren(`${data.runs.map((run) => run.folder).join(", ")}. Curves hold at most 400 points each, longer ones as means; models are the first, the last and some between. Made by megasharp report.`);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
let onScreen = "light";
window.addEventListener("beforeprint", () => { onScreen = document.documentElement.dataset.theme; setTheme("light"); });
window.addEventListener("afterprint", () => setTheme(onScreen));
document.getElementById("nav").append(...Object.entries(PARTS).map(([name, [, label]]) => el("a", { href: `#${name}` }, label)),
  el("span", { id: "live", class: "end note" }), el("button", { id: "theme", onclick: () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark") }, "dark / light"));
draw();

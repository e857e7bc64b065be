"use strict";
// The page of a run. #data is what report/page.py wrote: for every problem its distinct answers, and for every step and
// method the numbers of those in the pool. A change of what is chosen, `state`, draws anew what depends on it.

const data = JSON.parse(document.getElementById("data").textContent);
const methods = data.methods, lastStep = data.steps.length - 1;
// step: a place in data.steps; weights: as the bars of section 2 stand; k: of section 3; rollout, stage: of section 4.
const state = { step: lastStep, problem: 0, weights: [], k: 5, rollout: 0, stage: 0 };
const timers = {}; // by the button that starts and stops them

// ---- Small helpers ------------------------------------------------------------------------------------------------
const byId = (id) => document.getElementById(id);
const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => sum(values) / values.length;
const dot = (a, b) => sum(a.map((x, i) => x * b[i]));
const when = (shown, ...nodes) => (shown ? nodes : []);
const fixed = (x, digits = 3) => x.toFixed(digits).replace("-", "\u2212");
const SVG = new Set(["svg", "rect", "text", "line", "path", "circle"]);

/** An element of HTML or SVG with attributes and children. */
function el(name, attributes = {}, ...children) {
  const parent = SVG.has(name) ? byId("curve") : document.body;
  const node = document.createElementNS(parent.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Random numbers in [0, 1), the same ones every time the page is opened (mulberry32). */
const randomNumbers = (seed) => () => {
  seed = (seed + 0x6d2b79f5) | 0;
  let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
  t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
  return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
};
const random = randomNumbers(1);

/** Start or stop what a button repeats; its words while it stands, and while it runs. */
function repeat(id, on, [start, stop], pause, act) {
  clearInterval(timers[id]);
  timers[id] = on && setInterval(act, pause);
  byId(id).textContent = on ? `\u275a\u275a ${stop}` : `\u25b6 ${start}`;
}

// ---- What the data say --------------------------------------------------------------------------------------------
const problem = () => data.problems[state.problem];
const numbered = () => problem().vectors[0].map((_, i) => `objective ${i + 1}`);
const objectives = () => (data.objectives.length ? data.objectives : numbered());
const sampled = (method) => problem().pools[state.step][method.name];
const pool = (method) => sampled(method).answers;
const vectors = (method) => pool(method).map((i) => problem().vectors[i]);

/** What the answers in a pool are worth to the user of section 2. */
const worths = (method) => vectors(method).map((r) => dot(preferences(), r));

/** The weights that the bars of section 2 stand for. */
function preferences() {
  const total = sum(state.weights);
  return state.weights.map((x) => (total ? x / total : 1 / state.weights.length));
}

/** From the least to the most that any objective of the problem was worth. */
function range() {
  const all = problem().vectors.flat();
  return [Math.min(0, ...all), Math.max(1, ...all)];
}

/** best@k of n scores, exact: the highest is the best of k / n draws, the next of (n - k) / (n - 1) as many, ... */
function bestAtK(scores, k) {
  const sorted = [...scores].sort((a, b) => b - a), n = sorted.length;
  return (k / n) * sorted.reduceRight((rest, x, i) => x + ((n - i - k) / (n - i - 1 || 1)) * rest, 0);
}

// ---- Pictures of answers ------------------------------------------------------------------------------------------
const TILES = { "#": "#3b3b3b", L: "#f4b6a6", G: "#f7dc6f", D: "#aed9f7", S: "#e0e0e0", E: "#b8e0b0" };
const DASHES = ["none", "0.3 0.15", "0.1 0.12", "0.5 0.12 0.1 0.12", "0.6 0.3", "0.2 0.3", "0.1 0.3", "0.8 0.1"];

/** A path without the parts that lead back to where they began and pass no gold or diamond. */
const withoutLoops = (grid, path) => path.reduce((kept, cell) => {
  const back = kept.lastIndexOf(cell), idle = !kept.slice(back + 1).some((i) => "GD".includes(grid[i]));
  return [...(back >= 0 && idle ? kept.slice(0, back) : kept), cell];
}, []);

/** The maze with the routes of `places` in a pool that reach the exit; one may be chosen, a few are told apart. */
function maze(method, places, chosen) {
  const n = problem().grid.length, grid = [...problem().grid.join("")], answers = pool(method);
  const jitter = randomNumbers(7), shifts = answers.map(() => [0, 0].map(() => 0.5 + 0.56 * (jitter() - 0.5)));
  const tile = (i) => ({ x: i % n, y: Math.floor(i / n) });
  const box = el("svg", { class: "maze", viewBox: `-0.03 -0.03 ${n + 0.06} ${n + 0.06}`, role: "img",
    "aria-label": `Routes of ${method.title}: ${sampled(method).summary}` });
  const draw = (place, style) => {
    const cells = problem().answers[answers[place]];
    if (!cells || grid[cells.at(-1)] !== "E") return; // failed routes are counted, not drawn
    const [dx, dy] = place === chosen ? [0.5, 0.5] : shifts[place];
    const points = withoutLoops(grid, cells).map((i) => `${tile(i).x + dx},${tile(i).y + dy}`);
    box.append(el("path", { d: `M${points.join("L")}`, fill: "none", "stroke-linejoin": "round", ...style }));
  };
  const square = { width: 1, height: 1, stroke: "#ddd", "stroke-width": 0.03 };
  grid.forEach((kind, i) => box.append(el("rect", { ...tile(i), ...square, fill: TILES[kind] || "white" })));
  const few = places.length < answers.length;
  const [width, opacity] = few ? [0.11, 0.9] : [0.055, chosen === undefined ? 0.4 : 0.22];
  places.forEach((place, i) => place === chosen || draw(place, { stroke: method.color, "stroke-width": width, opacity,
    ...(few && { "stroke-dasharray": DASHES[i] }) }));
  const framed = when(chosen !== undefined, ["white", 0.34], ["#1c1c1c", 0.24], [method.color, 0.14]);
  for (const [stroke, thick] of framed) draw(chosen, { stroke, "stroke-width": thick });
  const letter = { dx: 0.5, dy: 0.63, "text-anchor": "middle", style: "font-size: 0.36px; font-weight: bold" };
  grid.forEach((kind, i) => "SEGDL".includes(kind) && box.append(el("text", { ...tile(i), ...letter }, kind)));
  return box;
}

/** Numbers as a row of squares, each filled from below: empty at `low`, full at `high`. */
function squares(numbers, color, low, high) {
  const share = (x) => `${Math.round((100 * (x - low)) / (high - low))}%`;
  return el("span", { class: "cells", role: "img", "aria-label": numbers.map((x) => +x.toFixed(2)).join(", ") },
    ...numbers.map((x, i) => el("i", { title: `${objectives()[i]}: ${+x.toFixed(3)}`,
      style: `background: linear-gradient(to top, ${color} ${share(x)}, white 0)` })));
}

/** Preference weights as numbers, after these names if there are any; many of them as squares. */
function weighting(w, names) {
  if (w.length > 4) return squares(w, "#444", 0, Math.max(...w));
  return names ? w.map((x, i) => `${names[i]}\u00a0${fixed(x, 2)}`).join(", ") : w.map((x) => fixed(x, 2)).join(" ");
}

/** Whether an answer of the fence names colours and nothing else: it is drawn as squares of them. */
const isPaint = (text) => data.paints && text.split(/\s+/).every((word) => CSS.supports("color", word));

/** A row of a list: what stands before it, the answer's reward vector and text. */
function row(before, answer, color, chosen) {
  const text = problem().answers[answer], said = text === null ? "(no answer)" : text.trim() || "(empty)";
  const words = said.split(/\s+/), line = words.join(" "), marks = problem().marks[answer];
  const paint = () => words.map((word) => el("i", { style: `background: ${word}` }));
  const marked = (word) => {
    const color = marks[word.toLowerCase().replace(/[^a-z]/g, "")];
    return color ? el("b", { style: `color: ${color}` }, word) : word;
  };
  const grey = data.marks && !Object.keys(marks).length ? { class: "soft" } : {};
  const short = line.length > 120 ? `${line.slice(0, 119)}\u2026` : line;
  const spans = short.split(" ").flatMap((word, i) => [...when(i, " "), marked(word)]);
  return el("div", { class: chosen ? "answer best" : "answer" }, el("span", { class: "number" }, before),
    squares(problem().vectors[answer], color, ...range()),
    isPaint(said) ? el("span", { class: "paint", role: "img", title: said, "aria-label": said }, ...paint()) :
      el("code", { title: said, ...grey }, ...spans));
}

/** The most frequent answers of a pool, the chosen one first; of a few all, in their order. */
function list(method, places, chosen) {
  const answers = pool(method), counts = new Map(), first = ([answer]) => answer === answers[chosen];
  for (const answer of answers) counts.set(answer, (counts.get(answer) || 0) + 1);
  const often = [...counts].sort((a, b) => first(b) - first(a) || b[1] - a[1]).slice(0, 8);
  const more = when(counts.size > 8, el("small", {}, `and ${counts.size - 8} more that differ`));
  return el("div", {}, ...(places.length < answers.length ?
    places.map((place, i) => row(`y${i + 1}`, answers[place], method.color)) :
    [...often.map((each) => row(`${each[1]}\u00d7`, each[0], method.color, first(each))), ...more]));
}

const picture = (...asked) => (problem().grid ? maze : list)(...asked);
const key = (method) => el("span", { class: "key", style: `background: ${method.color}` });

/** A method's panel: its name, a picture of its pool, and lines, below a maze and above a list, which grows. */
function panel(method, chosen, ...texts) {
  const lines = texts.map((text) => el("small", { style: "display: block" }, text));
  const shown = picture(method, [...pool(method).keys()], chosen), heading = el("h3", {}, key(method), method.title);
  return el("figure", {}, heading, ...(problem().grid ? [shown, ...lines] : [...lines, shown]));
}

const tr = (cells, attributes) => el("tr", attributes, ...cells);
const th = (content, scope = "row") => el("th", { scope }, ...[content].flat());
const td = (content, attributes) => el("td", attributes, content);
const table = (head, rows) => el("table", {}, el("thead", {}, tr(head.map((cell) => th(cell, "col")))),
  el("tbody", {}, ...rows));

// ---- Charts -------------------------------------------------------------------------------------------------------
/** A line chart in an <svg>; lines: {color, points, width, opacity}, dots: {color, points: [[x, y]]}; the axes show
 *  the numbers `reaches` and `shows`, too. */
function chart(svg, { lines, dots = [], cursor, xLabel, reaches = [], shows = [0] }) {
  const width = svg.clientWidth || 360, [left, right, top, bottom] = [58, width - 20, 12, 202];
  const all = [...lines, ...dots].flatMap(({ points }) => points);
  const xs = [...all.map(([x]) => x), ...reaches], ys = all.map(([, y]) => y);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs, Math.min(...xs) + 1)];
  const [low, high] = [Math.min(...shows, ...ys), Math.max(...shows, ...ys)], room = 0.06 * (high - low) || 0.1;
  const [y0, y1] = [low === 0 ? 0 : low - room, high + room];
  const X = (x) => left + ((x - x0) / (x1 - x0)) * (right - left);
  const Y = (y) => bottom - ((y - y0) / (y1 - y0)) * (bottom - top);
  const add = (name, attributes, ...text) => svg.append(el(name, attributes, ...text));
  const write = (x, y, anchor, text) => add("text", { x, y, "text-anchor": anchor }, String(text));
  svg.setAttribute("viewBox", `0 0 ${width} 250`);
  svg.style.height = "250px";
  svg.replaceChildren();
  for (const y of ticks(y0, y1, 5)) {
    add("line", { x1: left, x2: right, y1: Y(y), y2: Y(y), stroke: "#e3e3e3" });
    write(left - 8, Y(y) + 5, "end", y);
  }
  for (const x of ticks(x0, x1, width / 90)) write(X(x), bottom + 20, "middle", x);
  write((left + right) / 2, 244, "middle", xLabel);
  add("line", { class: "cursor", x1: X(cursor), x2: X(cursor), y1: top, y2: bottom, stroke: "#1c1c1c",
    "stroke-width": 1.5 });
  for (const { color, points, width: thick = 3, opacity = 1 } of lines) {
    const d = points.map(([x, y]) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join("L");
    add("path", { d: `M${d}`, fill: "none", stroke: color, "stroke-width": thick, opacity });
  }
  dots.forEach(({ color, points: [[x, y]] }) =>
    add("circle", { cx: X(x), cy: Y(y), r: 7, fill: color, stroke: "white", "stroke-width": 2 }));
}

/** Round numbers from a to b, about n of them. */
function ticks(a, b, n) {
  const raw = (b - a) / Math.max(1, n), power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const first = Math.ceil(a / step - 1e-9), count = Math.floor(b / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, i) => +((first + i) * step).toFixed(6));
}

// ---- 1. The film --------------------------------------------------------------------------------------------------
function drawFilm() {
  const step = data.steps[state.step];
  byId("now").textContent = `${step} of ${data.steps.at(-1)}`;
  byId("step").value = state.step;
  byId("step").setAttribute("aria-valuetext", `step ${step}`);
  byId("film").replaceChildren(...methods.map((method) => {
    const kinds = new Set(vectors(method).map(String)).size;
    return panel(method, undefined, sampled(method).summary,
      `${kinds} distinct reward vector${kinds === 1 ? "" : "s"}`);
  }));
  ["diversity", "reward"].forEach((name, i) => {
    const lines = methods.flatMap(({ curve, color }) => {
      const points = curve.map((row) => [row[0], row[i + 1]]);
      const reach = Math.max(0, Math.floor((Math.min(11, points.length / 3) - 1) / 2));  // fewer of a short run
      const near = (at) => points.slice(Math.max(0, at - reach), at + reach + 1).map(([, y]) => y);
      const smooth = points.map(([x], at) => [x, mean(near(at))]);
      return when(points.length, { color, points, width: 1, opacity: 0.35 }, { color, points: smooth });
    });
    chart(byId(name), { lines, xLabel: "training step", cursor: step, reaches: [data.steps[0], data.steps.at(-1)] });
  });
}

function play(on) {
  if (on && state.step === lastStep) setStep(0);
  repeat("play", on, ["Play", "Pause"], 450, () => {
    if (state.step < lastStep) setStep(state.step + 1);
    if (state.step === lastStep) play(false);
  });
}

// ---- 2. Whose best? -----------------------------------------------------------------------------------------------
/** One bar for each objective of the problem. */
function makeWeights() {
  state.weights = objectives().map(() => 50);
  byId("weights").replaceChildren(...objectives().map((name, i) => {
    const id = `w${i}`, input = el("input", { type: "range", id, min: 0, max: 100, value: 50 });
    input.addEventListener("input", () => setWeights(state.weights.map((w, j) => (i === j ? +input.value : w))));
    return el("div", {}, el("label", { for: id }, el("span", {}, name), el("output", { for: id })), input);
  }));
}

function drawTaste() {
  const w = preferences(), most = range()[1];
  const best = methods.map((method) => {
    const scores = worths(method);
    const place = scores.reduce((first, x, i) => (x > scores[first] + 1e-9 ? i : first), 0); // the first of equals
    return { method, place, worth: scores[place] };
  });
  state.weights.forEach((x, i) => (byId(`w${i}`).value = x));
  document.querySelectorAll("#weights output").forEach((output, i) => (output.textContent = fixed(w[i], 2)));
  byId("worth").replaceChildren(...best.map(({ method, worth }) => el("div", { class: "bar" },
    el("span", {}, key(method), method.title), el("span", { class: "number" }, fixed(worth)),
    el("i", { style: `width: ${100 * Math.max(0, worth / most)}%; background: ${method.color}` }))));
  byId("taste").replaceChildren(...best.map(({ method, place }) => {
    const values = vectors(method)[place].map((x, i) => `${objectives()[i]}\u00a0${+x.toFixed(2)}`).join(", ");
    const shown = panel(method, place, problem().grid ? values : "");
    shown.dataset.best = pool(method)[place];
    return shown;
  }));
}

// ---- 3. With k candidates -----------------------------------------------------------------------------------------
function startOver() {
  Object.assign(state, { draws: 0, sums: {}, last: {} }); // how many, and by method their sums and the last one
  drawLuck();
}

/** So many times k places of every pool, without replacement; the best of them joins the running mean. */
function drawMore(times) {
  state.draws += times;
  for (const method of Array(times).fill(methods).flat()) {
    const scores = worths(method), places = [...scores.keys()];
    for (let i = 0; i < state.k; i++) {
      const j = i + Math.floor(random() * (places.length - i));
      [places[i], places[j]] = [places[j], places[i]];
    }
    const taken = places.slice(0, state.k), best = taken.reduce((a, b) => (scores[b] > scores[a] ? b : a));
    state.sums[method.name] = (state.sums[method.name] || 0) + scores[best];
    state.last[method.name] = { taken: new Set(taken), best };
  }
  drawLuck();
}

/** The pool as bars, as high as their worth: those drawn in colour, the best of them framed. */
function strip(method) {
  const scores = worths(method), last = state.last[method.name], width = 300 / scores.length, [low, high] = range();
  const said = `${method.title}: ${last ? `best of this draw ${fixed(scores[last.best])}` : "nothing drawn yet"}`;
  return el("svg", { class: "strip", viewBox: "0 0 300 34", role: "img", "aria-label": said },
    ...scores.map((score, i) => {
      const height = 2 + (30 * (score - low)) / (high - low);
      return el("rect", { x: (i + 0.1) * width, y: 33 - height, width: 0.8 * width, height, "stroke-width": 2,
        fill: last?.taken.has(i) ? method.color : "#dcdcdc", stroke: last?.best === i ? "#1c1c1c" : "none" });
    }));
}

function drawLuck() {
  const { k, draws, sums, last } = state;
  byId("k").value = byId("k-now").textContent = k;
  byId("user").replaceChildren(weighting(preferences(), objectives()));
  const curves = methods.map((method) => worths(method).map((_, i, scores) => [i + 1, bestAtK(scores, i + 1)]));
  chart(byId("curve"), {
    xLabel: "candidates k", cursor: k, shows: range(),
    lines: methods.map(({ color }, i) => ({ color, points: curves[i] })),
    dots: draws ? methods.map(({ color, name }) => ({ color, points: [[k, sums[name] / draws]] })) : [],
  });
  byId("draws").replaceChildren(...methods.flatMap((method) => [el("small", {}, method.title), strip(method)]));
  const [low, high] = range();
  byId("scale").textContent = `A bar is one of the ${pool(methods[0]).length} candidates, as high as its worth, from ` +
    `${fixed(low, 2)} to ${fixed(high, 2)}. Those of the last draw are colored, the best of them is framed.`;
  byId("means").replaceChildren(table(["", "this draw", `mean of ${draws}`, "exact"], methods.map((method, i) => {
    const { name, title } = method, exact = curves[i][k - 1][1];
    const numbers = draws ? [worths(method)[last[name].best], sums[name] / draws, exact] : [NaN, NaN, exact];
    return tr([th([key(method), title]), ...numbers.map((x) => td(Number.isNaN(x) ? "\u2013" : fixed(x)))]);
  })));
}

// ---- 4. What a set is paid ----------------------------------------------------------------------------------------
const STAGES = [
  "The vectors. One rollout holds a set S of answers y, and each is judged on every objective: r(y).",
  "The weightings. Nobody knows what a user will care for, so weightings w are drawn at random; five are shown. " +
    "Under each every answer is worth w \u00b7 r(y).",
  "The max. Under a weighting only the best answer of the set counts. A second one pays where it beats the first.",
  "The mean. The set is worth the mean of these maxima over all weightings drawn: R(S).",
  "The advantages. A rollout is reinforced if its set is worth more than those of its group: " +
    "A = (R \u2212 mean of R) / deviation of R. Here the group is all rollouts of this pool.",
];

/** The policy of part 4, if one writes sets. */
function setMethod() {
  const able = methods.filter((method) => sampled(method).R);
  return able.find(({ name }) => name === "vpo") || able[0];
}

/** The rollout with the largest advantage: one in which something is learnt. */
function chooseRollout() {
  const A = setMethod() ? sampled(setMethod()).A : [0];
  state.rollout = A.indexOf(Math.max(...A));
}

function drawSet() {
  const method = setMethod(), stage = state.stage, last = STAGES.length - 1;
  const ends = { back: stage === 0, next: stage === last, rollout: false };
  for (const id in ends) byId(id).disabled = !method || ends[id];
  byId("stage-text").textContent = method ? `${stage + 1}/${last + 1} ${STAGES[stage]}` :
    methods.some(({ m }) => m > 1) ? "The pool is too small: it holds no two rollouts to compare." :
      "No policy of this run writes several answers in a rollout; train.py --method vpo with its --out adds one.";
  if (!method) return;

  const { R, A, best } = sampled(method), g = (state.rollout = Math.min(state.rollout, R.length - 1));
  const places = [...pool(method).keys()].slice(g * method.m, (g + 1) * method.m);
  const set = places.map((place) => vectors(method)[place]), names = set.map((_, i) => `r(y${i + 1})`);
  Object.assign(byId("rollout"), { max: R.length - 1, value: g });
  byId("rollout-now").textContent = `${g + 1} of ${R.length}, by ${method.title}, after step ${data.steps[state.step]}`;

  const dash = (i) => el("svg", { class: "dash", viewBox: "0 0 2 0.2" }, el("path", { d: "M0,0.1L2,0.1",
    stroke: method.color, "stroke-width": 0.13, "stroke-dasharray": DASHES[i] })); // the line of the i-th route
  const heads = names.map((name, i) => (problem().grid ? [name, dash(i)] : name));
  byId("vectors").replaceChildren(picture(method, places), table(["", ...heads],
    objectives().map((name, j) => tr([th(name), ...set.map((r) => td(fixed(r[j], 2)))]))));

  const max = stage >= 2, weighed = problem().weights.map((w, j) => {
    const worth = set.map((r) => dot(w, r)), most = Math.max(...worth);
    const top = max && most > Math.min(...worth) && most; // where all are worth the same none has won
    return tr([th(weighting(w)), ...worth.map((x) => td(fixed(x), x === top ? { class: "won" } : {})),
      ...when(max, td(fixed(best[g][j])))]);
  });
  const columns = ["weighting w", ...names.map((name) => `w \u00b7 ${name}`), ...when(max, "max")];
  const count = `R(S) = the mean over all ${data.draws} weightings = `;
  byId("scores").replaceChildren(...when(stage >= 1, table(columns, weighed)),
    ...when(stage >= 3, el("p", {}, count, el("strong", { id: "R" }, fixed(R[g])))));
  const bar = (x) => el("i", { class: "length",
    style: `width: ${(100 * Math.max(0, x)) / Math.max(1e-9, ...R)}%; background: ${method.color}` });
  const mean = R.reduce((sum, x) => sum + x, 0) / R.length;
  const deviation = Math.sqrt(R.reduce((sum, x) => sum + (x - mean) ** 2, 0) / R.length);
  const sum = `mean of R = ${fixed(mean)}, deviation = ${fixed(deviation)}, so A of rollout ${g + 1} = (${fixed(R[g])} ` +
    `\u2212 ${fixed(mean)}) / ${fixed(deviation)} = ${fixed(A[g], 2)}`;
  const group = R.map((x, i) => tr([i + 1, fixed(x), fixed(A[i], 2), bar(x)].map((cell) => td(cell)),
    i === g ? { class: "chosen" } : {}));
  byId("group").replaceChildren(...when(stage === last, table(["rollout", "R(S)", "A", "R(S)"], group), el("p", {}, sum)));
}

// ---- What is chosen -----------------------------------------------------------------------------------------------
function setStep(step) {
  state.step = step;
  chooseRollout();
  [drawFilm, drawTaste, startOver, drawSet].forEach((draw) => draw());
}

function setWeights(weights) {
  state.weights = weights;
  drawTaste();
  startOver();
}

/** Someone whose preferences are uniform on the simplex. */
function randomUser() {
  const draws = objectives().map(() => -Math.log(1 - random()));
  setWeights(draws.map((x) => Math.round((100 * x) / Math.max(...draws))));
}

function setProblem(index) {
  state.problem = index;
  byId("question").textContent = problem().text;
  const sizes = problem().pools.flatMap(Object.values).map(({ answers }) => answers.length);
  byId("k").max = Math.min(...sizes);
  state.k = Math.min(state.k, ...sizes);
  makeWeights();
  setStep(state.step);
}

const titles = methods.map((method) => method.title).join(", "), count = data.problems.length;
byId("asked").textContent = data.model === "tiny" ?
  "The problem in words" : "What the model is asked";
byId("about").textContent = `Task ${data.task}, model ${data.model}, seed ${data.seed}; ${titles}, grown from the same start. ` +
  `${count === 1 ? "One held-out problem" : `${count} held-out problems`}, ${pool(methods[0]).length} answers of each policy at every step shown, sampled at temperature ${data.temperature}.`;
byId("marks").textContent = problem().grid ?
  "S start, E exit, G gold, D diamonds, L lava, dark: wall. A line is a route that reaches the exit; others are " +
  "counted, not drawn." :
  "A row is an answer: how often it is in the pool, a square for every objective" +
  `${data.objectives.length ? ` (${data.objectives.join(", ")})` : ""}, filled as far as it was earned, and the answer ` +
  `itself${data.paints || data.marks ? `; ${data.legend}` : ""}.`;
if (!problem().grid) byId("question").parentNode.open = true;
if (!problem().grid) document.documentElement.style.setProperty("--panel", "330px");
byId("legend").append(...methods.map((method) => el("span", {}, key(method), method.title)));
byId("problem").append(...data.problems.map((_, i) => el("option", { value: i }, `${i + 1} of ${count}`)));
byId("problem").parentNode.hidden = count === 1;
byId("step").max = lastStep;
const EVENTS = { BUTTON: "click", INPUT: "input", SELECT: "change" };
const ACTIONS = {
  problem: setProblem,
  step: (step) => { play(false); setStep(step); },
  play: () => play(!timers.play),
  equal: () => setWeights(objectives().map(() => 50)),
  any: randomUser,
  another: randomUser,
  k: (k) => { state.k = k; startOver(); },
  once: () => drawMore(1),
  many: () => repeat("many", !timers.many, ["Keep drawing", "Stop"], 60, () => drawMore(4)),
  over: startOver,
  rollout: (rollout) => { state.rollout = rollout; drawSet(); },
  back: () => { state.stage -= 1; drawSet(); },
  next: () => { state.stage += 1; drawSet(); },
};
Object.entries(ACTIONS).forEach(([id, act]) =>
  byId(id).addEventListener(EVENTS[byId(id).tagName], () => act(+byId(id).value)));
window.addEventListener("resize", () => { drawFilm(); drawLuck(); });
byId("problem").value = data.opens;
setProblem(data.opens);

"use strict";
// What the page does besides charts: light and dark, the strip of layers, the slider. Data comes from #facts, and text
// goes in as text only (textContent), so that a layer may have any name.

const facts = JSON.parse(document.getElementById("facts").textContent);
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const times = (ranks) => ranks.join(" × ");
const counted = (number) => `${number} ${number === 1 ? "layer" : "layers"}`;
const percent = (share) => `${(100 * share).toFixed(1)} %`;

// Four digits at most, with the unit that suits: 29.4 M.
function macs(value) {
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (value >= 0.9995 * size) return `${(value / size).toPrecision(3).replace(/e\+?.*/, "")} ${unit}`;
  }
  return String(value);
}

// From blue over teal to amber with depth, so that a layer has one colour everywhere; lighter on a dark page.
const DEPTHS = [[43, 79, 194], [24, 140, 148], [125, 166, 74], [222, 158, 54]];
function colour(at, count) {
  const place = count > 1 ? (at / (count - 1)) * (DEPTHS.length - 1) : 0;
  const from = Math.min(Math.floor(place), DEPTHS.length - 2);
  const lift = theme.dark() ? 0.25 : 0;
  const mixed = DEPTHS[from].map((low, i) => {
    const value = low + (DEPTHS[from + 1][i] - low) * (place - from);
    return Math.round(value + (255 - value) * lift);
  });
  return `rgb(${mixed.join(",")})`;
}

// --- light and dark ------------------------------------------------------------------------------------------------

const redraw = []; // what has colours that CSS does not reach

const theme = (() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = byId("theme");
  const remembered = () => {
    try {
      return localStorage.getItem("leanconv-theme");
    } catch {
      return null; // some browsers keep nothing for a file
    }
  };
  const paper = matchMedia("print");
  const dark = () => !paper.matches && (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => {
    button.setAttribute("aria-pressed", String(dark()));
    redraw.forEach((draw) => draw());
  };
  if (remembered()) root.dataset.theme = remembered();
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try {
      localStorage.setItem("leanconv-theme", root.dataset.theme);
    } catch {
      // then it holds until the page is closed
    }
    show();
  });
  system.addEventListener("change", show);
  paper.addEventListener("change", show); // paper is always light
  return { show, dark };
})();

// --- the strip -------------------------------------------------------------------------------------------------------

function describe(layer) {
  const head = `${layer.name}: ${macs(layer.macs_before)} → ${macs(layer.macs_after)} MACs`;
  if (!layer.scheme) return `${layer.name}: ${macs(layer.macs_before)} MACs, left alone${layer.reason ? ` (${layer.reason})` : ""}`;
  const ratio = (layer.macs_before / layer.macs_after).toFixed(2);
  return `${head} (${ratio}x), ${layer.scheme}, rank ${times(layer.ranks)} of ${times(layer.limits)}, ` +
    `energy ${percent(layer.energy)}, error ${layer.error === null ? "infinite" : layer.error.toFixed(3)}` +
    (facts.tuned ? " before fine-tuning" : "");
}

function drawStrip() {
  const [WIDTH, TOP, GAP, BOTTOM] = [1000, 52, 66, 52];
  const made = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const many = facts.layers.length > 60 ? "many" : "";
  const svg = made("svg", {
    viewBox: `0 0 ${WIDTH} ${TOP + GAP + BOTTOM}`, preserveAspectRatio: "none", class: many,
    role: "listbox", "aria-orientation": "horizontal", "aria-label": "Layers by cost, before and after",
  });
  const scale = WIDTH / facts.macs_before;
  let above = 0;
  let below = (WIDTH - facts.macs_after * scale) / 2;
  const nodes = facts.layers.map((layer, at) => {
    const [a, b] = [layer.macs_before * scale, layer.macs_after * scale];
    const group = made("g", { class: "layer", role: "option", tabindex: at ? -1 : 0, "aria-selected": "false", "aria-label": describe(layer) });
    const path = made("path", { d: `M${above} ${TOP}H${above + a}L${below + b} ${TOP + GAP}H${below}Z` });
    const before = made("rect", { x: above, y: 0, width: a, height: TOP });
    const after = made("rect", { x: below, y: TOP + GAP, width: b, height: BOTTOM });
    group.append(path, before, after);
    svg.append(group);
    above += a;
    below += b;
    return group;
  });
  const paint = () =>
    nodes.forEach((node, at) => {
      const fill = facts.layers[at].scheme ? colour(at, nodes.length) : "var(--alone)";
      for (const shape of node.children) shape.setAttribute("fill", fill);
    });
  let now = 0;
  const choose = (at, focus) => {
    nodes[now].classList.remove("on");
    nodes[now].setAttribute("tabindex", -1);
    nodes[now].setAttribute("aria-selected", "false");
    now = at;
    nodes[now].classList.add("on");
    nodes[now].setAttribute("tabindex", 0);
    nodes[now].setAttribute("aria-selected", "true");
    if (focus) nodes[now].focus();
    byId("readout").textContent = describe(facts.layers[now]);
  };
  nodes.forEach((node, at) => {
    node.addEventListener("pointerenter", () => choose(at, false));
    node.addEventListener("click", () => choose(at, true));
    node.addEventListener("focus", () => choose(at, false));
  });
  svg.addEventListener("keydown", (event) => {
    const last = nodes.length - 1;
    const to = { ArrowRight: Math.min(now + 1, last), ArrowLeft: Math.max(now - 1, 0), Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to, true);
  });
  paint();
  redraw.push(paint);
  const line = (label, value) => element("p", { class: "ends" }, element("span", {}, label), element("b", {}, `${macs(value)} MACs`));
  byId("strip").append(line("before", facts.macs_before), svg, line("after", facts.macs_after));
}

// --- what if ---------------------------------------------------------------------------------------------------------

// Spectra travel as float64, all bits of them: the ranks must come out as Python's.
function unpacked(text) {
  if (text === null) return null;
  return new Float64Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
}

function keptSpectra() {
  const layers = facts.spectra.layers.map((layer) => ({
    ...layer, channel: unpacked(layer.channel), spatial: unpacked(layer.spatial),
  }));
  return { ...facts.spectra, layers };
}

// The slider should not end at a refusal: the last of its places up to `end` that can be had, if one is soon found.
function lastMet(choose, end) {
  const until = performance.now() + 300; // milliseconds
  for (let twentieths = Math.round(20 * end); twentieths > 22 && performance.now() < until; twentieths -= 1) {
    if (choose.select(twentieths / 20).ok) return twentieths / 20;
  }
  return end;
}

function whatIf(kept) {
  const choose = chooser(kept);
  const now = new Map(facts.layers.map((layer) => [layer.name, layer]));
  const [slider, exact, said, body] = ["what-slider", "what-number", "what-said", "what-body"].map(byId);
  const most = Math.floor(100 * choose.reachable) / 100;
  const top = Math.max(Math.min(most, Math.max(10, 2 * facts.target)), 1.1);
  slider.max = String(lastMet(choose, Math.floor(20 * top) / 20));
  exact.max = String(most);
  byId("what-most").textContent = `With every rank at 1 it would be ${most.toFixed(2)}x.`;

  // The rows are made once; moving the slider changes what is in them.
  const rows = choose.candidates.map((c) => {
    const layer = now.get(c.name);
    const was = layer && layer.scheme ? `${layer.scheme} ${times(layer.ranks)}` : "whole";
    const cells = { form: element("td", { class: "new" }), macs: element("td"), energy: element("td") };
    cells.bar = element("span", { class: "bar" });
    const row = element(
      "tr", {}, element("th", { scope: "row" }, c.name), element("td", {}, was), cells.form,
      element("td", {}, macs(c.cost.dense)), cells.macs, cells.energy,
    );
    row.dataset.layer = c.name;
    body.append(row);
    return { c, row, cells, was };
  });

  const box = body.closest(".box");
  const command = byId("what-command");

  // Nothing of an earlier answer is left beside it.
  function refuse(sentence) {
    said.textContent = sentence;
    box.hidden = true;
    command.textContent = "";
  }

  function show() {
    const speedup = Number(exact.value);
    body.dataset.speedup = String(speedup);
    if (!(speedup > 1)) return refuse("Give a number above 1.");
    const found = choose.select(speedup);
    if (!found.ok) return refuse(found.sentence);
    box.hidden = false;
    const takers = new Map(found.merged.map(([giver, taker]) => [taker, giver]));
    for (const { c, row, cells, was } of rows) {
      const choice = found.plan.get(c.name);
      const merged = !choice && takers.has(c.name);
      const giver = merged && found.plan.get(takers.get(c.name)).ranks;
      const form = choice ? `${choice.scheme} ${times(choice.ranks)}` : merged ? `merged ${giver[giver.length - 1]}` : "whole";
      cells.form.textContent = form;
      row.dataset.scheme = choice ? choice.scheme : "";
      row.dataset.ranks = choice ? choice.ranks.join(",") : "";
      row.classList.toggle("changed", form !== was);
      const cost = found.macs.get(c.name);
      cells.bar.style.width = `${(100 * cost) / c.cost.dense}%`;
      cells.macs.replaceChildren(macs(cost), element("span", { class: "bars", "aria-hidden": "true" }, cells.bar));
      cells.energy.textContent = percent(choice ? c.energy(choice) : 1);
    }
    const after = facts.macs_before / found.speedup;
    const changed = rows.filter(({ row }) => row.classList.contains("changed")).length;
    said.textContent =
      `At ${speedup}x: ${counted(found.plan.size)} in factors, ${macs(facts.macs_before)} → ${macs(after)} MACs ` +
      `(${found.speedup.toFixed(3)}x, skipped layers counted); ${changed ? counted(changed) : "no layer"} ` +
      `${changed > 1 ? "differ" : "differs"} from this run.`;
    command.textContent = facts.another.replaceAll("{speedup}", String(speedup));
  }

  let waiting = 0;
  const soon = () => {
    clearTimeout(waiting);
    waiting = setTimeout(show, 30);
  };
  slider.addEventListener("input", () => {
    exact.value = slider.value;
    soon();
  });
  exact.addEventListener("input", () => {
    if (Number.isFinite(exact.valueAsNumber)) slider.value = exact.value;
    soon();
  });
  slider.value = exact.value = String(facts.target);
  show();
}

// --- paper -----------------------------------------------------------------------------------------------------------

// What is folded on the screen is open on paper, and as it was afterwards.
let unfolded = [];
addEventListener("beforeprint", () => {
  unfolded = [...document.querySelectorAll("details:not([open])")];
  for (const one of unfolded) one.open = true;
});
addEventListener("afterprint", () => {
  for (const one of unfolded) one.open = false;
  unfolded = [];
});

drawStrip();
const kept = facts.spectra && keptSpectra();
if (kept) whatIf(kept);
theme.show();

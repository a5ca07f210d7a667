"use strict";
// What a page does besides charts: light and dark, the strip of layers, the slider. Data comes from #facts, and text
// goes in as text only (textContent), so that a layer may have any name.

const facts = JSON.parse(document.getElementById("facts").textContent);
const byId = (id) => document.getElementById(id);
const give = (node, attributes) => Object.entries(attributes).forEach(([key, value]) => node.setAttribute(key, value));

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  give(made, attributes);
  made.append(...children);
  return made;
}

// From blue over teal to amber with depth, so that a layer has one colour everywhere; lighter on a dark page.
const DEPTHS = [[43, 79, 194], [24, 140, 148], [125, 166, 74], [222, 158, 54]];
function colour(at, count) {
  const place = count > 1 ? (at / (count - 1)) * (DEPTHS.length - 1) : 0;
  const from = Math.min(Math.floor(place), DEPTHS.length - 2);
  const lift = theme.dark() ? 0.25 : 0;
  const mixed = DEPTHS[from].map((low, i) => low + (DEPTHS[from + 1][i] - low) * (place - from));
  return `rgb(${mixed.map((value) => Math.round(value + (255 - value) * lift)).join(",")})`;
}

// --- light and dark --------------------------------------------------------------------------------------------------

const redraw = []; // what has colours that CSS does not reach

const theme = (() => {
  const root = document.documentElement;
  const [system, paper] = [matchMedia("(prefers-color-scheme: dark)"), matchMedia("print")]; // paper is always light
  const dark = () => !paper.matches && (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => {
    byId("theme").setAttribute("aria-pressed", String(dark()));
    redraw.forEach((draw) => draw());
  };
  // Some browsers keep nothing for a file: then the choice holds until the page is closed.
  const kept = (use) => { try { return use(localStorage); } catch { return null; } };
  const before = kept((storage) => storage.getItem("leanconv-theme"));
  if (before) root.dataset.theme = before;
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    kept((storage) => storage.setItem("leanconv-theme", root.dataset.theme));
    show();
  });
  for (const media of [system, paper]) media.addEventListener("change", show);
  return { show, dark };
})();

// --- the strip -------------------------------------------------------------------------------------------------------

function strip() {
  const nodes = [...document.querySelectorAll("#strip .layer")];
  const paint = () => nodes.forEach((node, at) => {
    node.setAttribute("fill", facts.layers[at].scheme ? colour(at, nodes.length) : "var(--dense)");
  });
  let now = 0;
  const mark = (on) => {
    nodes[now].classList.toggle("on", on);
    give(nodes[now], { tabindex: on ? 0 : -1, "aria-selected": on });
  };
  const choose = (at, focus) => {
    mark(false);
    now = at;
    mark(true);
    if (focus) nodes[now].focus();
    byId("readout").textContent = nodes[now].getAttribute("aria-label");
  };
  nodes.forEach((node, at) => {
    for (const event of ["pointerenter", "focus"]) node.addEventListener(event, () => choose(at, false));
    node.addEventListener("click", () => choose(at, true));
  });
  byId("strip").addEventListener("keydown", (event) => {
    const last = nodes.length - 1;
    const to = { ArrowRight: Math.min(now + 1, last), ArrowLeft: Math.max(now - 1, 0), Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to, true);
  });
  paint();
  redraw.push(paint);
}

// --- what if: the plans that Python made, of which the slider and the number choose the nearest ----------------------

function whatIf() {
  const [slider, exact, body] = ["what-slider", "what-number", "what-body"].map(byId);
  const nearest = (speedup) => {
    const far = facts.plans.map((plan) => Math.abs(plan.speedup - speedup));
    return far.indexOf(Math.min(...far));
  };
  const row = ([name, now, dense], [label, cost, energy, share]) => {
    const bar = element("progress", { value: share, "aria-hidden": "true" });
    return element(
      "tr", label === now ? {} : { class: "changed" }, element("th", { scope: "row" }, name), element("td", {}, now),
      element("td", { class: "new" }, label), element("td", {}, dense), element("td", {}, cost, bar), element("td", {}, energy),
    );
  };
  const show = (at) => {
    const { speedup, said, layers } = facts.plans[at];
    slider.value = at;
    slider.setAttribute("aria-valuetext", `${speedup}x`);
    exact.value = body.dataset.speedup = speedup;
    body.replaceChildren(...facts.candidates.map((candidate, i) => row(candidate, layers[i])));
    byId("what-said").textContent = said;
    byId("what-command").textContent = facts.another.replaceAll("{speedup}", String(speedup));
  };
  slider.max = facts.plans.length - 1;
  slider.addEventListener("input", () => show(slider.valueAsNumber));
  exact.addEventListener("change", () => show(Number.isFinite(exact.valueAsNumber) ? nearest(exact.valueAsNumber) : slider.valueAsNumber));
  show(nearest(facts.target));
}

// --- paper: what is folded on the screen is open on it, and as it was afterwards -------------------------------------

let folded = [];
const open = (yes) => folded.forEach((one) => { one.open = yes; });
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  open(true);
});
addEventListener("afterprint", () => open(false));

if (facts.layers) strip();
if (facts.plans?.length) whatIf();
theme.show();

"use strict";
// What Python's choice of ranks searches with (src/leanconv/ranks/: portable, ladders, exact, lagrange), for select.js.
//
// It must end in the same ranks, so every sum, product and quotient stands in the order Python has it in: both round
// each of them as IEEE 754 says. MACs are whole numbers below 2^53 and exact in both. Names are those of the Python
// functions.

const search = (() => {
  const CELLS = 4000;

  const sum = (values) => values.reduce((a, b) => a + b, 0);

  // --- ranks/portable.py: Math.log differs between browsers in its last bit -------------------------------------

  const LN2 = 0.6931471805599453;
  const SQRT_HALF = 0.7071067811865476;
  const TERMS = Array.from({ length: 12 }, (_, i) => 1.0 / (2 * (11 - i) + 1));
  const number = new Float64Array(1);
  const halves = new Uint32Array(number.buffer);
  const HIGH = new Uint8Array(new Uint32Array([1]).buffer)[0] === 1 ? 1 : 0; // which half has the exponent

  function log(x) {
    number[0] = x;
    let e = ((halves[HIGH] >>> 20) & 0x7ff) - 1022; // x = m * 2^e with 0.5 <= m < 1, as Python's frexp
    halves[HIGH] = (halves[HIGH] & 0x800fffff) | (1022 << 20);
    let m = number[0];
    if (m < SQRT_HALF) {
      m = 2.0 * m;
      e -= 1;
    }
    const s = (m - 1.0) / (m + 1.0);
    const z = s * s;
    let total = 0.0;
    for (const term of TERMS) total = total * z + term;
    return e * LN2 + 2.0 * s * total;
  }

  // --- ranks/candidates.py -----------------------------------------------------------------------------------------

  class Energies {
    constructor(values) {
      this.kept = [0.0];
      for (const value of values) this.kept.push(this.kept[this.kept.length - 1] + Math.max(value, 0.0));
      const total = this.kept[this.kept.length - 1];
      this.kept = this.kept.map((sum) => (total > 0 ? sum / total : 1.0));
    }

    loss(rank) {
      return this.kept[rank] > 0 ? 1.0 - this.kept[rank - 1] / this.kept[rank] : 0.0;
    }
  }

  // --- ranks/ladders.py --------------------------------------------------------------------------------------------

  const ones = (count) => new Energies(Array(count).fill(1.0));
  const price = (ladder, rank) => ladder.base + rank * ladder.step;
  const costAt = (ladder, rank) => (rank === null ? ladder.dense : price(ladder, rank));
  const pays = (ladder, rank) => price(ladder, rank) < ladder.dense;
  const settle = (ladder, rank) => (pays(ladder, rank) ? rank : null);
  const lossAMac = (ladder, rank) => ladder.energies.loss(rank) / ladder.step;
  const up = (ladder, rank) =>
    rank === null || rank + 1 > ladder.limit || !pays(ladder, rank + 1) ? null : rank + 1;

  // The smallest (loss, index) first, as Python's heap of tuples.
  class Heap {
    constructor() {
      this.items = [];
    }

    before(a, b) {
      return a[0] < b[0] || (a[0] === b[0] && a[1] < b[1]);
    }

    push(item) {
      const items = this.items;
      let at = items.push(item) - 1;
      while (at > 0) {
        const parent = (at - 1) >> 1;
        if (!this.before(item, items[parent])) break;
        items[at] = items[parent];
        at = parent;
      }
      items[at] = item;
    }

    pop() {
      const items = this.items;
      const top = items[0];
      const item = items.pop();
      if (!items.length) return top;
      let at = 0;
      for (;;) {
        let child = 2 * at + 1;
        if (child >= items.length) break;
        if (child + 1 < items.length && this.before(items[child + 1], items[child])) child += 1;
        if (!this.before(items[child], item)) break;
        items[at] = items[child];
        at = child;
      }
      items[at] = item;
      return top;
    }
  }

  function greedy(ladders, budget) {
    const ranks = ladders.map((ladder) => ladder.limit);
    let spent = sum(ladders.map((ladder) => Math.min(ladder.dense, price(ladder, ladder.limit))));
    const heap = new Heap();
    ladders.forEach((ladder, i) => {
      if (ladder.limit > 1) heap.push([lossAMac(ladder, ladder.limit), i]);
    });
    while (spent > budget && heap.items.length) {
      const i = heap.pop()[1];
      const ladder = ladders[i];
      const rank = ranks[i];
      spent -= Math.min(ladder.dense, price(ladder, rank)) - Math.min(ladder.dense, price(ladder, rank - 1));
      ranks[i] = rank - 1;
      if (rank - 1 > 1) heap.push([lossAMac(ladder, rank - 1), i]);
    }
    return ladders.map((ladder, i) => settle(ladder, ranks[i]));
  }

  function fill(ladders, given, budget, byEnergy) {
    const ranks = [...given];
    let slack = budget - sum(ladders.map((ladder, i) => costAt(ladder, ranks[i])));
    for (;;) {
      let best = null;
      ladders.forEach((ladder, i) => {
        const rank = ranks[i];
        if (rank === null) return;
        const extra = costAt(ladder, up(ladder, rank)) - costAt(ladder, rank);
        if (extra > slack) return;
        const merit = byEnergy
          ? lossAMac(ladder, Math.min(rank + 1, ladder.limit))
          : ladder.dense / costAt(ladder, rank);
        if (best === null || merit > best.merit) best = { merit, extra, i };
      });
      if (best === null) return ranks;
      ranks[best.i] = up(ladders[best.i], ranks[best.i]);
      slack -= best.extra;
    }
  }

  // --- ranks/exact.py and ranks/lagrange.py ------------------------------------------------------------------------

  // `layers`: an array of { costs, merits } (Float64Array), an entry an option.
  function bestInWindow(layers, low, high) {
    const cell = Math.max(1, Math.floor(high / CELLS));
    const cells = Math.floor(high / cell) + 1;
    let merit = new Float64Array(cells).fill(-Infinity);
    let cost = new Float64Array(cells);
    merit[0] = 0.0;
    const steps = [];
    const gains = new Float64Array(cells);
    const sources = new Int32Array(cells);
    for (const layer of layers) {
      const newMerit = new Float64Array(cells).fill(-Infinity);
      const newCost = new Float64Array(cells);
      const pick = new Int32Array(cells).fill(-1);
      const origin = new Int32Array(cells).fill(-1);
      const alive = [];
      merit.forEach((value, at) => {
        if (Number.isFinite(value)) alive.push(at);
      });
      for (let option = 0; option < layer.costs.length; option += 1) {
        // Of several sources that land in one cell the best wins, of equals the last.
        const places = [];
        for (const source of alive) {
          const total = cost[source] + layer.costs[option];
          if (total > high) continue;
          const gain = merit[source] + layer.merits[option];
          const place = Math.floor(total / cell);
          if (sources[place] === 0) {
            if (gain > newMerit[place]) {
              places.push(place);
              gains[place] = gain;
              sources[place] = source + 1; // 0: none so far
            }
          } else if (gain >= gains[place]) {
            gains[place] = gain;
            sources[place] = source + 1;
          }
        }
        for (const place of places) {
          const source = sources[place] - 1;
          newMerit[place] = gains[place];
          newCost[place] = cost[source] + layer.costs[option];
          pick[place] = option;
          origin[place] = source;
          sources[place] = 0;
        }
      }
      merit = newMerit;
      cost = newCost;
      steps.push({ pick, origin });
    }
    let at = -1;
    for (let place = 0; place < cells; place += 1) {
      const inside = Number.isFinite(merit[place]) && cost[place] > low && cost[place] <= high;
      if (inside && (at < 0 || merit[place] > merit[at])) at = place;
    }
    if (at < 0) return null;
    const chosen = [];
    for (const { pick, origin } of steps.reverse()) {
      chosen.push(pick[at]);
      at = origin[at];
    }
    return chosen.reverse();
  }

  function firstLargest(count, value) {
    let best = 0;
    let most = value(0);
    for (let i = 1; i < count; i += 1) {
      const here = value(i);
      if (here > most) {
        best = i;
        most = here;
      }
    }
    return best;
  }

  function bestUnder(layers, budget) {
    const at = (p) =>
      layers.map(({ costs, merits }) => firstLargest(costs.length, (i) => merits[i] - p * costs[i]));
    const spent = (chosen) => sum(layers.map(({ costs }, i) => costs[chosen[i]]));
    let low = 0.0;
    let high = 1.0 / budget;
    while (spent(at(high)) > budget && high < 1e30) [low, high] = [high, 2 * high];
    for (let step = 0; step < 60; step += 1) {
      const middle = (low + high) / 2;
      [low, high] = spent(at(middle)) <= budget ? [low, middle] : [middle, high];
    }
    let chosen = at(high);
    if (spent(chosen) > budget) chosen = layers.map(({ costs }) => firstLargest(costs.length, (i) => -costs[i]));
    return spendRest(layers, chosen, budget, spent);
  }

  function spendRest(layers, given, budget, spent) {
    const chosen = [...given];
    let slack = budget - spent(chosen);
    for (;;) {
      let [gain, layer, option] = [0.0, -1, -1];
      layers.forEach(({ costs, merits }, i) => {
        const now = chosen[i];
        const fits = (j) => (costs[j] - costs[now] <= slack ? merits[j] - merits[now] : -Infinity);
        const j = firstLargest(costs.length, fits);
        if (fits(j) > gain) [gain, layer, option] = [fits(j), i, j];
      });
      if (layer < 0) return chosen;
      slack -= layers[layer].costs[option] - layers[layer].costs[chosen[layer]];
      chosen[layer] = option;
    }
  }

  return { log, sum, Energies, ones, settle, greedy, fill, bestInWindow, bestUnder };
})();

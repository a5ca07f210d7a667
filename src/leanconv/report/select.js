"use strict";
// The choice of ranks that Python makes for ranks="energy" (src/leanconv/ranks/: candidates, select, merged), in the
// page; search.js comes before it and says what keeps the two equal.
//
// `chooser(kept)` takes what KeptSpectra.to_json() writes and returns { reachable, candidates, select(speedup) }.

const chooser = (() => {
  const { log, sum, Energies, ones, settle, greedy, fill, bestInWindow, bestUnder } = search;
  const WINDOW = 1.02;
  const POINTWISE = 0.1;

  class Refused extends Error {}

  class Candidate {
    constructor(layer) {
      const g = layer.geometry;
      const product = g.kernel.reduce((a, b) => a * b, 1);
      const patch = Math.floor(g.in_channels / g.groups) * product;
      const last = g.kernel[g.kernel.length - 1];
      this.name = layer.name;
      this.cost = layer.cost;
      this.inputs = g.in_channels;
      this.filters = g.out_channels;
      this.pointwise = product === 1;
      this.splits = g.kind === "conv2d" && Math.min(...g.kernel) > 1 && g.groups === 1;
      this.channelLimit = Math.min(Math.floor(g.out_channels / g.groups), patch);
      this.spatialLimit = Math.min(g.in_channels * g.kernel[0], g.out_channels * last);
      this.channel = layer.channel && new Energies(layer.channel);
      this.spatial = layer.spatial && new Energies(layer.spatial);
    }

    channelMacs(rank) {
      return rank * (this.cost.reduce + this.cost.expand);
    }

    spatialMacs(rank) {
      return rank * (this.cost.vertical + this.cost.horizontal * this.cost.filters);
    }

    bothMacs(d2, d1) {
      return d2 * (this.cost.vertical + this.cost.horizontal * d1) + d1 * this.cost.expand;
    }

    macs(choice) {
      if (!choice) return this.cost.dense;
      if (choice.scheme === "channel") return this.channelMacs(choice.ranks[0]);
      if (choice.scheme === "spatial") return this.spatialMacs(choice.ranks[0]);
      return this.bothMacs(choice.ranks[0], choice.ranks[1]);
    }

    energy(choice) {
      if (choice.scheme === "spatial") return this.spatial ? this.spatial.kept[choice.ranks[0]] : 1.0;
      return this.channel ? this.channel.kept[choice.ranks[choice.ranks.length - 1]] : 1.0;
    }
  }

  const denseOf = (candidates) => sum(candidates.map((c) => c.cost.dense));
  const macsOf = (candidates, plan) => sum(candidates.map((c) => c.macs(plan.get(c.name))));

  // --- ranks/select.py ---------------------------------------------------------------------------------------------

  const hasChannel = (scheme) => scheme === "channel" || scheme === "3d";
  const hasSpatial = (scheme) => scheme === "spatial" || scheme === "3d";

  function cheapest(candidate, scheme) {
    const forms = [null];
    if (hasChannel(scheme)) forms.push({ scheme: "channel", ranks: [1] });
    if (hasSpatial(scheme) && candidate.splits) {
      forms.push({ scheme: "spatial", ranks: [1] });
      if (scheme === "3d") forms.push({ scheme: "3d", ranks: [1, 1] });
    }
    return forms.reduce((best, form) => (candidate.macs(form) < candidate.macs(best) ? form : best));
  }

  function channelLadder(c) {
    const { dense, reduce, expand } = c.cost;
    return { dense, step: reduce + expand, base: 0, limit: c.channelLimit, energies: c.channel || ones(c.channelLimit) };
  }

  function spatialLadder(c, channelRank = null) {
    const base = channelRank === null ? 0 : c.bothMacs(0, channelRank);
    const step = channelRank === null ? c.spatialMacs(1) : c.bothMacs(1, channelRank) - base;
    return { dense: c.cost.dense, step, base, limit: c.spatialLimit, energies: c.spatial || ones(c.spatialLimit) };
  }

  function oneWay(candidates, budget, scheme) {
    const usable = candidates.filter((c) => scheme === "channel" || c.splits);
    const rest = denseOf(candidates) - denseOf(usable);
    const ladders = usable.map((c) => (scheme === "channel" ? channelLadder(c) : spatialLadder(c)));
    const ranks = fill(ladders, greedy(ladders, budget - rest), budget - rest, true);
    const plan = new Map();
    usable.forEach((c, i) => {
      if (ranks[i] !== null) plan.set(c.name, { scheme, ranks: [ranks[i]] });
    });
    return plan;
  }

  function threeD(candidates, budget) {
    const dense = denseOf(candidates);
    const least = sum(candidates.map((c) => c.macs(cheapest(c, "channel"))));
    const ladders = candidates.map(channelLadder);

    const at = (factor) => {
      const channelBudget = Math.max(Math.trunc(dense / factor), least);
      const channel = fill(ladders, greedy(ladders, channelBudget), channelBudget, true);
      const found = { ladders: [], names: [], spatial: [], plan: new Map(), spent: 0 };
      candidates.forEach((c, i) => {
        const rank = channel[i];
        if (!c.splits) {
          const choice = rank === null ? null : { scheme: "channel", ranks: [rank] };
          if (choice) found.plan.set(c.name, choice);
          found.spent += c.macs(choice);
          return;
        }
        const ladder = spatialLadder(c, rank);
        const filters = rank === null ? c.filters : rank;
        const share = (filters * c.cost.reduce) / factor;
        const d2 = settle(ladder, Math.max(1, Math.min(Math.trunc(share / ladder.step), ladder.limit)));
        found.ladders.push(ladder);
        found.names.push(c.name);
        found.spatial.push(d2);
        if (d2 === null) return;
        const choice = rank === null ? { scheme: "spatial", ranks: [d2] } : { scheme: "3d", ranks: [d2, rank] };
        found.plan.set(c.name, choice);
      });
      return found;
    };

    const spentAt = (factor) => macsOf(candidates, at(factor).plan);
    let low = 1.0;
    let high = 2.0;
    while (spentAt(high) > budget) {
      if (high > 1e9) return null;
      [low, high] = [high, high * 2];
    }
    for (let step = 0; step < 40; step += 1) {
      const middle = (low + high) / 2;
      [low, high] = spentAt(middle) <= budget ? [low, middle] : [middle, high];
    }
    const found = at(high);
    const spatial = fill(found.ladders, found.spatial, budget - found.spent, false);
    found.names.forEach((name, i) => {
      const old = found.plan.get(name);
      found.plan.delete(name);
      if (spatial[i] !== null && old) {
        found.plan.set(name, { scheme: old.scheme, ranks: [spatial[i], ...old.ranks.slice(1)] });
      }
    });
    return found.plan;
  }

  // Python's round: halves go to the even neighbour.
  function roundEven(x) {
    const below = Math.floor(x);
    const over = x - below;
    if (over !== 0.5) return over < 0.5 ? below : below + 1;
    return below % 2 === 0 ? below : below + 1;
  }

  function some(limit, most) {
    if (limit <= most) return Array.from({ length: limit }, (_, i) => i + 1);
    const found = new Set();
    for (let i = 0; i < most; i += 1) found.add(1 + roundEven((i * (limit - 1)) / (most - 1)));
    return [...found].sort((a, b) => a - b);
  }

  function optionsOf(candidate, scheme) {
    const choices = [];
    if (hasChannel(scheme)) {
      for (const rank of some(candidate.channelLimit, 512)) choices.push({ scheme: "channel", ranks: [rank] });
    }
    if (hasSpatial(scheme) && candidate.splits) {
      for (const rank of some(candidate.spatialLimit, 512)) choices.push({ scheme: "spatial", ranks: [rank] });
      if (scheme === "3d") {
        const most = candidate.spatialLimit * candidate.channelLimit <= 4000 ? 512 : 40;
        const widths = some(candidate.channelLimit, most);
        for (const d2 of some(candidate.spatialLimit, most)) {
          for (const d1 of widths) choices.push({ scheme: "3d", ranks: [d2, d1] });
        }
      }
    }
    const kept = [null];
    const costs = [candidate.cost.dense];
    const merits = [0.0];
    for (const choice of choices) {
      const macs = candidate.macs(choice);
      if (macs >= candidate.cost.dense) continue;
      let energy = candidate.energy(choice);
      if (choice.scheme === "3d" && candidate.spatial) energy *= candidate.spatial.kept[choice.ranks[0]];
      kept.push(choice);
      costs.push(macs);
      merits.push(log(Math.max(energy, 1e-300)));
    }
    return { choices: kept, costs: Float64Array.from(costs), merits: Float64Array.from(merits) };
  }

  function within(candidates, plan, fixed, before, speedup) {
    const ratio = before / (fixed + macsOf(candidates, plan));
    return speedup <= ratio && ratio < WINDOW * speedup;
  }

  return function chooserOf(kept) {
    const { scheme, pairs } = kept;
    const candidates = kept.layers.map((layer) => new Candidate(layer));
    const byName = new Map(candidates.map((c) => [c.name, c]));
    const before = kept.fixed + denseOf(candidates);
    let options = null; // the same for every target; made when first needed
    const allOptions = () => (options = options || candidates.map((c) => optionsOf(c, scheme)));

    function picked(numbers) {
      const plan = new Map();
      candidates.forEach((c, i) => {
        const choice = options[i].choices[numbers[i]];
        if (choice) plan.set(c.name, choice);
      });
      return plan;
    }

    function select(speedup, saved) {
      const fixed = kept.fixed - saved;
      const most = before / (fixed + sum(candidates.map((c) => c.macs(cheapest(c, scheme)))));
      if (most <= 1.005) throw new Refused(`The ${scheme} scheme can make no layer of this network cheaper.`);
      if (most < speedup) {
        const reach = (Math.floor(100 * most + 1e-9) / 100).toFixed(2);
        throw new Refused(`${speedup}x cannot be reached: with every rank at 1 this network gets ${reach}x; ask for at most that.`);
      }
      const budget = Math.floor((before / speedup) * (1 + 1e-12)) - fixed;
      const pointwise = denseOf(candidates.filter((c) => c.pointwise)) / Math.max(denseOf(candidates), 1);
      let plan;
      if (scheme !== "spatial" && pointwise > POINTWISE) plan = picked(bestUnder(allOptions(), budget));
      else if (scheme === "3d") plan = threeD(candidates, budget);
      else plan = oneWay(candidates, budget, scheme);
      if (plan !== null && within(candidates, plan, fixed, before, speedup)) return plan;
      const low = Math.floor(before / (WINDOW * speedup)) - fixed;
      const numbers = bestInWindow(allOptions(), low, budget);
      if (numbers !== null) {
        const exact = picked(numbers);
        if (within(candidates, exact, fixed, before, speedup)) return exact;
      }
      const above = nearestAbove(fixed, budget);
      const hint = above === null ? "" : `; the best plan above it gives ${above.toFixed(3)}x: ask for that`;
      throw new Refused(`${speedup}x cannot be met to within 2 %: no choice of ranks lands there${hint}.`);
    }

    // What Python's refusal names (_too_coarse).
    function nearestAbove(fixed, budget) {
      const numbers = bestInWindow(allOptions(), -1, budget);
      if (numbers === null) return null;
      const cost = fixed + sum(numbers.map((number, i) => options[i].costs[number]));
      return Math.floor((1000 * before) / cost + 1e-9) / 1000;
    }

    // --- ranks/merged.py -------------------------------------------------------------------------------------------

    const active = (plan) => pairs.filter(([giver]) => plan.has(giver) && plan.get(giver).scheme !== "spatial");

    function macsAfter(plan, used) {
      const macs = new Map(candidates.map((c) => [c.name, c.macs(plan.get(c.name))]));
      for (const [giver, taker] of used) {
        const rank = plan.get(giver).ranks[plan.get(giver).ranks.length - 1];
        const [given, taken] = [byName.get(giver), byName.get(taker)];
        macs.set(giver, macs.get(giver) - rank * given.cost.expand);
        const first = plan.has(taker) ? plan.get(taker).ranks[0] * taken.cost.reduce : taken.cost.dense;
        macs.set(taker, macs.get(taker) - Math.floor(first / taken.inputs) * (taken.inputs - rank));
      }
      return macs;
    }

    function mostSaved() {
      const plan = new Map();
      for (const c of candidates) {
        const choice = cheapest(c, scheme);
        if (choice) plan.set(c.name, choice);
      }
      const merged = sum([...macsAfter(plan, active(plan)).values()]);
      return [denseOf(candidates) - merged, macsOf(candidates, plan) - merged];
    }

    function selectMerged(speedup) {
      let refused = null;
      let saved = 0;
      let plain = null;
      let plan = new Map();
      const choose = (amount) => {
        try {
          return select(speedup, amount);
        } catch (error) {
          if (!(error instanceof Refused)) throw error;
          refused = refused || error;
          return null;
        }
      };
      plain = choose(0);
      if (plain === null) saved = mostSaved()[1];
      else plan = plain;
      for (let attempt = 0; attempt < (pairs.length ? 12 : 0); attempt += 1) {
        const used = active(plan);
        const after = kept.fixed + sum([...macsAfter(plan, used).values()]);
        const ratio = before / after;
        if (plan.size && speedup <= ratio && ratio < WINDOW * speedup) return [plan, used];
        if (plan.size) {
          const found = kept.fixed + macsOf(candidates, plan) - after;
          saved = attempt < 4 ? found : Math.floor((saved + found) / 2);
        }
        plan = choose(saved);
        if (plan === null) break;
      }
      if (plain === null) throw refused;
      return [plain, []];
    }

    return {
      reachable: before / (before - mostSaved()[0]),
      candidates,
      // { ok, sentence } or { ok, plan, merged, macs, speedup }: the ranks, what is merged, MACs a layer.
      select(speedup) {
        try {
          const [plan, merged] = selectMerged(speedup);
          const macs = macsAfter(plan, merged);
          return { ok: true, plan, merged, macs, speedup: before / (kept.fixed + sum([...macs.values()])) };
        } catch (error) {
          if (!(error instanceof Refused)) throw error;
          return { ok: false, sentence: error.message };
        }
      },
    };
  };
})();

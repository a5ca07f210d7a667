"use strict";
// The charts. Each has its numbers in a table of the page too, so a browser that cannot draw them loses nothing.

(async () => {
  const places = [...document.querySelectorAll(".chart")];

  async function unpack() {
    const packed = Uint8Array.from(atob(byId("plotly").textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = element("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  try {
    await unpack();
  } catch {
    for (const place of places) {
      place.append(element("p", { class: "broken" }, "This browser cannot draw the chart; the tables have its numbers."));
    }
    return;
  }

  // Plotly reads a little HTML in text; a layer's name is none.
  const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const short = (name) => plain(name.length > 16 ? `…${name.slice(-15)}` : name);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const done = facts.layers.map((layer, at) => ({ ...layer, at })).filter((layer) => layer.scheme);
  const indexOf = new Map(facts.layers.map((layer, at) => [layer.name, at]));

  function layout(place, more) {
    const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--line"), automargin: true };
    const { xaxis, yaxis, ...rest } = more;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", width: place.clientWidth, height: 340,
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--ink") },
      margin: { l: 52, r: 12, t: 12, b: 48 }, hovermode: "closest", bargap: 0.3, dragmode: false,
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") } },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...rest,
    };
  }

  // Layers along x: by name while there is room, else counted from 1.
  function layerAxis(place, layers) {
    const named = layers.length <= place.clientWidth / 18;
    const axis = { range: [-0.6, layers.length - 0.4], showgrid: false, zeroline: false };
    if (!named) {
      const every = Math.ceil(layers.length / 10 / 5) * 5;
      const ticks = layers.map((_, i) => i).filter((i) => i === 0 || (i + 1) % every === 0);
      return { ...axis, tickvals: ticks, ticktext: ticks.map((i) => i + 1), title: { text: "layer, counted as they run" } };
    }
    return { ...axis, tickvals: layers.map((_, i) => i), ticktext: layers.map((layer) => short(layer.name)) };
  }

  const bars = (name, layers, y, color, more = {}) => ({
    type: "bar", name, x: layers.map((_, i) => i), y, marker: { color }, text: layers.map((layer) => plain(layer.name)),
    textposition: "none", ...more,
  });

  const charts = {
    "chart-ranks": (place) => {
      // d'' is the first rank of spatial and 3d, d' the last of all others.
      const shares = (first) => done.map((layer) => {
        if (first ? !["spatial", "3d"].includes(layer.scheme) : layer.scheme === "spatial") return null;
        const at = first ? 0 : layer.ranks.length - 1;
        return (100 * layer.ranks[at]) / layer.limits[at];
      });
      const hover = "%{text}<br>%{y:.1f} %<extra>%{fullData.name}</extra>";
      const traces = [
        bars("d'' of full", done, shares(true), css("--before"), { hovertemplate: hover }),
        bars("d' of full", done, shares(false), css("--accent"), { hovertemplate: hover }),
      ].filter((trace) => trace.y.some((value) => value !== null));
      traces.push({
        type: "scatter", mode: "markers", name: "energy kept", x: done.map((_, i) => i),
        y: done.map((layer) => 100 * layer.energy), text: done.map((layer) => plain(layer.name)), hovertemplate: hover,
        marker: { color: css("--good"), size: 10, symbol: "diamond", line: { color: css("--card"), width: 1 } },
      });
      return [traces, { xaxis: layerAxis(place, done), yaxis: { range: [0, 104], ticksuffix: " %" } }];
    },

    "chart-error": (place) => {
      const traces = [bars("error", done, done.map((layer) => layer.error), done.map((layer) => colour(layer.at, facts.layers.length)), {
        hovertemplate: "%{text}<br>%{y:.3f}<extra></extra>",
      })];
      return [traces, { showlegend: false, xaxis: layerAxis(place, done), yaxis: { rangemode: "tozero" } }];
    },

    "chart-time": (place) => {
      const layers = facts.times;
      const intervals = {
        type: "data", symmetric: false, color: css("--soft"), thickness: 1.2, width: 3,
        array: layers.map((layer) => layer.ratio.high - layer.ratio.value),
        arrayminus: layers.map((layer) => layer.ratio.value - layer.ratio.low),
      };
      const hover = "%{text}<br>%{y:.2f}x<extra>%{fullData.name}</extra>";
      const traces = [
        bars("theoretical (MACs)", layers, layers.map((layer) => layer.macs_ratio), css("--before"), { hovertemplate: hover }),
        bars("actual (time)", layers, layers.map((layer) => layer.ratio.value), css("--accent"), { hovertemplate: hover, error_y: intervals }),
      ];
      const even = { type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: css("--warn"), dash: "dot", width: 1.5 } };
      return [traces, { shapes: [even], xaxis: layerAxis(place, layers), yaxis: { rangemode: "tozero", ticksuffix: "x" } }];
    },

    "chart-channel": () => curves("channel"),
    "chart-spatial": () => curves("spatial"),
  };

  // Energy over the share of the full rank; a dot where this run cut.
  function curves(kind) {
    const found = kept.layers.filter((layer) => layer[kind]);
    const crowded = found.length > 30;
    const chosen = { x: [], y: [], text: [], color: [] };
    const lines = found.map((layer) => {
      const values = layer[kind];
      const full = values.length;
      const sums = [0];
      for (const value of values) sums.push(sums[sums.length - 1] + value);
      const energy = (rank) => (sums[full] > 0 ? (100 * sums[rank]) / sums[full] : 100);
      const color = colour(indexOf.get(layer.name), facts.layers.length);
      const run = facts.layers[indexOf.get(layer.name)];
      const rank = rankOf(run, kind);
      if (rank !== null) {
        chosen.x.push((100 * rank) / full);
        chosen.y.push(energy(rank));
        chosen.text.push(`${plain(layer.name)}<br>rank ${rank} of ${full}`);
        chosen.color.push(color);
      }
      // No more points than can be seen.
      const step = Math.max(1, Math.ceil(full / 160));
      const ranks = Array.from({ length: full + 1 }, (_, i) => i).filter((i) => i % step === 0 || i === full);
      return {
        type: "scatter", mode: "lines", x: ranks.map((i) => (100 * i) / full), y: ranks.map(energy), name: plain(layer.name),
        text: ranks.map((i) => `rank ${i} of ${full}`), line: { color, width: crowded ? 1 : 2 }, opacity: crowded ? 0.6 : 0.9,
        hovertemplate: `${plain(layer.name)}<br>%{text}: %{y:.1f} %<extra></extra>`,
      };
    });
    lines.push({
      type: "scatter", mode: "markers", x: chosen.x, y: chosen.y, text: chosen.text, name: "chosen",
      marker: { color: chosen.color, size: crowded ? 6 : 11, line: { color: css("--card"), width: 1.5 } },
      hovertemplate: "%{text}: %{y:.1f} %<extra>chosen</extra>",
    });
    return [lines, {
      showlegend: false, xaxis: { range: [0, 102], ticksuffix: " %", title: { text: "rank, of full rank" } },
      yaxis: { range: [0, 104], ticksuffix: " %" },
    }];
  }

  function rankOf(layer, kind) {
    if (!layer || !layer.scheme || layer.scheme === "merged") return null;
    if (kind === "spatial") return layer.scheme === "channel" ? null : layer.ranks[0];
    return layer.scheme === "spatial" ? null : layer.ranks[layer.ranks.length - 1];
  }

  function draw() {
    for (const place of places) {
      const [traces, more] = charts[place.id](place);
      Plotly.react(place, traces, layout(place, more), { displayModeBar: false, scrollZoom: false });
    }
  }

  draw();
  redraw.push(draw);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) draw();
    width = innerWidth;
  });
  document.body.dataset.drawn = "yes";
})();

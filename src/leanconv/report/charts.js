"use strict";
// The charts. Each has its numbers in a table of the page too, so a browser that cannot draw them loses nothing.

(async () => {
  const places = [...document.querySelectorAll(".chart")];
  try {
    const packed = Uint8Array.from(atob(byId("plotly").textContent), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = element("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  } catch {
    for (const place of places) {
      place.append(element("p", { class: "broken" }, "This browser cannot draw the chart; the tables have its numbers."));
    }
    return;
  }

  // Plotly reads a little HTML in text; a name of a layer or of a folder is none.
  const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const layers = facts.layers || [];
  const done = layers.filter((layer) => layer.scheme);
  const depth = new Map(layers.map((layer, at) => [layer.name, at]));
  const colourOf = (layer) => colour(depth.get(layer.name), layers.length);

  // Layers along x: by name while there is room, else counted from 1.
  function layerAxis(place, shown) {
    const named = shown.length <= place.clientWidth / 18;
    const every = named ? 1 : Math.ceil(shown.length / 10 / 5) * 5;
    const ticks = shown.map((_, i) => i).filter((i) => i === 0 || (i + 1) % every === 0);
    const label = (name, i) => (named ? plain(name.length > 16 ? `…${name.slice(-15)}` : name) : i + 1);
    return {
      range: [-0.6, shown.length - 0.4], showgrid: false, zeroline: false, tickvals: ticks,
      ticktext: ticks.map((i) => label(shown[i].name, i)), title: { text: named ? "" : "layer, counted as they run" },
    };
  }

  const bars = (name, shown, y, color, hovertemplate, more = {}) => ({
    type: "bar", name, x: shown.map((_, i) => i), y, marker: { color }, text: shown.map((layer) => plain(layer.name)),
    textposition: "none", hovertemplate, ...more,
  });
  const dots = (color, size, symbol) => ({ color, size, symbol, line: { color: css("--card"), width: 1.5 } });
  const spread = (all, at, color) => ({
    type: "data", symmetric: false, array: all.map((one) => one.high - at(one)), arrayminus: all.map((one) => at(one) - one.low),
    color, thickness: 1.2, width: 4,
  });

  // Energy over the share of the full rank; a dot at the rank of this run.
  const energies = (kind) => () => {
    const curves = facts.curves[kind];
    const crowded = curves.length > 30;
    const lines = curves.map((curve) => ({
      type: "scatter", mode: "lines", x: curve.ranks.map((rank) => (100 * rank) / curve.full), y: curve.energy, name: plain(curve.name),
      text: curve.ranks.map((rank) => `rank ${rank} of ${curve.full}`), hovertemplate: `${plain(curve.name)}<br>%{text}: %{y:.1f} %<extra></extra>`,
      line: { color: colourOf(curve), width: crowded ? 1 : 2 }, opacity: crowded ? 0.6 : 0.9,
    }));
    const chosen = curves.filter((curve) => curve.chosen);
    const cuts = {
      type: "scatter", mode: "markers", x: chosen.map(({ chosen: [rank], full }) => (100 * rank) / full), y: chosen.map((curve) => curve.chosen[1]),
      text: chosen.map((curve) => `${plain(curve.name)}<br>rank ${curve.chosen[0]} of ${curve.full}`), hovertemplate: "%{text}: %{y:.1f} %<extra>chosen</extra>",
      marker: dots(chosen.map(colourOf), crowded ? 6 : 11),
    };
    const xaxis = { range: [0, 102], ticksuffix: " %", title: { text: "rank, of full rank" } };
    return [[...lines, cuts], { showlegend: false, xaxis, yaxis: { range: [0, 104], ticksuffix: " %" } }];
  };

  // Of several folders. Names stand beside points where there is room; pointing at one shows its name anyway.
  const folders = (title, unit) => (place) => {
    const all = facts.charts[place.id];
    const made = all.filter((series) => !series.original);
    const named = place.clientWidth > 560 && all.reduce((sum, series) => sum + series.points.length, 0) <= 16;
    const traces = all.map((series) => {
      const { points, original } = series;
      const at = made.indexOf(series);
      const color = original ? css("--soft") : colour(at, made.length);
      return {
        type: "scatter", mode: (original ? "markers" : "lines+markers") + (named ? "+text" : ""), name: plain(series.name) + (original ? " (original)" : ""),
        x: points.map((point) => point.x), y: points.map((point) => point.y), cliponaxis: false,
        text: points.map((point) => (original ? "original" : plain(point.name))), textposition: "bottom right",
        textfont: { color: css("--soft"), size: 12 }, customdata: points.map((point) => [plain(point.name), point.low, point.high]),
        hovertemplate: `%{customdata[0]}<br>%{y:.2f} % at %{x:.4~g}${unit}${original ? "" : "<br>%{customdata[1]:.2f} to %{customdata[2]:.2f} %"}<extra></extra>`,
        line: { color, width: 1.5, dash: "dot" }, marker: dots(color, original ? 12 : 10, original ? "diamond" : "circle"),
        error_y: original ? {} : spread(points, (point) => point.y, color),
      };
    });
    return [traces, {
      height: 400 + 20 * traces.length, margin: { l: 56, r: 24, t: 12, b: 48 }, legend: { orientation: "h", y: -0.18, yanchor: "top", x: 0 },
      xaxis: { title: { text: title }, rangemode: "tozero" }, yaxis: { title: { text: `${plain(facts.measure)}, %` } },
    }];
  };

  const charts = {
    "chart-ranks": (place) => {
      const shares = (kind) => done.map((layer) => {
        const at = layer.kinds.indexOf(kind);
        return at < 0 ? null : (100 * layer.ranks[at]) / layer.limits[at];
      });
      const hover = "%{text}<br>%{y:.1f} %<extra>%{fullData.name}</extra>";
      const traces = [
        ...(facts.axes || []).map(([kind, symbol], at) => bars(`${symbol} of full`, done, shares(kind), css(["--accent", "--before", "--warn"][at % 3]), hover)),
      ].filter((trace) => trace.y.some((value) => value !== null));
      const marks = { type: "scatter", mode: "markers", marker: dots(css("--good"), 10, "diamond") };
      traces.push(bars("energy kept", done, done.map((layer) => 100 * layer.energy), css("--good"), hover, marks));
      return [traces, { xaxis: layerAxis(place, done), yaxis: { range: [0, 104], ticksuffix: " %" } }];
    },
    "chart-error": (place) => [
      [bars("error", done, done.map((layer) => layer.error), done.map(colourOf), "%{text}<br>%{y:.3f}<extra></extra>")],
      { showlegend: false, xaxis: layerAxis(place, done), yaxis: { rangemode: "tozero" } },
    ],
    "chart-time": (place) => {
      const shown = facts.times;
      const ratios = shown.map((layer) => layer.ratio);
      const hover = "%{text}<br>%{y:.2f}x<extra>%{fullData.name}</extra>";
      const even = { type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: css("--warn"), dash: "dot", width: 1.5 } };
      return [[
        bars("theoretical (MACs)", shown, shown.map((layer) => layer.macs_ratio), css("--before"), hover),
        bars("actual (time)", shown, ratios.map((ratio) => ratio.value), css("--accent"), hover, { error_y: spread(ratios, (one) => one.value, css("--soft")) }),
      ], { shapes: [even], xaxis: layerAxis(place, shown), yaxis: { rangemode: "tozero", ticksuffix: "x" } }];
    },
    ...Object.fromEntries((facts.axes || []).map(([kind]) => [`chart-${kind}`, energies(kind)])),
    "chart-macs": folders("MMACs an image", " M"),
    "chart-times": folders("milliseconds a batch", " ms"),
  };

  function draw() {
    const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--line"), automargin: true };
    for (const place of places) {
      const [traces, { xaxis, yaxis, ...more }] = charts[place.id](place);
      Plotly.react(place, traces, {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", width: place.clientWidth, height: 340,
        font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--ink") },
        margin: { l: 52, r: 12, t: 12, b: 48 }, hovermode: "closest", bargap: 0.3, dragmode: false,
        hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, namelength: -1 },
        legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, ...more, xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis },
      }, { displayModeBar: false, scrollZoom: false });
    }
  }

  draw();
  redraw.push(draw);
  let width = innerWidth;
  addEventListener("resize", () => width !== (width = innerWidth) && draw());
  document.body.dataset.drawn = "yes";
})();

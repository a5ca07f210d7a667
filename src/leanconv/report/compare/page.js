"use strict";
// Two charts from #data, drawn anew when the window or the system's colours change.

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const titles = { "chart-macs": ["MMACs an image", " M"], "chart-times": ["milliseconds a batch", " ms"] };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Plotly reads a little HTML in text; a folder's name is none.
  const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

  // Names stand beside points where there is room; pointing at one shows its name anyway.
  function trace(series, at, count, named, unit) {
    const { points, original } = series;
    const color = original ? css("--soft") : `hsl(${Math.round(222 - (190 * at) / Math.max(1, count - 1))}, 62%, ${css("--light")})`;
    return {
      type: "scatter", mode: (original ? "markers" : "lines+markers") + (named ? "+text" : ""), name: plain(series.name) + (original ? " (original)" : ""),
      x: points.map((point) => point.x), y: points.map((point) => point.y), cliponaxis: false,
      text: points.map((point) => plain(original ? "original" : point.name)), textposition: at % 2 ? "top center" : "bottom center", textfont: { color: css("--soft"), size: 12 },
      customdata: points.map((point) => [plain(point.name), point.low, point.high]),
      hovertemplate: `%{customdata[0]}<br>%{y:.2f} % at %{x:.4~g}${unit}${original ? "" : "<br>%{customdata[1]:.2f} to %{customdata[2]:.2f} %"}<extra></extra>`,
      line: { color, width: 1.5, dash: "dot" },
      marker: { color, size: original ? 12 : 10, symbol: original ? "diamond" : "circle", line: { color: css("--card"), width: 1.5 } },
      error_y: {
        type: "data", symmetric: false, visible: !original, color, thickness: 1.2, width: 4,
        array: points.map((point) => point.high - point.y), arrayminus: points.map((point) => point.y - point.low),
      },
    };
  }

  function draw() {
    for (const place of document.querySelectorAll(".chart")) {
      const all = data.charts[place.id];
      const made = all.filter((series) => !series.original);
      const [title, unit] = titles[place.id];
      const named = place.clientWidth > 560 && all.reduce((sum, series) => sum + series.points.length, 0) <= 16;
      const traces = all.map((series) => trace(series, made.indexOf(series), made.length, named, unit));
      const axis = { gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--line"), automargin: true };
      const layout = {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", width: place.clientWidth, height: 400 + 20 * traces.length,
        font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--ink") },
        margin: { l: 56, r: 24, t: 12, b: 48 }, hovermode: "closest", dragmode: false,
        hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, namelength: -1 },
        legend: { orientation: "h", y: -0.18, yanchor: "top", x: 0 },
        xaxis: { ...axis, title: { text: title }, rangemode: "tozero" },
        yaxis: { ...axis, title: { text: plain(data.measure) + ", %" } },
      };
      Plotly.react(place, traces, layout, { displayModeBar: false, scrollZoom: false });
    }
  }

  draw();
  addEventListener("resize", draw);
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", draw);
  document.body.dataset.drawn = "yes";
})();

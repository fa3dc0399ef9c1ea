"use strict";
(() => {
  const { figures, templates } = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement, button = document.querySelector("button.theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => root.dataset.theme || (system.matches ? "dark" : "light");
  const settings = {
    displaylogo: false,
    displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
    showSendToCloud: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
  };
  const drawn = new Map();  // plots and the width each was drawn for
  const resized = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (drawn.get(target) === target.clientWidth) continue;
      drawn.set(target, target.clientWidth);
      Plotly.Plots.resize(target);
    }
  });
  const recolour = () => {
    button.textContent = theme() === "dark" ? "Light" : "Dark";
    for (const plot of drawn.keys()) Plotly.relayout(plot, { template: templates[theme()] });
  };
  button.hidden = false;
  button.onclick = () => { root.dataset.theme = theme() === "dark" ? "light" : "dark"; recolour(); };
  system.addEventListener("change", recolour);
  recolour();
  // One figure at a time, the page stays usable while the rest is drawn.
  const draw = async (index) => {
    if (index === figures.length) { root.dataset.drawn = index; return; }
    const plot = document.getElementById("plot-" + index), { data, layout } = figures[index];
    const width = plot.clientWidth, before = theme();
    await Plotly.newPlot(plot, data, { ...layout, template: templates[before] }, settings);
    if (theme() !== before) await Plotly.relayout(plot, { template: templates[theme()] });
    drawn.set(plot, width);
    resized.observe(plot);
    setTimeout(draw, 0, index + 1);
  };
  draw(0);
})();

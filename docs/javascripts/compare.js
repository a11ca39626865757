// The comparison of metrics.md: the figures lie in the page, and the address's fragment holds the
// choice, so that a comparison can be linked to.
(function () {
  "use strict";
  const FIGURES = {
    bytes: { title: "Bytes per token", show: (v) => (v >= 1e9 ? (v / 1e9).toFixed(3) + " GB" : (v / 1e6).toFixed(1) + " MB") },
    rate: { title: "Tokens per second", show: (v) => v.toFixed(2) },
    kl: { title: "KL divergence, nats", show: (v) => v.toFixed(4) },
  };
  const root = document.getElementById("comparison");
  const source = document.getElementById("comparison-data");
  if (!root || !source) return;
  const records = JSON.parse(source.textContent);
  const unique = (values) => [...new Set(values)];

  function element(name, attributes, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function choice(name, label, options, selected) {
    const select = element("select", { name });
    for (const option of options) {
      const made = element("option", { value: option }, option);
      made.selected = option === selected;
      select.append(made);
    }
    return element("label", {}, label, select);
  }

  function bar(record, most, name) {
    const figure = FIGURES[record.figure];
    const text = figure.show(record.value) + (record.spread ? " ± " + figure.show(record.spread) : "");
    const fill = element("div", { class: "fill" });
    fill.style.width = (most ? (100 * record.value) / most : 0) + "%";
    const row = element("div", { class: "bar", "data-figure": record.figure, "data-coverage": record.coverage, "data-value": record.value },
      element("div", { class: "name" }, name, element("b", {}, text)),
      element("div", { class: "track" }, fill),
      element("div", { class: "origin" }, record.device, element("code", {}, record.command)));
    return row;
  }

  function draw() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    const models = unique(records.map((record) => record.model));
    const model = models.includes(wanted.get("model")) ? wanted.get("model") : models[0];
    const own = records.filter((record) => record.model === model);
    const coverages = unique(own.map((record) => record.coverage));
    const pick = (key, preferred) => {
      const name = wanted.get(key);
      return coverages.includes(name) ? name : coverages.includes(preferred) ? preferred : coverages[0];
    };
    const coverage = pick("coverage", "every projection");
    const peer = pick("peer", "nothing");
    root.replaceChildren(element("form", {},
      choice("model", "Model", models, model),
      choice("coverage", "In NVFP4", coverages, coverage),
      choice("peer", "Beside", coverages, peer)));
    for (const [key, figure] of Object.entries(FIGURES)) {
      const found = (name) => own.find((record) => record.figure === key && record.coverage === name);
      const shown = unique([coverage, peer]).map((name) => [name, found(name)]);
      const most = Math.max(0, ...shown.map(([, record]) => (record ? record.value : 0)));
      root.append(element("h3", {}, figure.title));
      for (const [name, record] of shown) {
        root.append(record ? bar(record, most, name) : element("div", { class: "bar" },
          element("div", { class: "name" }, name, element("span", {}, "not measured"))));
      }
    }
  }

  root.addEventListener("change", () => {
    const form = new FormData(root.querySelector("form"));
    history.replaceState(null, "", "#" + new URLSearchParams(form));
    draw();
  });
  window.addEventListener("hashchange", draw);
  draw();
})();

"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const probes = document.body.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "svg")); // measures texts
  probes.setAttribute("class", "hidden");
  probes.setAttribute("aria-hidden", "true");
  const data = JSON.parse(byId("data").textContent);
  const hidden = new Set(); // numbers of the policies that are switched off
  const charts = []; // redraws, one for each chart

  // ---- small helpers

  const element = (tag, attributes = {}, parent = null, text = null) => {
    const space = tag === "svg" || (parent && parent.namespaceURI.endsWith("svg")) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
    const made = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== null) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };
  const outline = {
    o: (r) => `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`,
    s: (r) => `M${-r} ${-r}H${r}V${r}H${-r}Z`,
    "^": (r) => `M0 ${-1.2 * r}L${1.1 * r} ${0.9 * r}H${-1.1 * r}Z`,
    v: (r) => `M0 ${1.2 * r}L${1.1 * r} ${-0.9 * r}H${-1.1 * r}Z`,
    D: (r) => `M0 ${-1.3 * r}L${1.3 * r} 0L0 ${1.3 * r}L${-1.3 * r} 0Z`,
    P: (r) => `M${-r / 2} ${-r}H${r / 2}V${-r / 2}H${r}V${r / 2}H${r / 2}V${r}H${-r / 2}V${r / 2}H${-r}V${-r / 2}H${-r / 2}Z`,
    X: (r) => `M${-r} ${-r / 2}L${-r / 2} ${-r}L0 ${-r / 2}L${r / 2} ${-r}L${r} ${-r / 2}L${r / 2} 0L${r} ${r / 2}L${r / 2} ${r}L0 ${r / 2}L${-r / 2} ${r}L${-r} ${r / 2}L${-r / 2} 0Z`,
  };
  const mark = (parent, policy, x, y, radius = 4.5) =>
    element("path", { class: "mark", d: outline[data.policies[policy].marker](radius), transform: `translate(${x} ${y})` }, parent);
  const group = (parent, policy) =>
    element("g", { class: "policy", "data-policy": policy, style: `--c: var(--p${policy})` }, parent);
  const stroke = (policy) => ({ class: "series", "stroke-width": data.policies[policy].width, "stroke-dasharray": data.policies[policy].dash.join(" ") });
  const ticks = (low, high, most = 6) => {
    const rough = (high - low) / most || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(Number((at * step).toPrecision(12)));
    return found;
  };
  const decades = (low, high) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const factor of [1, 2, 5]) if (factor * 10 ** power >= low && factor * 10 ** power <= high) found.push(Number((factor * 10 ** power).toPrecision(6)));
    return found;
  };

  // ---- a chart: draws itself at its own width, tells the nearest point, and can be read with the arrow keys

  const chart = (host, label, draw) => {
    const picture = element("svg", { tabindex: 0, role: "application", "aria-roledescription": "chart", "aria-label": `${label}. Arrow keys read the points.` }, host);
    const tip = element("div", { class: "tip", role: "status", hidden: "" }, host);
    let points = [];
    let at = -1;
    let width = 0;
    const show = (index) => {
      at = index;
      picture.querySelector(".ring")?.remove();
      picture.classList.toggle("picked", index >= 0);
      tip.hidden = index < 0;
      if (index < 0) return;
      const point = points[index];
      for (const each of picture.querySelectorAll("g.policy")) each.classList.toggle("on", Number(each.dataset.policy) === point.policy);
      element("circle", { class: "ring", cx: point.x, cy: point.y, r: 8 }, picture);
      tip.replaceChildren();
      element("b", {}, tip, data.policies[point.policy].short);
      for (const line of point.words) element("div", {}, tip, line);
      const left = Math.min(Math.max(0, point.x - tip.offsetWidth / 2), width - tip.offsetWidth);
      const above = point.y - tip.offsetHeight - 14;
      tip.style.left = `${left}px`;
      tip.style.top = `${above < -20 ? point.y + 14 : above}px`;
    };
    const redraw = () => {
      width = host.clientWidth;
      if (!width) return;
      picture.replaceChildren();
      const drawn = draw(picture, width);
      points = drawn.points.sort((a, b) => a.policy - b.policy);
      picture.setAttribute("height", drawn.height);
      picture.setAttribute("viewBox", `0 0 ${width} ${drawn.height}`);
      show(-1);
    };
    const nearest = (event) => {
      const box = picture.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      let best = -1;
      let least = 28; // pixels: about a fingertip
      points.forEach((point, index) => {
        const far = Math.hypot(point.x - x, point.y - y);
        if (far < least) [best, least] = [index, far];
      });
      if (best !== at) show(best);
    };
    const step = (key) => {
      const count = points.length;
      const way = key === "ArrowRight" || key === "ArrowDown" ? 1 : -1;
      if (at < 0) return way > 0 ? 0 : count - 1;
      let next = (at + way + count) % count;
      if (key === "ArrowUp" || key === "ArrowDown")
        while (next !== at && points[next].policy === points[at].policy) next = (next + way + count) % count;
      return next;
    };
    picture.addEventListener("pointermove", nearest);
    picture.addEventListener("pointerdown", nearest);
    picture.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && show(-1));
    picture.addEventListener("blur", () => show(-1));
    picture.addEventListener("keydown", (event) => {
      if (event.key === "Escape") show(-1);
      if (!event.key.startsWith("Arrow") || !points.length) return;
      event.preventDefault();
      show(step(event.key));
    });
    new ResizeObserver(() => host.clientWidth !== width && redraw()).observe(host);
    charts.push(redraw);
    redraw();
    return redraw;
  };
  const inFront = (list) => [...new Set(list.map((each) => each.policy))].sort((a, b) => b - a); // the first ones drawn last
  const nothing = (picture, width) => {
    element("text", { x: width / 2, y: 50, "text-anchor": "middle" }, picture, "Nothing to draw.");
    return { points: [], height: 90 };
  };
  const wide = (words) => { // pixels that the widest of some labels takes
    const probe = element("text", { class: "name" }, probes);
    const widths = words.map((text) => ((probe.textContent = text), probe.getComputedTextLength()));
    probe.remove();
    return Math.max(0, ...widths);
  };
  const fitted = (name, room) => { // both ends of a name say what it is; its middle may go
    let short = name;
    for (let kept = name.length - 1; kept > 4 && wide([short]) > room; kept--)
      short = `${name.slice(0, Math.ceil(kept / 2))}…${name.slice(name.length - Math.floor(kept / 2))}`;
    return short;
  };
  const frame = (picture, area, yTicks, yAt) => {
    for (const value of yTicks) {
      const y = yAt(value);
      element("line", { class: value === 0 ? "zero" : "grid", x1: area.left, x2: area.right, y1: y, y2: y }, picture);
      element("text", { x: area.left - 6, y: y + 4, "text-anchor": "end" }, picture, String(value));
    }
  };

  // ---- quality against budget

  let logarithmic = false;
  const scale = (values, from, to, most) => {
    const known = values.filter((value) => value !== null);
    const positive = known.filter((value) => value > 0);
    if (logarithmic && positive.length) {
      const [low, high] = [Math.min(...positive) / 1.3, Math.max(...positive) * 1.2];
      const place = (value) => from + ((Math.log(Math.max(value, low)) - Math.log(low)) / (Math.log(high) - Math.log(low))) * (to - from);
      const all = decades(low, high);
      return { place, ticks: all.filter((_, index) => index % Math.ceil(all.length / (most + 2)) === 0) };
    }
    const low = Math.min(0, ...known);
    const high = Math.max(...known, low + 1e-6);
    const edge = (high - low) * 0.06;
    const start = low < 0 ? low - edge : 0;
    const place = (value) => from + ((value - start) / (high + edge - start)) * (to - from);
    return { place, ticks: ticks(start, high + edge, most) };
  };
  const overBudgets = (picture, width, panel, shown) => {
    const height = width < 420 ? 270 : 330;
    const area = { left: 46, right: width - 14, top: 26, bottom: height - 40 };
    const usual = shown.filter((point) => !panel.outliers.includes(point.policy));
    const scaled = logarithmic || !usual.length ? shown : usual; // outliers may leave the picture, but not a logarithmic one
    const y = scale(scaled.flatMap((point) => [point.loss, point.lo, point.hi]), area.bottom, area.top, 7);
    area.left = Math.max(area.left, wide(y.ticks.map(String)) + 8);
    const logs = panel.budgets.map((budget) => Math.log2(Math.max(budget, 1)));
    const [first, last] = [logs[0], logs[logs.length - 1]];
    const x = (budget) => area.left + 18 + ((Math.log2(Math.max(budget, 1)) - first) / (last - first)) * (area.right - area.left - 36);
    frame(picture, area, y.ticks, y.place);
    element("text", { x: 0, y: 12 }, picture, `loss, ${panel.unit}${logarithmic ? ", logarithmic; 0 is on the edge" : ""}`);
    element("text", { x: area.right, y: height - 4, "text-anchor": "end" }, picture, "budget, slots per KV head (log2)");
    for (const budget of panel.budgets) element("text", { x: x(budget), y: area.bottom + 17, "text-anchor": "middle" }, picture, budget || "none");
    const clip = `clip-${data.panels.indexOf(panel)}`;
    element("rect", { x: area.left, y: area.top, width: area.right - area.left, height: area.bottom - area.top + 8 }, element("clipPath", { id: clip }, picture));
    const points = [];
    const above = new Set();
    for (const policy of inFront(shown)) {
      const own = shown.filter((point) => point.policy === policy).sort((a, b) => a.budget - b.budget);
      const held = own.filter((point) => point.lo !== null);
      const layer = group(picture, policy);
      layer.setAttribute("clip-path", `url(#${clip})`);
      const path = (list, field) => list.map((point) => `${x(point.budget)} ${y.place(point[field])}`).join("L");
      if (held.length > 1) element("path", { class: data.policies[policy].width > 2 ? "band strong" : "band", d: `M${path(held, "lo")}L${path(held.reverse(), "hi")}Z` }, layer);
      element("path", { ...stroke(policy), d: `M${path(own, "loss")}` }, layer);
      for (const point of own) {
        const at = y.place(point.loss);
        if (at < area.top) above.add(data.policies[policy].short);
        mark(layer, policy, x(point.budget), at);
        points.push({ x: x(point.budget), y: Math.max(at, area.top), policy, words: [`budget ${point.budget || "none"}`, ...point.words] });
      }
    }
    if (above.size) {
      const names = [...above].join(", ");
      const fits = names.length * 6.5 < width - 140;
      element("text", { x: area.right, y: 12, "text-anchor": "end" }, picture, `\u2191 ${fits ? names : `${above.size} policies`}`);
    }
    return { points, height };
  };
  const sideBySide = (picture, width, panel, shown) => {
    const line = 26;
    const height = 30 + line * shown.length + 40;
    const names = shown.map((point) => data.policies[point.policy].short);
    const area = { left: Math.min(wide(names) + 10, width * 0.45), right: width - 16, top: 14, bottom: height - 44 };
    const x = scale(shown.flatMap((point) => [point.loss, point.lo, point.hi]), area.left + 8, area.right, width < 420 ? 4 : 7);
    for (const value of x.ticks) {
      element("line", { class: value === 0 ? "zero" : "grid", x1: x.place(value), x2: x.place(value), y1: area.top, y2: area.bottom }, picture);
      element("text", { x: x.place(value), y: area.bottom + 16, "text-anchor": "middle" }, picture, String(value));
    }
    const budget = panel.budgets[0] ? `, at ${panel.budgets[0]} slots` : "";
    element("text", { x: area.right, y: height - 6, "text-anchor": "end" }, picture, `loss, ${panel.unit}${budget}`);
    const points = shown.map((point, index) => {
      const y = area.top + line * (index + 0.5);
      const layer = group(picture, point.policy);
      element("text", { class: "name", x: area.left - 6, y: y + 4, "text-anchor": "end" }, layer, fitted(names[index], area.left - 8));
      if (point.lo !== null) element("line", { class: "whisker", x1: x.place(point.lo), x2: x.place(point.hi), y1: y, y2: y }, layer);
      mark(layer, point.policy, x.place(point.loss), y, 5.5);
      return { x: x.place(point.loss), y, policy: point.policy, words: point.words };
    });
    return { points, height };
  };
  const quality = (host) => {
    const panel = data.panels[Number(host.dataset.panel)];
    chart(host, `Loss against budget, ${panel.title}`, (picture, width) => {
      const shown = panel.points.filter((point) => !hidden.has(point.policy));
      if (!shown.length) return nothing(picture, width);
      return panel.budgets.length > 1 ? overBudgets(picture, width, panel, shown) : sideBySide(picture, width, panel, shown);
    });
  };

  // ---- document by document

  const scatter = (picture, width) => {
    const panel = data.panels[Number(byId("scatter-panel").value)];
    const found = panel.documents[byId("scatter-budget").value];
    const series = found.series.filter((each) => !hidden.has(each.policy));
    if (!series.length || !found.names.length) return nothing(picture, width);
    const height = Math.max(280, Math.min(560, width * 0.7));
    const area = { left: 46, right: width - 14, top: 26, bottom: height - 40 };
    const range = (values) => {
      const [low, high] = [Math.min(...values), Math.max(...values)];
      const edge = (high - low) * 0.05 || Math.abs(high) * 0.05 || 0.5;
      return [low - edge, high + edge];
    };
    const across = range(series.flatMap((each) => each.full));
    const upward = range(series.flatMap((each) => [...each.own, ...each.full]));
    area.left = Math.max(area.left, wide(ticks(...upward).map(String)) + 8);
    const x = (value) => area.left + ((value - across[0]) / (across[1] - across[0])) * (area.right - area.left);
    const y = (value) => area.bottom - ((value - upward[0]) / (upward[1] - upward[0])) * (area.bottom - area.top);
    frame(picture, area, ticks(...upward), y);
    for (const value of ticks(...across, width < 420 ? 4 : 7)) element("text", { x: x(value), y: area.bottom + 17, "text-anchor": "middle" }, picture, String(value));
    element("text", { x: 0, y: 12 }, picture, `policy, ${panel.unit}`);
    element("text", { x: area.right, y: height - 4, "text-anchor": "end" }, picture, `full cache, ${panel.unit}`);
    const equal = [Math.max(across[0], upward[0]), Math.min(across[1], upward[1])];
    element("line", { class: "zero", x1: x(equal[0]), y1: y(equal[0]), x2: x(equal[1]), y2: y(equal[1]) }, picture);
    const points = [];
    for (const each of series.reverse()) {
      const together = new Map();
      each.own.forEach((own, index) => {
        const key = `${each.full[index]} ${own}`;
        if (!together.has(key)) together.set(key, []);
        together.get(key).push(index);
      });
      const layer = group(picture, each.policy);
      for (const documents of together.values()) {
        const [own, full] = [each.own[documents[0]], each.full[documents[0]]];
        mark(layer, each.policy, x(full), y(own), 4 * Math.sqrt(1 + Math.log2(documents.length)));
        const names = documents.slice(0, 4).map((index) => found.names[index]);
        if (documents.length > 4) names.push(`and ${documents.length - 4} more`);
        points.push({ x: x(full), y: y(own), policy: each.policy, words: [...names, `${own} under this policy, ${full} full`] });
      }
    }
    return { points, height };
  };
  const fillBudgets = () => {
    const [choice, kept] = [byId("scatter-budget"), byId("scatter-budget").value];
    const budgets = data.panels[Number(byId("scatter-panel").value)].budgets;
    choice.replaceChildren();
    for (const budget of budgets) element("option", { value: budget }, choice, budget || "none");
    if (budgets.includes(Number(kept)) && kept !== "") choice.value = kept;
  };

  // ---- legend: one set of switches, shown above the charts and above the documents

  const legend = (host) => {
    data.policies.forEach((policy, number) => {
      const button = element("button", { type: "button", "aria-pressed": "true", "data-policy": number }, host);
      const sample = element("svg", { width: 30, height: 14, "aria-hidden": "true" }, button);
      const layer = group(sample, number);
      element("line", { ...stroke(number), x1: 0, x2: 30, y1: 7, y2: 7 }, layer);
      mark(layer, number, 15, 7);
      button.append(policy.short);
      button.addEventListener("click", () => {
        hidden.has(number) ? hidden.delete(number) : hidden.add(number);
        refresh();
      });
    });
    const all = element("button", { type: "button" }, host, "All");
    all.addEventListener("click", () => (hidden.clear(), refresh()));
    const none = element("button", { type: "button" }, host, "None");
    none.addEventListener("click", () => (data.policies.forEach((_, number) => hidden.add(number)), refresh()));
  };
  const refresh = () => {
    for (const button of document.querySelectorAll(".legend [data-policy][aria-pressed]"))
      button.setAttribute("aria-pressed", String(!hidden.has(Number(button.dataset.policy))));
    for (const redraw of charts) redraw();
  };

  // ---- the table: sorts by its headings, filters by words and choices

  const table = byId("results");
  const body = table.tBodies[0];
  const lines = [...body.rows];
  const headings = [...table.tHead.rows[0].cells];
  const compare = (column, numeric) => (a, b) => {
    const [first, second] = [a.cells[column].dataset.value, b.cells[column].dataset.value];
    if (first === "" || second === "") return (first === "") - (second === "") || 0; // what is unknown comes last
    const order = numeric ? Number(first) - Number(second) : first.localeCompare(second);
    return headings[column].getAttribute("aria-sort") === "descending" ? -order : order;
  };
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const next = heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", next);
      body.append(...lines.sort(compare(column, heading.classList.contains("number"))));
    });
  });
  const filter = () => {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [panel, budget, kind] = ["by-task", "by-budget", "by-kind"].map((id) => byId(id).value);
    let count = 0;
    for (const line of lines) {
      const text = line.textContent.toLowerCase();
      line.hidden = !(words.every((word) => text.includes(word)) && (!panel || line.dataset.panel === panel) &&
        (!budget || line.dataset.budget === budget) && (!kind || line.dataset.kind === kind));
      if (!line.hidden) count++;
    }
    byId("count").textContent = `${count} of ${lines.length} lines`;
  };

  // ---- download

  byId("download").addEventListener("click", async () => {
    const packed = Uint8Array.from(atob(data.rows), (letter) => letter.charCodeAt(0));
    const plain = "DecompressionStream" in window;
    const stream = plain ? new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")) : new Blob([packed]).stream();
    const address = URL.createObjectURL(await new Response(stream).blob());
    const link = element("a", { href: address, download: plain ? "rows.jsonl" : "rows.jsonl.gz" }, document.body);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  });

  // ---- start

  document.querySelectorAll(".legend").forEach(legend);
  document.querySelectorAll(".quality").forEach(quality);
  fillBudgets();
  const redrawScatter = chart(byId("scatter"), "Each document under each policy against the full cache", scatter);
  byId("scatter-panel").addEventListener("change", () => (fillBudgets(), redrawScatter()));
  byId("scatter-budget").addEventListener("change", redrawScatter);
  byId("log").addEventListener("click", (event) => {
    logarithmic = !logarithmic;
    event.target.setAttribute("aria-pressed", String(logarithmic));
    for (const redraw of charts) redraw();
  });
  for (const id of ["search", "by-task", "by-budget", "by-kind"])
    for (const event of ["input", "change"]) byId(id).addEventListener(event, filter);
  filter();
})();

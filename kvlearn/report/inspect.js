"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const cards = [...document.querySelectorAll(".texts article")];
  const tokens = cards.map((card) => [...card.querySelectorAll(".token")]);
  const counts = data.policies.map((policy) => policy.counts.map((layer) => [...layer].map((letter) => letter.codePointAt(0) - 48)));
  const length = tokens[0].length;
  const level = (share) => (share <= 0 ? 0 : share >= 1 ? 4 : share > 0.5 ? 3 : share > 0.25 ? 2 : 1);
  let at = -1;

  // ---- shades: the share of heads that hold a token, in the chosen layer or in all of them

  const chosen = () => (byId("layer").value === "" ? data.layers.map((_, layer) => layer) : [Number(byId("layer").value)]);
  const shares = (policy) => {
    const layers = chosen();
    const most = layers.length * data.heads;
    return tokens[policy].map((_, token) => layers.reduce((sum, layer) => sum + counts[policy][layer][token], 0) / most);
  };
  const paint = () => {
    const show = byId("show").value;
    const only = byId("only").getAttribute("aria-pressed") === "true";
    const other = show === "held" ? null : shares(Number(show));
    for (const each of document.querySelectorAll(".shades li")) each.hidden = (each.dataset.for === "held") !== (other === null);
    cards.forEach((card, policy) => {
      const own = shares(policy);
      let forgotten = 0;
      own.forEach((share, token) => {
        const place = tokens[policy][token];
        const name = other === null ? `h${level(share)}` : share < other[token] ? "less" : share > other[token] ? "more" : "";
        const gone = other === null ? share === 0 : share < other[token];
        if (share === 0) forgotten++;
        place.className = `token ${name}${token === at ? " at" : ""}`;
        place.hidden = only && !gone;
      });
      card.querySelector(".count").textContent = `${length - forgotten} of ${length} tokens held, ${forgotten} forgotten`;
      draw(card.querySelector("canvas"), counts[policy]);
    });
  };

  // ---- the map: one pixel for each layer and token

  const colour = (name) => {
    const [, r, g, b] = /#(..)(..)(..)/.exec(getComputedStyle(document.documentElement).getPropertyValue(name).trim());
    return [r, g, b].map((part) => parseInt(part, 16));
  };
  const draw = (canvas, layers) => {
    const shades = ["--back", "--held1", "--held2", "--held3", "--held4"].map(colour);
    canvas.width = length;
    canvas.height = layers.length;
    const picture = canvas.getContext("2d").createImageData(length, layers.length);
    const shown = new Set(chosen());
    layers.forEach((layer, row) => layer.forEach((count, token) => {
      const pixel = shades[shown.has(row) ? level(count / data.heads) : 0];
      picture.data.set([...pixel, 255], 4 * (row * length + token));
    }));
    canvas.getContext("2d").putImageData(picture, 0, 0);
  };

  // ---- one token under every policy

  const element = (tag, parent, text, name = "") => {
    const made = document.createElement(tag);
    if (text) made.textContent = text;
    if (name) made.className = name;
    parent.append(made);
    return made;
  };
  const pick = (token, card = null) => {
    for (const place of tokens) place[at]?.classList.remove("at");
    at = token;
    const bar = byId("picked");
    bar.hidden = token < 0;
    if (token < 0) return;
    for (const place of tokens) place[token].classList.add("at");
    const host = bar.firstElementChild;
    host.replaceChildren();
    const title = element("div", host);
    element("b", title, `Token ${token + 1} of ${length}: `);
    element("code", title, JSON.stringify(tokens[0][token].textContent));
    data.policies.forEach((policy, number) => {
      const held = counts[number].map((layer) => layer[token]);
      const sum = held.reduce((total, count) => total + count, 0);
      element("div", host, `${policy.name}: ${sum} of ${data.heads * data.layers.length} heads; by layer`);
      const cells = element("div", host, "", "cells");
      held.forEach((count, layer) => {
        element("span", cells, String(count), `h${level(count / data.heads)}`).title = `layer ${data.layers[layer]}`;
      });
    });
    if (!card) return;
    for (const place of tokens) {
      const text = place[token].closest(".text"); // all texts at the same place, and the page where it is
      if (text !== card.querySelector(".text")) text.scrollTop = place[token].offsetTop - text.clientHeight / 2;
    }
    tokens[cards.indexOf(card)][token].scrollIntoView({ block: "nearest" });
  };
  const step = (from, by) => {
    let next = from;
    do next += by; while (next >= 0 && next < length && tokens[0][next].hidden && tokens.every((each) => each[next].hidden));
    return Math.min(Math.max(next, 0), length - 1);
  };
  const keys = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity };
  cards.forEach((card, policy) => {
    const text = card.querySelector(".text");
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return pick(-1);
      if (!(event.key in keys) || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      const by = keys[event.key];
      pick(Math.abs(by) === 1 ? step(at, by) : Math.min(Math.max(at + by, 0), length - 1), card);
    });
    for (const kind of ["click", "pointermove"])
      text.addEventListener(kind, (event) => {
        const token = tokens[policy].indexOf(event.target);
        if (token >= 0 && (kind === "click" || event.pointerType === "mouse") && token !== at) pick(token);
      });
  });

  // ---- start

  byId("only").addEventListener("click", (event) => {
    event.target.setAttribute("aria-pressed", String(event.target.getAttribute("aria-pressed") !== "true"));
    paint();
  });
  for (const id of ["layer", "show"]) byId(id).addEventListener("change", paint);
  byId("theme").addEventListener("click", paint);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  paint();
})();

"use strict";
// Draws the figures: hover shows values, dragging zooms, the bar at the top chooses axis and groups.
const figures = JSON.parse(document.getElementById("figures").textContent);
const boxes = [...document.querySelectorAll("[data-figure]")];
const SVG = document.querySelector("svg").namespaceURI;
const tip = document.getElementById("tip");
const memory = { // survives the reloads of a live page; not every reader allows it
  key: "fedloom " + location.pathname,
  load() { try { return JSON.parse(sessionStorage.getItem(this.key)) || {}; } catch { return {}; } },
  save(value) { try { sessionStorage.setItem(this.key, JSON.stringify(value)); } catch { /* forgotten */ } },
};
const kept = memory.load();
const state = { axis: kept.axis || "", hidden: new Set(kept.hidden || []), zoom: new Map() };

const digits = (v) => String(+v.toPrecision(4));
const scaled = (v, units) => {
  const [size, unit] = units.find(([s]) => Math.abs(v) >= s) || [1, ""];
  return digits(v / size) + unit;
};
const FORMS = {
  number: digits,
  count: (v) => String(+v.toPrecision(9)),
  percent: (v) => +(100 * v).toFixed(2) + " %",
  amount: (v) => scaled(v, [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]]),
  seconds: (v) => scaled(v, [[3600, " h"], [60, " min"]]) + (Math.abs(v) < 60 ? " s" : ""),
};

function add(parent, tag, attributes = {}, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text; // never markup
  parent.append(made);
  return made;
}

function ticks([low, high], axis, count) {
  if (axis.log) {
    const found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
      for (const m of high / low < 1e3 ? [1, 2, 5] : [1]) found.push(m * 10 ** e);
    return found.filter((v) => v >= low && v <= high);
  }
  const unit = axis.form !== "seconds" ? 1 : high >= 3600 ? 3600 : high >= 60 ? 60 : 1;
  const raw = (high - low) / unit / count, power = 10 ** Math.floor(Math.log10(raw));
  let step = power * [1, 2, 5, 10].find((m) => m * power >= raw);
  if (axis.form === "count") step = Math.max(1, step);
  const found = [];
  for (let i = Math.ceil(low / unit / step); i * step * unit <= high; i++) found.push(i * step * unit);
  return found;
}

const bounds = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);

function extent(values, axis, pad) {
  const known = values.filter((v) => v !== null && (!axis.log || v > 0));
  let [low, high] = bounds(known);
  if (!known.length) [low, high] = [0, 1];
  if (axis.log) return [low / (1 + pad), high * (1 + pad)];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  return [low - pad * (high - low), high + pad * (high - low)];
}

function scale([low, high], axis, from, to) {
  const f = axis.log ? Math.log : (v) => v;
  const map = (v) => from + ((f(v) - f(low)) / (f(high) - f(low))) * (to - from);
  map.invert = (p) => {
    const v = f(low) + ((p - from) / (to - from)) * (f(high) - f(low));
    return axis.log ? Math.exp(v) : v;
  };
  return map;
}

function frame(box, figure, height) {
  box.replaceChildren();
  const width = Math.max(box.clientWidth, 260);
  const svg = add(box, "svg", { viewBox: `0 0 ${width} ${height}`, width, height });
  const plot = { left: 54, right: width - 22, top: 24, bottom: height - 42 };
  const id = "clip-" + box.dataset.figure;
  const { left, right, top, bottom } = plot;
  add(add(svg, "clipPath", { id }), "rect", { x: left, y: top - 4, width: right - left, height: bottom - top + 8 });
  return { svg, ...plot, grid: add(svg, "g"), inside: add(svg, "g", { "clip-path": `url(#${id})` }), over: add(svg, "g") };
}

function labels(f, x, y, xName, yName) {
  for (const [at, text] of x) {
    add(f.grid, "line", { x1: at, x2: at, y1: f.top, y2: f.bottom });
    add(f.over, "text", { x: at, y: f.bottom + 15, "text-anchor": "middle" }, text);
  }
  for (const [at, text] of y) {
    add(f.grid, "line", { x1: f.left, x2: f.right, y1: at, y2: at });
    add(f.over, "text", { x: f.left - 6, y: at + 4, "text-anchor": "end" }, text);
  }
  add(f.over, "text", { x: (f.left + f.right) / 2, y: f.bottom + 33, "text-anchor": "middle" }, xName);
  add(f.over, "text", { x: 2, y: 12 }, yName);
}

function chart(box, figure) {
  const at = Math.max(0, figure.x.findIndex((axis) => axis.label === state.axis));
  const [xAxis, yAxis] = [figure.x[at], figure.y], zoom = state.zoom.get(box) || {};
  const f = frame(box, figure, Math.round(Math.min(380, Math.max(250, 0.62 * box.clientWidth))));
  const lines = figure.series.filter((s) => !state.hidden.has(s.label)).map((s) => ({ ...s, x: s.x[at] }));
  const xs = zoom.x || extent(lines.flatMap((s) => s.x), xAxis, 0.01);
  const within = (s, values) => values.filter((_, i) => s.x[i] !== null && s.x[i] >= xs[0] && s.x[i] <= xs[1]);
  const shown = lines.flatMap((s) => [s.y, s.low, s.high].flatMap((values) => within(s, values)));
  const ys = zoom.y || extent(figure.level && !zoom.x ? [...shown, figure.level[1]] : shown, yAxis, 0.05);
  const X = scale(xs, xAxis, f.left, f.right), Y = scale(ys, yAxis, f.bottom, f.top);
  const named = (axis, range, map, n) => ticks(range, axis, n).map((v) => [map(v), FORMS[axis.form](v)]);
  labels(f, named(xAxis, xs, X, f.right / 90), named(yAxis, ys, Y, 6), xAxis.label, yAxis.label);
  if (figure.diagonal) {
    const [low, high] = [Math.max(xs[0], ys[0]), Math.min(xs[1], ys[1])];
    add(f.inside, "line", { x1: X(low), y1: Y(low), x2: X(high), y2: Y(high), class: "mark" });
  }
  if (figure.level) {
    const y = Y(figure.level[1]);
    add(f.inside, "line", { x1: f.left, x2: f.right, y1: y, y2: y, class: "mark" });
    add(f.inside, "text", { x: f.left + 4, y: y - 4 }, figure.level[0]);
  }
  for (const s of lines) {
    const where = s.y.map((v, i) => i).filter((i) => s.x[i] !== null && s.y[i] !== null && (!yAxis.log || s.y[i] > 0));
    const path = (values, order) => order.map((i) => `${X(s.x[i]).toFixed(1)},${Y(values[i] ?? s.y[i]).toFixed(1)}`).join(" ");
    const ink = s.style.colour;
    if (figure.points || where.length === 1)
      for (const i of where) {
        const r = s.shares.length ? 1.5 + 20 * Math.sqrt(s.shares[i]) : 3.5;
        add(f.inside, "circle", { cx: X(s.x[i]), cy: Y(s.y[i]), r, fill: ink, "fill-opacity": s.shares.length ? 0.5 : 0.7 });
      }
    else {
      if (s.low.length)
        add(f.inside, "polygon", { points: path(s.low, where) + " " + path(s.high, [...where].reverse()), fill: ink, "fill-opacity": 0.15 });
      const dash = s.style.dash.map((d) => 2 * d).join(" ");
      add(f.inside, "polyline", { points: path(s.y, where), stroke: ink, "stroke-dasharray": dash, class: "series" });
    }
  }
  const look = (px, py) => {
    const near = lines.map((s) => {
      let best = null;
      s.x.forEach((x, i) => {
        if (x === null || s.y[i] === null) return;
        const d = figure.points ? Math.hypot(X(x) - px, Y(s.y[i]) - py) : Math.abs(X(x) - px);
        if (!best || d < best.d) best = { s, i, d, x };
      });
      return best;
    }).filter(Boolean).sort((a, b) => a.d - b.d);
    if (!near.length || (figure.points && near[0].d > 40)) return null;
    const first = near[0], value = FORMS[yAxis.form];
    const spread = ({ s, i }) => (s.low.length && s.low[i] !== s.high[i] ? ` (${value(s.low[i])} to ${value(s.high[i])})` : "");
    const together = figure.points ? [first] : near.filter((p) => Math.abs(X(p.x) - X(first.x)) < 5).sort((a, b) => b.s.y[b.i] - a.s.y[a.i]);
    const marks = together.map((p) => [X(p.x), Y(p.s.y[p.i]), p.s.style.colour]);
    const rows = together.map((p) => [p.s.style.colour, `${p.s.label}${p.s.names.length ? ", " + p.s.names[p.i] : ""}: ${value(p.s.y[p.i])}${spread(p)}`]);
    return { heading: `${xAxis.label}: ${FORMS[xAxis.form](first.x)}`, rows, marks, x: figure.points ? null : X(first.x) };
  };
  pointer(box, f, look, (a, b) => {
    const tall = Math.abs(a[1] - b[1]) > 24;
    const range = (map, p, q) => [map.invert(p), map.invert(q)].sort((u, v) => u - v);
    state.zoom.set(box, { x: range(X, a[0], b[0]), y: tall ? range(Y, a[1], b[1]) : null });
  });
  const others = figure.series.filter((s) => ![...document.querySelectorAll("[data-group]")].some((b) => b.dataset.group === s.label));
  legend(box, others);
}

function legend(box, series) {
  if (!series.length) return;
  const list = box.appendChild(Object.assign(document.createElement("ul"), { className: "legend" }));
  for (const s of series) row(list, "li", s.style.colour, s.label);
}

function row(parent, tag, colour, text) {
  const made = parent.appendChild(document.createElement(tag));
  made.appendChild(Object.assign(document.createElement("i"), { className: "dot" })).style.background = colour;
  made.append(text);
}

const BLUE = [0, 114, 178], ORANGE = [213, 94, 0];

function heat(box, figure) {
  const { rows, columns, z, middle } = figure;
  const f = frame(box, figure, Math.round(Math.min(460, Math.max(190, 90 + 18 * rows.length))));
  const base = middle ?? 0, known = z.flat().filter((v) => v !== null);
  const ends = bounds([base, ...known]), reach = Math.max(base - ends[0], ends[1] - base) || 1;
  const canvas = Object.assign(document.createElement("canvas"), { width: columns.length, height: rows.length });
  const context = canvas.getContext("2d"), image = context.createImageData(columns.length, rows.length);
  const [low, high] = middle === null ? [BLUE, BLUE] : [BLUE, ORANGE];
  z.flat().forEach((v, i) => {
    const colour = v === null ? [140, 140, 140, 38] : [...(v < base ? low : high), (255 * Math.abs(v - base)) / reach];
    image.data.set(colour, 4 * i);
  });
  context.putImageData(image, 0, 0);
  const size = { x: f.left, y: f.top, width: f.right - f.left, height: f.bottom - f.top };
  add(f.inside, "image", { href: canvas.toDataURL(), ...size, preserveAspectRatio: "none", class: "pixels" });
  const w = size.width / columns.length, h = size.height / rows.length;
  const every = (names, space) => {
    const step = Math.ceil(names.length / Math.max(1, Math.floor(space)));
    return names.map((name, i) => [i, name.length > 8 ? name.slice(0, 7) + "…" : name]).filter(([i]) => i % step === 0);
  };
  const x = every(columns, size.width / 44).map(([i, name]) => [f.left + (i + 0.5) * w, name]);
  const y = every(rows, size.height / 16).map(([i, name]) => [f.top + (i + 0.5) * h, name]);
  labels(f, x, y, figure.x, figure.y);
  f.grid.remove();
  const bar = box.appendChild(Object.assign(document.createElement("div"), { className: "scale" }));
  const stop = (v) => `rgb(${(v < base ? low : high).join(" ")} / ${Math.abs(v - base) / reach})`;
  const at = (100 * (base - ends[0])) / (ends[1] - ends[0] || 1);
  bar.append(FORMS[figure.form](ends[0]));
  bar.appendChild(document.createElement("i")).style.background =
    `linear-gradient(90deg, ${stop(ends[0])}, transparent ${at}%, ${stop(ends[1])})`;
  bar.append(FORMS[figure.form](ends[1]));
  pointer(box, f, (px, py) => {
    const [c, r] = [Math.floor((px - f.left) / w), Math.floor((py - f.top) / h)];
    if (!(z[r] && c >= 0 && c < columns.length)) return null;
    const value = z[r][c] === null ? "none" : FORMS[figure.form](z[r][c]);
    return { heading: `${figure.y} ${rows[r]}, ${figure.x} ${columns[c]}: ${value}`, rows: [], marks: [], x: null };
  });
}

function gantt(box, figure) {
  const { rows, row: at, begin, end, late, steps } = figure, axis = { form: "seconds" };
  const f = frame(box, figure, Math.round(Math.min(520, Math.max(190, 70 + 11 * rows.length))));
  const xs = state.zoom.get(box)?.x || [0, bounds([...end, ...steps])[1] || 1], h = (f.bottom - f.top) / rows.length;
  const X = scale(xs, axis, f.left, f.right), every = Math.ceil(16 / h);
  const names = rows.map((name, i) => [f.top + (i + 0.5) * h, name]).filter((_, i) => i % every === 0);
  labels(f, ticks(xs, axis, f.right / 90).map((v) => [X(v), FORMS.seconds(v)]), names, "time on the devices", "client");
  const ink = (i) => `rgb(${(late[i] ? ORANGE : BLUE).join(" ")})`;
  for (const x of steps.map(X)) add(f.inside, "line", { x1: x, x2: x, y1: f.top, y2: f.bottom, class: "mark" });
  at.forEach((r, i) => add(f.inside, "rect", {
    x: X(begin[i]), y: f.top + (r + 0.15) * h, width: Math.max(X(end[i]) - X(begin[i]), 1), height: 0.7 * h, fill: ink(i),
  }));
  pointer(box, f, (px, py) => {
    const v = X.invert(px), r = Math.floor((py - f.top) / h), i = at.findIndex((s, k) => s === r && begin[k] <= v && v <= end[k]);
    if (i < 0) return null;
    const text = `${FORMS.seconds(begin[i])} to ${FORMS.seconds(end[i])}${late[i] ? ", thrown away" : ""}`;
    return { heading: `client ${rows[r]}`, rows: [[ink(i), text]], marks: [], x: null };
  }, (a, b) => state.zoom.set(box, { x: [X.invert(a[0]), X.invert(b[0])].sort((u, v) => u - v) }));
}

function network(box, figure) {
  const { nodes, edges, weight, directed } = figure, size = Math.round(Math.min(460, Math.max(box.clientWidth, 260)));
  const f = frame(box, figure, size), middle = [f.svg.getAttribute("width") / 2, size / 2], far = size / 2 - 24;
  f.svg.removeAttribute("clip-path");
  const at = nodes.map((_, i) => 2 * Math.PI * i / nodes.length).map((a) => [middle[0] + far * Math.sin(a), middle[1] - far * Math.cos(a)]);
  const most = bounds([1e-12, ...weight])[1], r = nodes.length <= 40 ? 9 : 4, hears = nodes.map(() => []);
  edges.forEach(([i, j], k) => {
    hears[i].push(`${nodes[j]} (${FORMS.number(weight[k])})`);
    const [x1, y1, x2, y2] = [...at[j], ...at[i]], d = Math.hypot(x2 - x1, y2 - y1), u = [(x2 - x1) / d, (y2 - y1) / d];
    const ink = { stroke: `rgb(${BLUE.join(" ")})`, "stroke-opacity": 0.15 + 0.85 * weight[k] / most };
    const [ex, ey] = [x2 - r * u[0], y2 - r * u[1]];
    add(f.over, "line", { x1, y1, x2: ex, y2: ey, ...ink });
    if (directed) // the head of an arrow, at the one that hears
      add(f.over, "path", { d: [1, -1].map((s) => `M${ex},${ey}l${-7 * u[0] + 4 * s * u[1]},${-7 * u[1] - 4 * s * u[0]}`).join(""), ...ink });
  });
  at.forEach(([cx, cy], i) => {
    add(f.over, "circle", { cx, cy, r, class: "node" });
    if (nodes.length <= 40) add(f.over, "text", { x: cx, y: cy + 4, "text-anchor": "middle" }, nodes[i]);
  });
  pointer(box, f, (px, py) => {
    const i = at.findIndex(([x, y]) => Math.hypot(x - px, y - py) < r + 4);
    if (i < 0) return null;
    const told = hears[i].length > 12 ? [...hears[i].slice(0, 12), "…"] : hears[i];
    return { heading: `${nodes[i]} hears ${told.join(", ") || "nobody"}`, rows: [], marks: [], x: null };
  });
}

function pointer(box, f, look, zoomed) {
  let start = null, area = null, marks = add(f.over, "g");
  const place = (event) => {
    const r = f.svg.getBoundingClientRect();
    return [event.clientX - r.left, event.clientY - r.top];
  };
  const clear = () => { marks.replaceChildren(); tip.hidden = true; };
  f.svg.addEventListener("pointerleave", clear);
  f.svg.addEventListener("pointerdown", (event) => {
    if (!zoomed || event.pointerType !== "mouse") return;
    start = place(event);
    f.svg.setPointerCapture(event.pointerId);
  });
  f.svg.addEventListener("pointermove", (event) => {
    const here = place(event);
    clear();
    if (start) {
      area?.remove();
      const tall = Math.abs(here[1] - start[1]) > 24;
      const x = Math.min(start[0], here[0]), y = tall ? Math.min(start[1], here[1]) : f.top;
      const height = tall ? Math.abs(here[1] - start[1]) : f.bottom - f.top;
      area = add(f.over, "rect", { x, y, width: Math.abs(here[0] - start[0]), height, class: "area" });
      return;
    }
    const found = look(...here);
    if (!found) return;
    if (found.x !== null) add(marks, "line", { x1: found.x, x2: found.x, y1: f.top, y2: f.bottom, class: "mark" });
    for (const [cx, cy, fill] of found.marks) add(marks, "circle", { cx, cy, r: 4, fill });
    tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: found.heading }));
    for (const [colour, text] of found.rows) row(tip, "div", colour, text);
    tip.hidden = false;
    const left = event.clientX + 14, top = event.clientY + 14;
    tip.style.left = `${Math.max(4, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${top + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : top}px`;
  });
  f.svg.addEventListener("pointerup", (event) => {
    const end = place(event);
    if (start && Math.abs(end[0] - start[0]) > 8) { zoomed(start, end); draw(box); }
    area?.remove();
    start = area = null;
  });
  f.svg.addEventListener("dblclick", () => { state.zoom.delete(box); draw(box); });
}

function draw(box) {
  const figure = figures[box.dataset.figure];
  (figure.z ? heat : figure.steps ? gantt : figure.nodes ? network : chart)(box, figure);
}

function changed() {
  for (const button of document.querySelectorAll("[data-axis]")) button.setAttribute("aria-pressed", button.dataset.axis === state.axis);
  for (const button of document.querySelectorAll("[data-group]")) button.setAttribute("aria-pressed", !state.hidden.has(button.dataset.group));
  memory.save({ axis: state.axis, hidden: [...state.hidden] });
  boxes.forEach(draw);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-axis], [data-group]");
  if (!button) return;
  const { axis, group } = button.dataset;
  if (axis !== undefined) { state.axis = axis; state.zoom.clear(); }
  else if (!state.hidden.delete(group)) state.hidden.add(group);
  changed();
});
state.axis ||= document.querySelector("[data-axis]")?.dataset.axis || "";
let width = 0;
new ResizeObserver(() => { if (innerWidth !== width) { width = innerWidth; changed(); } }).observe(document.body);
addEventListener("beforeprint", changed);
const seconds = +document.body.dataset.reload;
if (seconds) setInterval(() => { if (!state.zoom.size && tip.hidden) location.reload(); }, 1000 * seconds);

// Drawing: elements, scales, ticks and marks. Text enters the page as text nodes only, never as markup.
const SVG = "http://www.w3.org/2000/svg";

function html(tag, attributes, ...children) { return fill(document.createElement(tag), attributes, children); }
function svg(tag, attributes, ...children) { return fill(document.createElementNS(SVG, tag), attributes, children); }

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

function label(x, y, words, attributes) { return svg("text", { x: round(x), y: round(y), ...attributes }, String(words)); }
function round(v) { return Math.round(v * 10) / 10; }
function colour(i, of) { return i < 10 ? `var(--c${i})` : `hsl(${Math.round(360 * i / Math.max(of || 0, i + 1))} 60% 50%)`; }
function dash(i) { return ["", "7 4", "2 3", "9 3 2 3", "12 4", "4 2"][(i + Math.floor(i / 10)) % 6]; }

// Eight shapes around (x, y), so that a group can be told without its colour.
const SHAPES = [
  r => `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
  r => `M${-r} ${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  r => `M0 ${-1.2 * r}L${1.15 * r} ${0.9 * r}H${-1.15 * r}z`,
  r => `M0 ${-1.35 * r}L${1.35 * r} 0L0 ${1.35 * r}L${-1.35 * r} 0z`,
  r => `M0 ${1.2 * r}L${1.15 * r} ${-0.9 * r}H${-1.15 * r}z`,
  r => `M${-r / 3} ${-1.2 * r}h${2 * r / 3}v${r * 0.87}h${r * 0.87}v${2 * r / 3}h${-r * 0.87}v${r * 0.87}h${-2 * r / 3}v${-r * 0.87}h${-r * 0.87}v${-2 * r / 3}h${r * 0.87}z`,
  r => `M${-r} ${-0.55 * r}h${2 * r}v${1.1 * r}h${-2 * r}z`,
  r => `M${-0.55 * r} ${-r}h${1.1 * r}v${2 * r}h${-1.1 * r}z`,
];
function mark(i, x, y, r, attributes) {
  return svg("path", { d: SHAPES[i % SHAPES.length](r), transform: `translate(${round(x)} ${round(y)})`, ...attributes });
}

function scale(low, high, from, to) {
  const span = high - low || 1;
  return v => from + (v - low) / span * (to - from);
}

// Round numbers between low and high, about as many as asked for.
function ticks(low, high, about) {
  const raw = (high - low) / Math.max(about, 1) || 1, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(m => m * unit).find(s => s >= raw * 0.999);
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) out.push(Number((k * step).toPrecision(12)));
  return out;
}

function plain(v) {
  if (v === null || v === undefined) return "–";
  const a = Math.abs(v);
  return a !== 0 && (a < 0.001 || a >= 1e6) ? v.toExponential(1) : String(Number(v.toFixed(a >= 100 ? 0 : a >= 10 ? 1 : 3)));
}
function bytes(v) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (v >= size) return plain(v / size) + " " + unit;
  return plain(v) + " B";
}
function seconds(v) { return v >= 7200 ? plain(v / 3600) + " h" : v >= 300 ? plain(v / 60) + " min" : plain(v) + " s"; }
const FORMATS = { round: v => String(v), bytes, seconds, plain };

// Axes with a grid; returns the scales and the room between them.
function axes(parent, box, x, y) {
  const across = scale(x.low, x.high, box.left, box.right), up = scale(y.low, y.high, box.bottom, box.top);
  for (const t of ticks(y.low, y.high, Math.max(4, (box.bottom - box.top) / 55))) {
    parent.append(svg("path", { class: "grid", d: `M${box.left} ${round(up(t))}H${box.right}` }),
      label(box.left - 6, up(t) + 4, y.format(t), { "text-anchor": "end", class: "dim" }));
  }
  for (const t of ticks(x.low, x.high, Math.max(2, (box.right - box.left) / 90))) {
    if (x.whole && !Number.isInteger(t)) continue;
    parent.append(svg("path", { class: "axis", d: `M${round(across(t))} ${box.bottom}v5` }),
      label(across(t), box.bottom + 18, x.format(t), { "text-anchor": "middle", class: "dim" }));
  }
  parent.append(svg("path", { class: "axis", d: `M${box.left} ${box.bottom}H${box.right}` }),
    label((box.left + box.right) / 2, box.bottom + 36, x.name, { "text-anchor": "middle" }),
    label(box.left - 44, box.top - 10, y.name, {}));
  return { across, up };
}

function path(xs, ys) {
  let d = "", pen = "M";
  for (let i = 0; i < xs.length; i++) {
    if (ys[i] === null || ys[i] === undefined) { pen = "M"; continue; }
    d += pen + round(xs[i]) + " " + round(ys[i]);
    pen = "L";
  }
  return d;
}

function swatch(i) {
  return svg("svg", { width: 34, height: 14, viewBox: "0 0 34 14", "aria-hidden": "true" },
    svg("path", { class: "line", d: "M1 7H33", stroke: colour(i), "stroke-dasharray": dash(i) }), mark(i, 17, 7, 4, { fill: colour(i) }));
}

// The same as a row of an exported figure, which has no buttons beside it.
function drawnLegend(parent, names, shown, left, top, width) {
  let x = left, y = top;
  names.forEach((name, i) => {
    if (!shown[i]) return;
    const room = 48 + name.length * 7;
    if (x > left && x + room > width) { x = left; y += 20; }
    parent.append(svg("path", { class: "line", d: `M${x} ${y}h28`, stroke: colour(i), "stroke-dasharray": dash(i) }),
      mark(i, x + 14, y, 4, { fill: colour(i) }), label(x + 34, y + 4, name, {}));
    x += room;
  });
  return y + 14;
}

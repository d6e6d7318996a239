// The page: controls beside figures, reading them by pointer or arrow keys, saving and copying.
const DATA = JSON.parse(document.getElementById("report-data").textContent);
const NAMES = DATA.groups.map(g => g.label);

function choice(title, options, start, change) {              // a row of radio buttons
  const name = "r" + (choice.count = (choice.count || 0) + 1);
  return html("fieldset", {}, html("legend", {}, title), options.map(([value, words]) => html("label", {},
    html("input", { type: "radio", name, value, checked: value === start, onchange: () => change(value) }), words)));
}
function menu(title, options, start, change) {
  const box = html("select", { onchange: () => change(box.value) }, options.map(([value, words]) => html("option", { value, selected: String(value) === String(start) }, words)));
  return html("label", {}, html("span", { class: "word" }, title), box);
}
function tick(title, start, change) {
  const box = html("input", { type: "checkbox", checked: start, onchange: () => change(box.checked) });
  return html("label", {}, box, title);
}
function legend(shown, change) {
  return html("div", { class: "legend", role: "group", "aria-label": "Methods shown" }, NAMES.map((name, i) => html("button", { type: "button", "aria-pressed": "true", onclick: e => {
    shown[i] = !shown[i];
    e.currentTarget.setAttribute("aria-pressed", String(shown[i]));
    change();
  } }, swatch(i), name)));
}

// A figure with its controls. `draw(width, exporting)` gives {figure, points}; returns a function that draws again.
function place(id, file, controls, draw) {
  const host = document.getElementById(id);
  if (!host) return () => {};
  const plot = html("div", { class: "plot scroll", tabindex: 0, role: "application", "aria-roledescription": "figure", "aria-label": host.dataset.title + ". Arrow keys read the values." });
  const readout = html("p", { class: "readout", "aria-live": "polite" }, "Point at the figure, or focus it and use the arrow keys, to read values.");
  const save = kind => html("button", { type: "button", onclick: () => saveFigure(draw(900, true).figure, file, kind) }, "Save " + kind.toUpperCase());
  host.append(...controls, plot, readout, html("div", { class: "actions" }, save("png"), save("svg")));
  let now = null, at = -1, cursor = null, last = 0;
  const redraw = () => {
    last = plot.clientWidth;
    now = draw(Math.max(280, last), false);
    at = -1;
    cursor = svg("g", { "pointer-events": "none" });
    now.figure.append(cursor);
    plot.replaceChildren(now.figure);
  };
  const read = i => {
    if (!now.points.length) return;
    at = Math.max(0, Math.min(now.points.length - 1, i));
    const point = now.points[at];
    cursor.replaceChildren(...(now.columns ? [svg("path", { class: "grid", d: `M${round(point.x)} 30V${now.figure.getAttribute("height") - 48}` })] : []),
      ...point.marks.map(m => svg("circle", { class: "cursor", cx: round(m.x), cy: round(m.y), r: 7 })));
    readout.textContent = point.text();
  };
  plot.addEventListener("pointermove", e => {
    const box = now.figure.getBoundingClientRect(), x = e.clientX - box.left, y = e.clientY - box.top;
    let best = -1, least = Infinity;
    now.points.forEach((p, i) => { const d = now.columns ? Math.abs(p.x - x) : (p.x - x) ** 2 + (p.y - y) ** 2; if (d < least) { least = d; best = i; } });
    if (best >= 0 && best !== at) read(best);
  });
  plot.addEventListener("keydown", e => {
    const stride = now.stride || 1, n = now.points.length;
    const move = { ArrowRight: at + stride, ArrowLeft: at - stride, ArrowUp: at + 1, ArrowDown: at - 1, Home: 0, End: n - 1 }[e.key];
    if (move === undefined) return;
    e.preventDefault();
    read(at < 0 ? 0 : move);
  });
  new ResizeObserver(() => { if (plot.clientWidth !== last) redraw(); }).observe(plot);
  redraw();
  return redraw;
}

// Colours come from the style sheet; a file on its own needs them written out. Files are always light, for print.
function standalone(figure) {
  const holder = html("div", { class: "on-paper hidden-copy", style: "background:#ffffff" }, figure);
  document.body.append(holder);
  for (const node of [figure, ...figure.querySelectorAll("*")]) {
    const style = getComputedStyle(node);
    const keep = node.tagName === "text" ? ["fill", "font-family", "font-size", "font-weight", "stroke", "stroke-width", "paint-order"] : ["fill", "stroke", "stroke-width", "opacity"];
    for (const property of keep) node.setAttribute(property, style.getPropertyValue(property));
    node.removeAttribute("class");
    node.removeAttribute("style");
  }
  figure.prepend(svg("rect", { width: "100%", height: "100%", fill: "#ffffff" }));
  holder.remove();
  return new XMLSerializer().serializeToString(figure);
}
function saveFigure(figure, file, kind) {
  const text = standalone(figure), width = Number(figure.getAttribute("width")), height = Number(figure.getAttribute("height"));
  if (kind === "svg") return download(new Blob([text], { type: "image/svg+xml" }), file + ".svg");
  const image = new Image();
  image.onload = () => {
    const board = html("canvas", { width: 2 * width, height: 2 * height }), pen = board.getContext("2d");
    pen.scale(2, 2);
    pen.drawImage(image, 0, 0, width, height);
    board.toBlob(blob => download(blob, file + ".png"), "image/png");
  };
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(text);
}
function download(blob, name) {
  const link = html("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
async function copy(text, button) {
  const was = button.textContent;
  try { await navigator.clipboard.writeText(text); }
  catch {                                              // pages opened from a file may not use the clipboard directly
    const area = html("textarea", { class: "hidden-copy", "aria-hidden": "true" }, text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = was; }, 1500);
}

for (const button of document.querySelectorAll("button[data-copy]")) button.addEventListener("click", () => copy(DATA.copies[button.dataset.copy], button));
const differences = document.getElementById("only-differences");
if (differences) differences.addEventListener("change", () => document.getElementById("settings-table").classList.toggle("only-differences", differences.checked));

function curves() {
  const { measures, groups } = DATA.curves, shown = NAMES.map(() => true);
  const state = { axis: "round", measure: measures[0].name, single: false };
  const axis = { round: { name: "round", format: FORMATS.round, whole: true }, bytes: { name: "sent and received", format: FORMATS.bytes }, seconds: { name: "time", format: FORMATS.seconds } };
  const draw = (width, exporting) => {
    const lines = [];
    groups.forEach((g, i) => {
      const m = g.mean && g.mean.y[state.measure];
      if (m) lines.push({ group: i, name: g.label, xs: g.mean[state.axis], ys: m.mean, std: m.std });
      if (!m || state.single) for (const r of g.runs) if (r.y[state.measure]) lines.push({ group: i, thin: !!m, name: g.runs.length > 1 ? `${g.label}, seed ${r.seed}` : g.label, xs: r[state.axis], ys: r.y[state.measure] });
    });
    const title = measures.find(m => m.name === state.measure).label;
    return drawLines(lines, NAMES, shown, { title: `${title} by ${axis[state.axis].name}`, y: title, x: axis[state.axis], share: !state.measure.includes("loss") }, width, exporting);
  };
  const again = place("figure-curves", "convergence", [html("div", { class: "controls" },
    menu("Shown", measures.map(m => [m.name, m.label]), state.measure, v => { state.measure = v; again(); }),
    choice("by", [["round", "round"], ["bytes", "bytes"], ["seconds", "seconds"]], "round", v => { state.axis = v; again(); }),
    tick("single runs", false, v => { state.single = v; again(); })), legend(shown, () => again())], draw);
}

function clients() {
  const entries = DATA.clients;
  if (!entries.length) return;
  const groups = [...new Set(entries.map(e => e.group))], first = entries.find(e => e.local) || entries[0];
  const state = { group: first.group, seed: first.seed };
  const seeds = () => entries.filter(e => e.group === state.group).map(e => e.seed);
  const pick = () => entries.find(e => e.group === state.group && e.seed === state.seed);
  const holder = html("span", {});
  const refill = () => { if (!seeds().includes(state.seed)) state.seed = seeds()[0]; holder.replaceChildren(menu("Seed", seeds().map(s => [s, s]), state.seed, v => { state.seed = Number(v); again(); })); };
  refill();
  const again = place("figure-clients", "clients", [html("div", { class: "controls" },
    menu("Method", groups.map(g => [g, NAMES[g]]), state.group, v => { state.group = Number(v); refill(); again(); }), holder)],
    (width, exporting) => drawClients(pick(), NAMES, width, exporting));
}

function splits() {
  if (!DATA.splits.length) return;
  const state = { i: 0 }, facts = html("p", { class: "note" });
  const tell = () => { const s = DATA.splits[state.i]; facts.textContent = `${s.data}, ${s.split}: ${s.clients} clients, ${s.samples} samples, ${s.size.min} to ${s.size.max} per client; ${plain(s.effective)} effective classes per client; distance from the pooled labels ${plain(s.skew)}; hash ${s.hash}.` + (s.clients > s.names.length ? ` The first ${s.names.length} clients are shown.` : ""); };
  tell();
  const controls = DATA.splits.length > 1 ? [html("div", { class: "controls" }, menu("Split", DATA.splits.map((s, i) => [i, `${s.data}, seed ${s.seed}, ${s.hash}`]), 0, v => { state.i = Number(v); tell(); again(); }))] : [];
  const again = place("figure-split", "split", [...controls, facts], (width, exporting) => drawSplit(DATA.splits[state.i], width, exporting));
}

function maps() {
  if (!DATA.maps.length) return;
  const state = { i: Math.max(0, DATA.maps.findIndex(m => NAMES[m.group] !== "local")), by: "class" };
  const again = place("figure-maps", "features", [html("div", { class: "controls" },
    menu("Method", DATA.maps.map((m, i) => [i, `${NAMES[m.group]}, seed ${m.seed}, round ${m.round}`]), state.i, v => { state.i = Number(v); again(); }),
    choice("coloured by", [["class", "class"], ["client", "client"]], "class", v => { state.by = v; again(); }))],
    (width, exporting) => drawMaps(DATA.maps[state.i], state.by, width, exporting));
}

function traces() {
  const labels = [...new Set(DATA.traces.map(t => t.label))];
  if (!labels.length) return;
  const shown = NAMES.map(() => true), state = { label: labels[0] };
  const again = place("figure-traces", "traces", [html("div", { class: "controls" }, menu("Shown", labels.map(l => [l, l]), state.label, v => { state.label = v; again(); })), legend(shown, () => again())],
    (width, exporting) => drawLines(DATA.traces.filter(t => t.label === state.label).map(t => ({ group: t.group, name: [NAMES[t.group], `seed ${t.seed}`, t.client].filter(Boolean).join(", "), xs: t.x, ys: t.y })),
      NAMES, shown, { title: state.label, y: state.label, x: { name: "local step", format: FORMATS.round, whole: true }, share: false }, width, exporting));
}

curves(); clients(); splits(); maps(); traces();
document.documentElement.dataset.drawn = String(Math.round(performance.now()));      // milliseconds from opening to drawn

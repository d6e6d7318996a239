// Figures. Each draws into a fresh <svg> of a given width and returns it with the points that pointer and arrow keys visit.

function canvas(width, height, title) {
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title, xmlns: SVG });
}

// Lines with bands: convergence and traces. lines: [{group, xs, ys, std?, thin?, name}]
function drawLines(lines, names, shown, opt, width, exporting) {
  const visible = lines.filter(l => shown[l.group] && l.ys.some(v => v !== null));
  const height = exporting ? 480 : Math.max(260, Math.min(420, width * 0.55));
  const ends = width > 560 && !exporting ? Math.min(180, 24 + 7 * Math.max(0, ...names.filter((_, i) => shown[i]).map(n => Math.min(n.length, 22)))) : 16;
  const box = { left: 54, right: width - ends, top: 34, bottom: height - 48 };
  const figure = canvas(width, height, opt.title);
  if (!visible.length) { figure.append(label(width / 2, height / 2, "Nothing to show: choose a method or another measure.", { "text-anchor": "middle" })); return { figure, points: [] }; }
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const l of visible) l.ys.forEach((v, i) => {
    if (v === null) return;
    const s = l.std && l.std[i] || 0;
    x0 = Math.min(x0, l.xs[i]); x1 = Math.max(x1, l.xs[i]); y0 = Math.min(y0, v - s); y1 = Math.max(y1, v + s);
  });
  const pad = (y1 - y0 || 0.1) * 0.06;
  y0 = opt.share ? Math.max(0, y0 - pad) : y0 - pad;
  y1 = opt.share ? Math.min(1, y1 + pad) : y1 + pad;
  if (opt.x.name === "round") x0 = Math.min(x0, 1);
  const { across, up } = axes(figure, box, { ...opt.x, low: x0, high: x1 }, { name: opt.y, low: y0, high: y1, format: plain });
  const at = l => ({ xs: l.xs.map(across), ys: l.ys.map(v => v === null ? null : up(v)) });
  for (const l of visible.filter(l => l.std)) {
    const keep = l.ys.map((v, i) => i).filter(i => l.ys[i] !== null && l.std[i] !== null);
    const edge = (sign, order) => order.map(i => `${round(across(l.xs[i]))} ${round(up(l.ys[i] + sign * l.std[i]))}`).join("L");
    if (keep.length > 1) figure.append(svg("path", { class: "band", fill: colour(l.group), d: `M${edge(1, keep)}L${edge(-1, [...keep].reverse())}z` }));
  }
  for (const l of visible.filter(l => l.thin)) { const p = at(l); figure.append(svg("path", { class: "thin", stroke: colour(l.group), d: path(p.xs, p.ys) })); }
  const labels = [], points = [];
  for (const l of visible.filter(l => !l.thin)) {
    const p = at(l), last = p.ys.reduce((a, v, i) => v === null ? a : i, 0);
    figure.append(svg("path", { class: "line", stroke: colour(l.group), "stroke-dasharray": dash(l.group), d: path(p.xs, p.ys) }));
    const every = Math.max(1, Math.round(p.xs.length / 6));
    for (let i = (l.group * 2) % every; i < p.xs.length; i += every) if (p.ys[i] !== null) figure.append(mark(l.group, p.xs[i], p.ys[i], 3.5, { fill: colour(l.group) }));
    figure.append(mark(l.group, p.xs[last], p.ys[last], 4, { fill: colour(l.group) }));
    labels.push({ y: p.ys[last], group: l.group });
    l.xs.forEach((x, i) => { if (p.ys[i] !== null) points.push({ x: p.xs[i], y: p.ys[i], key: x, group: l.group,
      text: `${l.name}: ${plain(l.ys[i])}${l.std && l.std[i] !== null ? " ± " + plain(l.std[i]) : ""}` }); });
  }
  if (ends > 16) {                                     // names at the ends of their lines, pushed apart
    labels.sort((a, b) => a.y - b.y);
    labels.forEach((e, i) => { if (i && e.y < labels[i - 1].y + 14) e.y = labels[i - 1].y + 14; });
    const over = labels.length ? Math.max(0, labels[labels.length - 1].y - box.bottom) : 0;
    if (labels.length * 14 < box.bottom - box.top) for (const e of labels) {
      const name = names[e.group];
      figure.append(label(box.right + 9, e.y - over + 4, name.length > 22 ? name.slice(0, 21) + "…" : name, { fill: colour(e.group), style: `fill:${colour(e.group)}` }));
    }
  }
  if (exporting) {
    const end = drawnLegend(figure, names, names.map((_, i) => visible.some(l => l.group === i)), box.left, height + 6, width - 10);
    figure.setAttribute("height", end);
    figure.setAttribute("viewBox", `0 0 ${width} ${end}`);
  }
  return { figure, points: readings(points, opt.x), columns: true };
}

// One reading for each x: what every line shows there, or last showed before.
function readings(points, x) {
  const keys = [...new Set(points.map(p => p.key))].sort((a, b) => a - b), groups = new Map();
  for (const p of points) { if (!groups.has(p.group)) groups.set(p.group, []); groups.get(p.group).push(p); }
  for (const own of groups.values()) own.sort((a, b) => a.key - b.key);
  const next = new Map(), out = [];
  for (const key of keys) {
    const here = [];
    for (const [group, own] of groups) {
      let i = next.get(group) ?? -1;
      while (i + 1 < own.length && own[i + 1].key <= key) i++;
      next.set(group, i);
      if (i >= 0) here.push(own[i]);
    }
    out.push({ x: points.length ? here.find(p => p.key === key).x : 0, marks: here, text: () => `${x.name} ${x.format(key)} — ` + here.map(p => p.text).join("; ") });
  }
  return out;
}

// Clients from worst to best; a line to where each would be alone.
function drawClients(entry, names, width, exporting) {
  const n = entry.names.length, wide = (width - 74) / n >= 13;
  const longest = Math.min(16, Math.max(...entry.names.map(s => s.length)));
  const below = wide ? 24 + longest * 6.4 : 44, height = 290 + below;
  const box = { left: 54, right: width - 20, top: 34, bottom: height - below };
  const figure = canvas(width, height + (exporting ? 24 : 0), `${entry.measure} of ${n} clients under ${names[entry.group]}, seed ${entry.seed}, sorted; worst ${entry.names[0]} with ${plain(entry.accuracy[0])}`);
  const all = [...entry.accuracy, ...(entry.local || []).filter(v => v !== null)];
  const low = Math.max(0, Math.min(...all) - 0.05), high = Math.min(1, Math.max(...all) + 0.03);
  const up = scale(low, high, box.bottom, box.top), across = i => box.left + (i + 0.5) * (box.right - box.left) / n;
  for (const t of ticks(low, high, 5)) figure.append(svg("path", { class: "grid", d: `M${box.left} ${round(up(t))}H${box.right}` }), label(box.left - 6, up(t) + 4, plain(t), { "text-anchor": "end", class: "dim" }));
  figure.append(svg("path", { class: "axis", d: `M${box.left} ${box.bottom}H${box.right}` }), label(10, 20, entry.measure, {}));
  if (!wide) figure.append(label((box.left + box.right) / 2, height - 12, `${n} clients, from worst to best`, { "text-anchor": "middle" }));
  const r = Math.max(2, Math.min(5, (box.right - box.left) / n / 3)), points = [];
  const mean = entry.mean;
  figure.append(svg("path", { class: "axis", "stroke-dasharray": "5 4", d: `M${box.left} ${round(up(mean))}H${box.right}` }), label(box.left + 4, up(mean) - 5, `mean ${plain(mean)}`, { class: "dim halo" }));
  entry.names.forEach((name, i) => {
    const x = across(i), y = up(entry.accuracy[i]), alone = entry.local ? entry.local[i] : null;
    const worse = alone !== null && entry.accuracy[i] < alone;
    if (alone !== null) figure.append(svg("path", { d: `M${round(x)} ${round(up(alone))}V${round(y)}`, stroke: worse ? "var(--c1)" : "var(--c2)", "stroke-width": 2, "stroke-dasharray": worse ? "3 2" : "" }),
      mark(3, x, up(alone), r * 0.9, { fill: "var(--paper)", stroke: "var(--edge)", "stroke-width": 1.5 }));
    figure.append(mark(0, x, y, r, { fill: worse ? "var(--c1)" : "var(--c0)" }));
    if (wide) figure.append(label(0, 0, name.length > 16 ? name.slice(0, 15) + "…" : name, { transform: `translate(${round(x + 4)} ${box.bottom + 8}) rotate(-90)`, "text-anchor": "end", class: "dim" }));
    points.push({ x, y, marks: [{ x, y }], text: () => `${name}: ${plain(entry.accuracy[i])}` + (alone === null ? "" : `, alone ${plain(alone)}, ${worse ? "loses" : "gains"} ${plain(Math.abs(entry.accuracy[i] - alone))}`) });
  });
  const y = up(entry.accuracy[0]), name = entry.names[0].length > 24 ? entry.names[0].slice(0, 23) + "…" : entry.names[0];
  const taken = entry.local && entry.local[0] !== null && up(entry.local[0]) > y;        // where the line to `alone` goes down
  figure.append(mark(0, across(0), y, r + 4, { class: "cursor" }), label(across(0) + r + 9, y + (taken ? -8 : 14), `worst: ${name}, ${plain(entry.accuracy[0])}`, { class: "halo" }));
  if (exporting) figure.append(mark(0, 64, height + 8, 5, { fill: "var(--c0)" }), label(74, height + 12, names[entry.group], {}),
    ...(entry.local ? [mark(3, 264, height + 8, 5, { fill: "var(--paper)", stroke: "var(--edge)" }), label(274, height + 12, "alone (local)", {})] : []));
  return { figure, points };
}

// Clients across, classes up, the area of a circle is the number of samples.
function drawSplit(split, width, exporting) {
  const clients = split.names.length, classes = split.classes.length;
  const short = s => s.length > 14 ? s.slice(0, 13) + "…" : s;
  const plainNames = split.names.every(n => /^client\d+$/.test(n)) ? split.names.map(n => String(Number(n.slice(6)))) : split.names.map(short);
  const left = 20 + 7 * Math.max(...split.classes.map(c => short(c).length)) + 22;
  const cell = Math.max(9, Math.min(56, (width - left - 12) / clients));
  const tall = Math.max(9, Math.min(cell, 30)), turned = Math.max(...plainNames.map(n => n.length)) * 7 > cell;
  const below = turned ? 30 + 7 * Math.max(...plainNames.map(n => n.length)) : 40;
  const right = left + cell * clients, top = 40, bottom = top + tall * classes;
  const figure = canvas(Math.max(width, right + 12), bottom + below, `Samples of ${classes} classes on ${split.clients} clients, ${split.split}`);
  const most = Math.max(1, ...split.counts.flat()), biggest = Math.min(cell, tall) * 0.48;
  const every = Math.max(1, Math.ceil(13 / cell)), each = Math.max(1, Math.ceil(13 / tall));
  figure.append(label(left, 18, `largest circle: ${most} samples`, { class: "dim" }));
  for (let c = 0; c < classes; c++) {
    const y = bottom - (c + 0.5) * tall;
    figure.append(svg("path", { class: "grid", d: `M${left} ${round(y)}H${round(right)}` }));
    if (c % each === 0) figure.append(label(left - 6, y + 4, short(split.classes[c]), { "text-anchor": "end", class: "dim" }));
  }
  const points = [];
  split.counts.forEach((row, i) => {
    const x = left + (i + 0.5) * cell;
    if (i % every === 0) figure.append(turned ? label(0, 0, plainNames[i], { transform: `translate(${round(x + 4)} ${bottom + 8}) rotate(-90)`, "text-anchor": "end", class: "dim" })
      : label(x, bottom + 16, plainNames[i], { "text-anchor": "middle", class: "dim" }));
    row.forEach((count, c) => {
      const y = bottom - (c + 0.5) * tall;
      if (count) figure.append(svg("circle", { cx: round(x), cy: round(y), r: Math.max(0.7, round(biggest * Math.sqrt(count / most))), fill: "var(--c0)", "fill-opacity": 0.85 }));
      points.push({ x, y, marks: [{ x, y }], text: () => `${split.names[i]}, class ${split.classes[c]}: ${count} samples` });
    });
  });
  figure.append(label((left + Math.min(right, width)) / 2, bottom + below - 6, "client", { "text-anchor": "middle" }), label(4, 32, "class", {}));
  return { figure, points, stride: classes };
}

// Two maps; shape tells the client, colour the class or the client.
function drawMaps(entry, by, width, exporting) {
  const side = width >= 620, gap = 16, panel = side ? (width - gap) / 2 : width, room = Math.min(panel, 460);
  const figure = canvas(width, side ? room + 30 : 2 * (room + 34), `Feature maps before and after local training, coloured by ${by}`);
  const groups = by === "class" ? entry.class : entry.client, words = by === "class" ? entry.classes : entry.clients, points = [];
  ["before", "after"].forEach((when, k) => {
    const ox = side ? k * (panel + gap) : 0, oy = side ? 26 : k * (room + 34) + 26;
    figure.append(label(ox + 2, oy - 8, `${when} local training`, {}), svg("rect", { class: "grid", x: ox + 1, y: oy, width: panel - 2, height: room }));
    const size = Math.min(panel, room) - 28, px = ox + (panel - size) / 2, py = oy + (room - size) / 2, sums = new Map();
    entry.points[when].forEach(([u, v], i) => {
      const x = px + u * size, y = py + (1 - v) * size, g = groups[i];
      figure.append(mark(entry.client[i], x, y, 3, { fill: colour(g, words.length), "fill-opacity": 0.8 }));
      if (!sums.has(g)) sums.set(g, [[], []]);
      sums.get(g)[0].push(x); sums.get(g)[1].push(y);
      points.push({ x, y, marks: [{ x, y }], text: () => `${when}: class ${entry.classes[entry.class[i]]}, client ${entry.clients[entry.client[i]]}` });
    });
    const middle = list => list.sort((a, b) => a - b)[Math.floor(list.length / 2)];
    for (const [g, [xs, ys]] of sums) figure.append(label(middle(xs), middle(ys) + 4, words[g].slice(0, 14), { "text-anchor": "middle", class: "halo", "font-weight": "bold", style: "font-weight:700" }));
  });
  return { figure, points };
}

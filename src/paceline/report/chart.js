const $ = id => document.getElementById(id);
const NS = "http://www.w3.org/2000/svg";
const colour = i => `var(--c${i % 6})`;
const short = v => Math.abs(v) >= 1000 ? (v / 1000).toFixed(Math.abs(v) >= 10000 ? 0 : 1) + "k" : Math.abs(v) >= 100 ? v.toFixed(0) : String(+v.toPrecision(3));
const full = v => Math.abs(v) >= 100 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(3));
const range = e => `${full(e.value)} ${e.unit}` + (e.low === e.high ? "" : ` (${full(e.low)} to ${full(e.high)})`);
const make = (tag, attributes, parent, text) => {
  const node = document.createElementNS(NS, tag);
  for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
};
const html = (tag, text, parent, cls) => {
  const node = document.createElement(tag);
  node.textContent = text;
  if (cls) node.className = cls;
  if (parent) parent.appendChild(node);
  return node;
};
const brief = name => name.replace(/^model:.*\//, "model:").replace(/\.gguf\b/, "");
function ticks(low, high, log) {
  if (log) {
    const found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
      for (const m of [1, 2, 5]) { const v = m * 10 ** e; if (v >= low * .999 && v <= high * 1.001) found.push(v); }
    return found.length > 7 ? found.filter((v, i) => String(v).replace(/[.0]/g, "") === "1" || found.length < 10) : found;
  }
  const raw = (high - low) / 5, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * size).find(s => s >= raw);
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step / 1e6; v += step) found.push(+v.toPrecision(12));
  return found;
}
function chart(place, o) {
  const W = o.width || 520, H = o.height || 270, L = 52, R = 14, T = 10, B = 38;
  const points = o.series.flatMap(s => s.points);
  if (!points.length) { html("p", "Nothing to draw.", $(place), "note"); return; }
  const xs = points.map(p => p[0]), ys = points.flatMap(p => p.length > 4 ? [p[1], p[3], p[4]] : [p[1]]);
  let x0 = Math.min(...xs), x1 = Math.max(...xs), y0 = o.ylog ? Math.min(...ys) : Math.min(0, ...ys), y1 = Math.max(...ys) * (o.ylog ? 1.1 : 1.06);
  if (x0 === x1) { x0 = o.xlog ? x0 / 2 : x0 - 1; x1 = o.xlog ? x1 * 2 : x1 + 1; }
  if (y0 === y1) y1 = y0 + 1;
  const scale = (v, a, b, log) => log ? (Math.log(v) - Math.log(a)) / (Math.log(b) - Math.log(a)) : (v - a) / (b - a);
  const px = v => L + scale(v, x0, x1, o.xlog) * (W - L - R), py = v => H - B - scale(v, y0, y1, o.ylog) * (H - T - B);
  const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": o.label }, $(place));
  for (const v of ticks(y0, y1, o.ylog)) { make("line", { class: "gridline", x1: L, x2: W - R, y1: py(v), y2: py(v) }, svg); make("text", { x: L - 7, y: py(v) + 4, "text-anchor": "end" }, svg, o.percent ? Math.round(v * 100) + " %" : short(v)); }
  for (const v of ticks(x0, x1, o.xlog)) make("text", { x: px(v), y: H - B + 16, "text-anchor": "middle" }, svg, short(v));
  make("line", { class: "axis", x1: L, x2: W - R, y1: H - B, y2: H - B }, svg);
  make("text", { x: (L + W - R) / 2, y: H - 4, "text-anchor": "middle" }, svg, o.xlabel);
  make("text", { x: 0, y: 0, transform: `translate(12 ${(H - B + T) / 2}) rotate(-90)`, "text-anchor": "middle" }, svg, o.ylabel);
  for (const m of o.marks || []) if (m[0] >= x0 && m[0] <= x1) { make("line", { class: "mark", x1: px(m[0]), x2: px(m[0]), y1: T, y2: H - B }, svg); make("text", { x: px(m[0]) + 3, y: T + 9 }, svg, m[1]); }
  const dots = [];
  o.series.forEach((s, i) => {
    if (s.points[0] && s.points[0].length > 4) {
      const up = s.points.map(p => `${px(p[0])},${py(p[4])}`), down = s.points.map(p => `${px(p[0])},${py(p[3])}`).reverse();
      make("polygon", { points: [...up, ...down].join(" "), fill: colour(s.colour ?? i), opacity: .13 }, svg);
    }
    let d = "";
    s.points.forEach((p, n) => { d += n === 0 ? `M${px(p[0])},${py(p[1])}` : o.step ? `H${px(p[0])}V${py(p[1])}` : `L${px(p[0])},${py(p[1])}`; });
    make("path", { d, stroke: colour(s.colour ?? i), "stroke-dasharray": s.dash || "" }, svg);
    if (o.dots) for (const p of s.points) make("circle", { cx: px(p[0]), cy: py(p[1]), r: 4, fill: colour(s.colour ?? i) }, svg);
    for (const p of s.points) dots.push({ x: px(p[0]), y: py(p[1]), text: p[2], colour: colour(s.colour ?? i) });
  });
  for (const p of o.stars || []) { const c = make("circle", { cx: px(p[0]), cy: py(p[1]), r: 6.5, fill: "var(--good)" }, svg); c.setAttribute("data-star", "1"); dots.push({ x: px(p[0]), y: py(p[1]), text: p[2], colour: "var(--good)" }); }
  const ring = make("circle", { r: 5, opacity: 0 }, svg);
  svg.addEventListener("mousemove", event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * W / box.width, y = (event.clientY - box.top) * H / box.height;
    let best = null, near = 1600;
    for (const dot of dots) { const far = (dot.x - x) ** 2 + (dot.y - y) ** 2; if (far < near) { near = far; best = dot; } }
    if (!best) { ring.setAttribute("opacity", 0); $("tip").style.opacity = 0; return; }
    ring.setAttribute("cx", best.x); ring.setAttribute("cy", best.y); ring.setAttribute("fill", best.colour); ring.setAttribute("opacity", 1);
    const tip = $("tip");
    tip.textContent = best.text;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - 290) + "px"; tip.style.top = event.clientY + 16 + "px"; tip.style.opacity = 1;
  });
  svg.addEventListener("mouseleave", () => { ring.setAttribute("opacity", 0); $("tip").style.opacity = 0; });
  if (o.series.length > 1 || o.series[0].name) {
    const legend = html("div", "", $(place), "legend");
    o.series.forEach((s, i) => { const item = html("span", "", legend); const line = html("i", "", item); line.style.background = colour(s.colour ?? i); item.append(s.name); });
  }
}
function stacked(place, groups, parts, unit) {
  const most = Math.max(...groups.map(g => g.values.reduce((a, b) => a + b, 0)));
  for (const g of groups) {
    const bar = html("div", "", $(place), "bar");
    let left = 0;
    g.values.forEach((v, i) => {
      const piece = html("div", "", bar), share = 100 * v / most;
      piece.style.cssText = `position:absolute;top:0;left:${left}%;width:${share}%;border-radius:0;background:${colour(i + 1)}`;
      left += share;
    });
    html("span", g.name, bar); html("em", g.values.map(v => v.toFixed(1)).join(" + ") + ` ${unit}`, bar);
  }
  const legend = html("div", "", $(place), "legend");
  parts.forEach((name, i) => { const item = html("span", "", legend), line = html("i", "", item); line.style.background = colour(i + 1); item.append(name); });
}
function rows(place, head, body) {
  const table = html("table", "", $(place)), top = html("tr", "", table);
  for (const h of head) html("th", h, top);
  for (const row of body) { const line = html("tr", "", table); for (const v of row) html("td", String(v), line); }
}
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});

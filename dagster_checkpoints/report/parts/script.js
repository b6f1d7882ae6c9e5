"use strict";
const report = JSON.parse(document.getElementById("data").textContent);
const rows = report.checkpoints.map(values => Object.fromEntries(report.columns.map((name, i) => [name, values[i]])));
const details = new Map(report.details.map(each => [`${each.epoch}-${each.checkpoint_id}`, each.vertices]));
const PHASES = [["start delay", "--blue"], ["alignment", "--teal"], ["sync", "--orange"], ["async", "--violet"]];
const COLORS = ["--blue", "--orange", "--teal", "--violet", "--red", "--green", "--yellow"];
const KINDS = {
  run: "--blue", start: "--teal", restart: "--red", rescale: "--orange", savepoint: "--violet", stop: "--yellow", finish: "--green", end: "--quiet",
};
const PAGE = 50;

// Elements: text is always set as text, never read as HTML.

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(9)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const color = name => `var(${name})`;
const pill = (text, kind) => el("span", {class: `pill ${kind || ""}`}, text);
const card = (title, ...children) => el("section", {class: "card"}, title ? el("h2", {}, title) : null, ...children);
const tile = (name, value, more, kind) => el("div", {class: `tile ${kind || ""}`},
  el("div", {class: "name"}, name), el("div", {class: "value"}, value), more ? el("div", {class: "more"}, more) : null);

// Numbers as text

function bytes(count) {
  if (count === null || count === undefined) return "–";
  if (count < 1000) return `${Math.round(count)} B`;
  for (const unit of ["kB", "MB", "GB", "TB"]) {
    count /= 1000;
    if (count < 999.5 || unit === "TB") return `${count.toFixed(count < 99.95 ? 1 : 0)} ${unit}`;
  }
}
function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (Math.abs(value) < 0.9995) return `${Math.max(1, Math.round(value * 1000))} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  const whole = Math.round(value);
  for (const [size, name, part, partName] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (whole >= size) {
      const rest = Math.floor(whole % size / part);
      return `${Math.floor(whole / size)} ${name}${rest ? ` ${rest} ${partName}` : ""}`;
    }
  }
  return `${whole} s`;
}
const count = value => value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 || value === 0 ? count(value) : value.toFixed(value >= 10 ? 1 : 2);
}
const moment = at => at === null || at === undefined ? "–" : new Date(at * 1000).toISOString().slice(0, 19).replace("T", " ");
const clock = (at, span) => new Date(at * 1000).toISOString().slice(...(span > 3 * 86400 ? [5, 10] : span > 300 ? [11, 16] : [11, 19]));
const formats = {s: seconds, B: bytes};

// Tables

function table(columns, lines, caption) {
  const head = columns.map(([name, kind]) => el("th", {scope: "col", class: kind}, name));
  const body = lines.map(line => line instanceof Node ? line : el("tr", {}, line.map((cell, i) =>
    el(i ? "td" : "th", {class: columns[i][1], scope: i ? null : "row"}, cell))));
  return el("div", {class: "scroll"}, el("table", {}, caption ? el("caption", {hidden: true}, caption) : null,
    el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

// Charts

function ticks(maximum, format) {
  if (!(maximum > 0)) return [0, 1];
  const raw = maximum / 3, power = 10 ** Math.floor(Math.log10(raw));
  const steps = format === seconds && raw > 20 ? TIME_STEPS : [1, 2, 2.5, 5, 10].map(factor => factor * power);
  const step = steps.find(each => each >= raw * 0.999) || 10 * power;
  const found = [];
  for (let value = 0; value < maximum + step * 0.999; value += step) found.push(value);
  return found;
}

/** Without zeros behind the point: `6.00 s` becomes `6 s`. */
const short = text => text.replace(/(\.\d*?)0+(?= |$)/, "$1").replace(/\.(?= |$)/, "");
const TIME_STEPS = [60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800, 2592000];

/** Breaks a curve where another run begins. */
function byRun(found, point) {
  return found.flatMap((row, i) => i && found[i - 1].epoch !== row.epoch ? [[row.triggered_at, null], point(row)] : [point(row)]);
}

/** A chart over time. Each line: {name, color, points: [[time, value or null]], area}; marks: [[time, text]] are failures. */
function chart(width, lines, format, marks, label) {
  const known = lines.flatMap(line => line.points).filter(point => point[1] !== null);
  if (known.length < 1 && !(marks || []).length) return el("p", {class: "quiet"}, "No values yet.");
  const height = 190, left = 62, right = 12, top = 12, bottom = 24;
  const times = [...lines.flatMap(line => line.points.map(point => point[0])), ...(marks || []).map(mark => mark[0])];
  let first = times.reduce((a, b) => Math.min(a, b)), last = times.reduce((a, b) => Math.max(a, b));
  if (last - first < 1) { first -= 0.5; last += 0.5; }
  const steps = ticks(known.reduce((a, point) => Math.max(a, point[1]), 0), format);
  const highest = steps[steps.length - 1];
  const x = at => left + (at - first) / (last - first) * (width - left - right);
  const y = value => height - bottom - value / highest * (height - top - bottom);
  const grid = steps.map(value => [
    svg("line", {x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: color("--line")}),
    svg("text", {x: left - 8, y: y(value) + 4, "text-anchor": "end"}, short(format(value)))]);
  const labels = width < 420 ? 3 : 6;
  const dates = Array.from({length: labels}, (_, i) => first + (last - first) * i / (labels - 1)).map((at, i) =>
    svg("text", {x: x(at), y: height - 6, "text-anchor": i === 0 ? "start" : i === labels - 1 ? "end" : "middle"}, clock(at, last - first)));
  const drawn = lines.map(line => {
    const pieces = [];
    let piece = [];
    for (const point of [...thinned(line.points, first, last, width), [0, null]]) {
      if (point[1] === null) { if (piece.length) pieces.push(piece); piece = []; } else piece.push(point);
    }
    return pieces.map(points => {
      const path = points.map((point, i) => `${i ? "L" : "M"}${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join("");
      const ends = [x(points[0][0]), x(points[points.length - 1][0])];
      return [
        line.area ? svg("path", {d: `${path}L${ends[1]},${y(0)}L${ends[0]},${y(0)}Z`, fill: color(line.color), opacity: .13}) : null,
        svg("path", {d: path, fill: "none", stroke: color(line.color), "stroke-width": 1.7, "stroke-linejoin": "round"}),
        points.length < 40 ? points.map(point => svg("circle", {cx: x(point[0]), cy: y(point[1]), r: 2.6, fill: color(line.color)})) : null];
    });
  });
  const failed = (marks || []).map(([at, text]) => svg("g", {stroke: color("--red"), "stroke-width": 1.8},
    svg("title", {}, text), svg("path", {d: `M${x(at) - 4},${y(0) - 12}l8,8m0,-8l-8,8`})));
  const cross = svg("line", {y1: top, y2: height - bottom, stroke: color("--quiet"), "stroke-dasharray": "3 3", visibility: "hidden"});
  const tip = el("div", {class: "tip", hidden: true});
  const move = event => {
    const box = event.currentTarget.getBoundingClientRect();
    const at = first + (event.clientX - box.left - left) / (width - left - right) * (last - first);
    const near = lines.map(line => nearest(line.points, at)).filter(point => point && point[1] !== null);
    if (!near.length) return;
    const texts = lines.map(line => [line, nearest(line.points, near[0][0])]).filter(pair => pair[1] && pair[1][1] !== null)
      .map(([line, point]) => `${lines.length > 1 ? `${line.name} ` : ""}${point[2] ? `${point[2]}: ` : ""}${format(point[1])}`);
    tip.textContent = `${moment(near[0][0])}  ·  ${texts.slice(0, 3).join("  ·  ")}`;
    tip.hidden = false;
    const half = tip.offsetWidth / 2;
    tip.style.left = `${Math.min(Math.max(x(near[0][0]), half), width - half)}px`;
    cross.setAttribute("x1", x(near[0][0]));
    cross.setAttribute("x2", x(near[0][0]));
    cross.setAttribute("visibility", "visible");
  };
  const leave = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); };
  const picture = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, onpointermove: move, onpointerleave: leave},
    grid, dates, drawn, failed, cross);
  return el("div", {class: "chart"}, picture, tip, lines.length > 1 ? legend(lines.map(line => [line.name, line.color])) : null);
}

/** At most two points for each pixel: the highest values stay. */
function thinned(points, first, last, width) {
  if (points.length <= width) return points;
  const highest = new Map();
  for (const point of points) {
    const pixel = Math.floor((point[0] - first) / (last - first) * width);
    const before = highest.get(pixel);
    if (before === undefined || point[1] === null || (before[1] !== null && point[1] > before[1])) highest.set(pixel, point);
  }
  return [...highest.values()];
}

function nearest(points, at) {
  let low = 0, high = points.length - 1;
  if (high < 0) return null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= at) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - at) <= Math.abs(points[high][0] - at) ? points[low] : points[high];
}

const legend = pairs => el("div", {class: "legend"}, pairs.map(([name, of]) =>
  el("span", {}, el("i", {style: `background:${color(of)}`}), name)));

// Overview

function overview(width) {
  const completed = rows.filter(row => row.status === "completed"), failed = rows.filter(row => row.status === "failed");
  const latest = completed[0], savepoint = completed.find(row => row.kind === "savepoint");
  const now = report.written_at, ended = row => row.triggered_at + row.duration;
  const duration = report.summary.find(row => !row.stages.length && row.quantity === "duration");
  const run = report.runs[0];
  const interval = report.settings.interval;
  const restarts = report.timeline.filter(event => event.kind === "restart").length;
  const tiles = el("div", {class: "tiles"},
    tile("completed", count(report.counts.completed), report.counts.savepoints ? `${count(report.counts.savepoints)} of them savepoints` : null),
    tile("failed", count(report.counts.failed), failed.length ? `the latest ${seconds(now - ended(failed[0]))} ago` : null, failed.length ? "bad" : ""),
    tile("latest", latest ? `${seconds(now - ended(latest))} ago` : "none yet", latest ? `${latest.kind} ${latest.checkpoint_id}, took ${seconds(latest.duration)}` : null),
    tile("size", latest ? bytes(latest.total_bytes) : "–", latest ? `${bytes(latest.new_bytes)} of it new` : null),
    tile("duration", duration ? seconds(duration.p50) : "–", duration ? `p99 ${seconds(duration.p99)}, longest ${seconds(duration.maximum)}` : null),
    tile("interval", interval ? short(seconds(interval)) : "none", report.settings.mode ? String(report.settings.mode).replaceAll("_", " ") : null),
    tile("latest savepoint", savepoint ? `${seconds(now - ended(savepoint))} ago` : "none", savepoint ? `savepoint ${savepoint.checkpoint_id}` : null),
    tile("restarts", count(restarts), run && run.restored !== null ? `latest run restored from ${run.restored}` : run ? "latest run is a new start" : null));
  const pending = report.pending.length ? card("Under way", report.pending.map(each => el("div", {},
    `${each.kind} ${each.checkpoint_id}: ${each.acknowledged} of ${each.expected} tasks have acknowledged, for ${seconds(each.seconds)}`,
    el("div", {class: "bar", role: "img", "aria-label": `${each.acknowledged} of ${each.expected}`},
      el("i", {style: `background:${color("--blue")};width:${100 * each.acknowledged / Math.max(1, each.expected)}%`}))))) : null;
  const old = [...completed].reverse(), half = width > 920 ? (width - 16) / 2 - 38 : width - (width < 600 ? 30 : 38);
  const name = row => `${row.kind} ${row.checkpoint_id}`;
  const reversed = [...failed].reverse().map(row => [row.triggered_at, `${name(row)} failed: ${row.message}`]);
  const charts = el("div", {class: "two"},
    card("Duration", chart(half, [{name: "duration", color: "--blue", area: true, points: byRun(old, row => [row.triggered_at, row.duration, name(row)])}],
      seconds, reversed.slice(-200), "Duration of the completed checkpoints over time"),
      failed.length ? el("div", {class: "legend"}, el("span", {}, "✕ failed")) : null),
    card("Size", chart(half, [
      {name: "total", color: "--violet", area: true, points: byRun(old, row => [row.triggered_at, row.total_bytes])},
      {name: "new", color: "--teal", points: byRun(old, row => [row.triggered_at, row.new_bytes])}],
      bytes, [], "Total and new bytes of the completed checkpoints over time")));
  const failure = failed[0] ? card("Latest failure", el("p", {style: "margin:0"}, pill(failed[0].reason.toLowerCase().replaceAll("_", " "), "bad"), " ",
    `${name(failed[0])}, ${moment(failed[0].triggered_at)} UTC: `, failed[0].message)) : null;
  return [tiles, pending, charts, failure, card("Latest events", eventList(report.timeline.slice(0, 6)))];
}

// Graph

function graph(width) {
  if (!report.stages.length) return [card("Stages", el("p", {class: "quiet"}, "No run has written its status yet."))];
  const w = 218, h = 92, gapX = 52, gapY = 22;
  const place = new Map(report.stages.map(stage => [stage.name, [12 + stage.column * (w + gapX), 12 + stage.line * (h + gapY)]]));
  const columns = Math.max(...report.stages.map(stage => stage.column)) + 1, lines = Math.max(...report.stages.map(stage => stage.line)) + 1;
  const full = [columns * (w + gapX) - gapX + 24, lines * (h + gapY) - gapY + 24];
  const arrows = report.edges.filter(edge => place.has(edge.source) && place.has(edge.target)).map(edge => {
    const [ax, ay] = place.get(edge.source), [bx, by] = place.get(edge.target);
    const x1 = ax + w, y1 = ay + h / 2, x2 = bx - 7, y2 = by + h / 2, bend = Math.max(24, (x2 - x1) / 2);
    return svg("g", {}, svg("title", {}, `${edge.source} to ${edge.target}${edge.how ? `, ${edge.how}` : ""}`),
      svg("path", {d: `M${x1},${y1}C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`, fill: "none", stroke: color("--quiet"),
        "stroke-width": 1.6, "stroke-dasharray": edge.how === "table" ? "2 4" : edge.how === "all to all" ? "7 4" : null, "marker-end": "url(#arrow)"}));
  });
  const kinds = {"finished": "--green", "not running": "--quiet", "no answer": "--red", "behind": "--orange"};
  const nodes = report.stages.map(stage => {
    const [x, y] = place.get(stage.name), edge = kinds[stage.state] || "--blue";
    const short = stage.name.length > 25 ? `${stage.name.slice(0, 24)}…` : stage.name;
    const lag = stage.rows_behind !== null ? `lag ${count(stage.rows_behind)}` : null;
    const delay = stage.watermark_delay !== null ? `watermark −${seconds(Math.max(0, stage.watermark_delay))}` : null;
    return svg("g", {}, svg("title", {}, `${stage.name}: ${stage.state}`),
      svg("rect", {x, y, width: w, height: h, rx: 9, fill: color("--card"), stroke: color("--line")}),
      svg("rect", {x, y: y + 10, width: 4, height: h - 20, rx: 2, fill: color(edge)}),
      svg("text", {x: x + 15, y: y + 23, class: "strong"}, short),
      svg("text", {x: x + 15, y: y + 41}, `${stage.state}${stage.instances > 1 ? ` · ${stage.instances} instances` : ""}${stage.root ? " · root" : ""}`),
      svg("text", {x: x + 15, y: y + 60}, `${count(stage.rows)} rows${stage.rows_per_second !== null ? ` · ${rate(stage.rows_per_second)}/s` : ""}`),
      svg("text", {x: x + 15, y: y + 79}, [lag, delay].filter(Boolean).join(" · ")));
  });
  const picture = svg("svg", {width: full[0], height: full[1], style: "max-width:none", viewBox: `0 0 ${full[0]} ${full[1]}`, role: "img", "aria-label": "The stages and the edges between them"},
    svg("defs", {}, svg("marker", {id: "arrow", viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto"},
      svg("path", {d: "M0,0L8,4L0,8Z", fill: color("--quiet")}))), arrows, nodes);
  const stages = table(
    [["stage", ""], ["state", ""], ["rows", "number"], ["rows/s", "number"], ["lag (rows)", "number"], ["late rows", "number"], ["watermark (UTC)", "number"], ["watermark behind", "number"]],
    report.stages.map(stage => [stage.name, stage.state, count(stage.rows), rate(stage.rows_per_second), count(stage.rows_behind), count(stage.late_rows),
      moment(stage.watermark), stage.watermark_delay === null ? "–" : seconds(Math.max(0, stage.watermark_delay))]), "The stages");
  const half = width > 920 ? (width - 16) / 2 - 38 : width - (width < 600 ? 30 : 38);
  const curve = (title, field, format, note) => {
    const found = report.series.map((each, i) => ({name: each.name, color: COLORS[i % COLORS.length],
      points: each.times.map((at, k) => [at, each[field][k]])})).filter(line => line.points.some(point => point[1] !== null));
    return found.length ? card(title, chart(half, found, format, [], `${title} of each stage over time`), note ? el("p", {class: "quiet", style: "margin:6px 0 0"}, note) : null) : null;
  };
  return [card("Graph", el("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": "Graph, scrolls sideways"}, picture),
      el("div", {class: "legend"}, el("span", {}, "—— pointwise"), el("span", {}, "– – all to all"), el("span", {}, "····· table, read whole"))),
    card("Stages", stages),
    el("div", {class: "two"}, curve("Rows per second", "rows_per_second", rate), curve("Lag in rows", "rows_behind", count),
      curve("Watermark behind the clock", "watermark_delay", seconds))];
}

// History

const filters = {
  all: () => true, completed: row => row.status === "completed", failed: row => row.status === "failed", savepoints: row => row.kind === "savepoint",
};
const view = {filter: "all", open: "", page: 0, text: ""};

function history_(width) {
  const list = el("div");
  const draw = () => list.replaceChildren(...historyList(draw, width));
  const buttons = Object.keys(filters).map(name => el("button", {type: "button", "data-filter": name, "aria-pressed": String(view.filter === name), onclick: () => {
    view.filter = name; view.page = 0; view.open = ""; keep();
    buttons.forEach(button => button.setAttribute("aria-pressed", String(button.dataset.filter === name)));
    draw();
  }}, `${name} ${count(rows.filter(filters[name]).length)}`));
  const search = el("input", {type: "search", placeholder: "id, reason, message", "aria-label": "Search in the history", value: view.text,
    oninput: event => { view.text = event.target.value; view.page = 0; draw(); }});
  draw();
  return [card(null, el("div", {class: "tools"}, buttons, search), list)];
}

function historyList(draw) {
  const text = view.text.trim().toLowerCase();
  const found = rows.filter(filters[view.filter]).filter(row => !text || `${row.checkpoint_id} ${row.kind} ${row.reason} ${row.message}`.toLowerCase().includes(text));
  const pages = Math.max(1, Math.ceil(found.length / PAGE));
  view.page = Math.min(view.page, pages - 1);
  const columns = [["id", ""], ["status", "stack"], ["acknowledged", "number"], ["triggered (UTC)", "wide"], ["duration", "number"], ["start delay", "number wide"],
    ["alignment", "number wide"], ["sync", "number wide"], ["async", "number wide"], ["new", "number wide"], ["total", "number"], ["in flight", "number wide"]];
  const lines = found.slice(view.page * PAGE, view.page * PAGE + PAGE).flatMap(row => {
    const key = `${row.epoch}-${row.checkpoint_id}`, open = view.open === key;
    const cells = [
      String(row.checkpoint_id), el("span", {}, pill(row.status, row.status === "failed" ? "bad" : "good"), row.kind === "savepoint" ? [" ", pill("savepoint", "point")] : null),
      `${row.acknowledged} of ${row.expected}`, moment(row.triggered_at), seconds(row.duration), seconds(row.start_delay), seconds(row.alignment_seconds),
      seconds(row.sync_seconds), seconds(row.async_seconds), bytes(row.new_bytes), bytes(row.total_bytes), bytes(row.in_flight_bytes)];
    const toggle = () => { view.open = open ? "" : key; keep(); draw(); };
    const line = el("tr", {class: "row", tabindex: 0, "aria-expanded": String(open), "data-key": key, onclick: toggle,
      onkeydown: event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); } }},
      cells.map((cell, i) => el("td", {class: columns[i][1]}, cell)));
    return open ? [line, el("tr", {class: "detail"}, el("td", {colspan: columns.length}, el("div", {class: "inside"}, detail(row, details.get(key)))))] : [line];
  });
  if (!found.length) return [el("p", {class: "quiet"}, rows.length ? "No checkpoint fits the filter." : "No checkpoint has ended yet.")];
  const step = by => () => { view.page += by; draw(); };
  return [table(columns, lines, "The history of checkpoints"), el("div", {class: "pages"},
    el("button", {type: "button", disabled: view.page === 0, onclick: step(-1)}, "newer"),
    `${count(view.page * PAGE + 1)} to ${count(Math.min(found.length, view.page * PAGE + PAGE))} of ${count(found.length)}`,
    el("button", {type: "button", disabled: view.page >= pages - 1, onclick: step(1)}, "older"))];
}

function phaseBar(measured, longest) {
  const parts = measured.slice(1, 5), sum = parts.reduce((a, b) => a + b, 0);
  return el("div", {class: "bar", role: "img", "aria-label": PHASES.map(([name], i) => `${name} ${seconds(parts[i])}`).join(", ")},
    PHASES.map(([, of], i) => el("i", {style: `background:${color(of)};width:${100 * parts[i] / Math.max(longest, sum, 1e-9)}%`})));
}

function detail(row, vertices) {
  const facts = [["triggered", `${moment(row.triggered_at)} UTC, by ${row.trigger}`], row.location ? ["location", el("code", {}, row.location)] : null,
    row.reason ? ["failed", `${row.reason.toLowerCase().replaceAll("_", " ")}: ${row.message}`] : null, ["barriers", row.unaligned ? "unaligned" : "aligned"],
    ["sizes", `${bytes(row.total_bytes)}, ${bytes(row.new_bytes)} of it new, ${bytes(row.in_flight_bytes)} in flight`],
    ["times", PHASES.map(([name], i) => `${name} ${seconds([row.start_delay, row.alignment_seconds, row.sync_seconds, row.async_seconds][i])}`).join(", ")]];
  const list = el("dl", {}, facts.filter(Boolean).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  if (!vertices) return [list, el("p", {class: "quiet"}, "The parts of the instances are kept for the newest checkpoints only.")];
  const measures = vertices.flatMap(([, , instances]) => instances.map(instance => instance[1])).filter(Boolean);
  const longest = measures.reduce((a, measured) => Math.max(a, measured[0]), 0);
  const columns = [["stage, instance", ""], ["acknowledged after", "number"], ["", "wide"], ["start delay", "number"], ["alignment", "number"], ["sync", "number"],
    ["async", "number"], ["new", "number"], ["total", "number"], ["in flight", "number"]];
  const lines = vertices.flatMap(([stages, , instances]) => [
    el("tr", {class: "group"}, el("td", {colspan: columns.length}, stages.join(" + "), el("span", {class: "quiet", style: "font-weight:400"},
      instances.every(instance => instance[2]) ? "  finished before"
        : `  ${instances.filter(instance => instance[1]).length} of ${instances.filter(instance => !instance[2]).length} acknowledged`))),
    ...instances.slice(0, instances.every(instance => instance[2]) ? 0 : 200).map(([name, measured, finished]) => measured
      ? [name, seconds(measured[0]), phaseBar(measured, longest), ...measured.slice(1, 5).map(seconds), ...measured.slice(5, 8).map(bytes)]
      : [name, finished ? "finished before" : pill("not acknowledged", "bad"), ...Array(8).fill("")])]);
  return [list, table(columns, lines, "The parts of the instances"), legend(PHASES)];
}

// Summary

function summary() {
  const columns = [["", ""], ["min", "number"], ["avg", "number"], ["p50", "number"], ["p90", "number"], ["p99", "number"], ["max", "number"]];
  const line = row => [row.quantity, ...["minimum", "average", "p50", "p90", "p99", "maximum"].map(name => formats[row.unit](row[name]))];
  const groups = new Map();
  for (const row of report.summary) groups.set(row.stages.join(" + "), [...(groups.get(row.stages.join(" + ")) || []), row]);
  if (!groups.size) return [card("Summary", el("p", {class: "quiet"}, "No checkpoint has completed yet."))];
  return [...groups].map(([name, found]) => card(
    name || `All stages: ${count(found[0].count)} completed checkpoints`,
    name ? el("p", {class: "quiet", style: "margin:-8px 0 6px"}, `in ${count(found[0].count)} checkpoints: of the instances the slowest, bytes of all`) : null,
    el("div", {class: "even"}, table(columns, found.map(line), name || "All stages"))));
}

// Time line

function eventList(events) {
  if (!events.length) return el("p", {class: "quiet"}, "No events yet.");
  return el("ul", {class: "events"}, events.map(event => el("li", {}, el("time", {}, `${moment(event.at)}`),
    el("div", {}, el("span", {class: "dot", style: `background:${color(event.failed ? "--red" : KINDS[event.kind] || "--quiet")}`}), event.title),
    event.text ? el("div", {class: "text"}, event.text) : null)));
}

function timeline(width) {
  const runs = report.runs.slice(0, 30);
  if (!runs.length) return [card("Time line", el("p", {class: "quiet"}, "No run has written a history yet."))];
  const inner = width - (width < 600 ? 30 : 38), left = width < 600 ? 12 : 110, right = 12, lane = 30, top = 8;
  const first = Math.min(...runs.map(run => run.started_at));
  const last = Math.max(...runs.map(run => run.ended_at ?? (run.end ? run.last_sign_at : report.written_at)), first + 1);
  const x = at => left + (Math.min(Math.max(at, first), last) - first) / (last - first) * (inner - left - right);
  const height = top + runs.length * lane + 28;
  const bars = runs.map((run, i) => {
    const y = top + i * lane, end = run.ended_at ?? (run.end ? run.last_sign_at : report.written_at);
    const of = run.failed ? "--red" : run.end ? "--blue" : "--green";
    const name = run.run_id ? run.run_id.slice(0, 8) : `epoch ${run.epoch}`;
    return svg("g", {}, svg("title", {}, `run ${run.run_id || run.epoch}, job ${run.job_id}: ${run.end || "running"}`),
      width < 600 ? null : svg("text", {x: 0, y: y + 16, fill: color("--text")}, `${name} · job ${run.job_id || "–"}`),
      svg("rect", {x: x(run.started_at), y: y + 4, width: Math.max(3, x(end) - x(run.started_at)), height: 16, rx: 4, fill: color(of), opacity: .28}),
      svg("rect", {x: x(run.started_at), y: y + 4, width: 3, height: 16, rx: 1.5, fill: color(of)}));
  });
  const lanes = new Map(runs.map((run, i) => [run.epoch, top + i * lane + 12]));
  const marks = report.timeline.filter(event => lanes.has(event.epoch) && !["run", "start", "end"].includes(event.kind)).slice(0, 1000).map(event =>
    svg("circle", {cx: x(event.at), cy: lanes.get(event.epoch), r: 5, fill: color(event.failed ? "--red" : KINDS[event.kind]), stroke: color("--card"), "stroke-width": 1.5},
      svg("title", {}, `${moment(event.at)} ${event.title}`)));
  const labels = width < 600 ? 3 : 6;
  const dates = Array.from({length: labels}, (_, i) => first + (last - first) * i / (labels - 1)).map((at, i) =>
    svg("text", {x: x(at), y: height - 6, "text-anchor": i === 0 ? "start" : i === labels - 1 ? "end" : "middle"}, clock(at, last - first)));
  const picture = svg("svg", {width: inner, height, viewBox: `0 0 ${inner} ${height}`, role: "img", "aria-label": "Runs over time, with their events"}, bars, marks, dates);
  const shown = report.timeline.slice(0, 300);
  const table_ = table([["run", ""], ["job", "number"], ["began (UTC)", ""], ["lasted", "number"], ["from", ""], ["attempts", "number"], ["end", ""]],
    runs.map(run => [run.run_id || `epoch ${run.epoch}`, run.job_id || "–", moment(run.started_at),
      seconds((run.ended_at ?? (run.end ? run.last_sign_at : report.written_at)) - run.started_at), run.restored === null ? "new start" : `checkpoint ${run.restored}`,
      run.attempts, run.end ? pill(run.end, run.failed ? "bad" : "info") : pill("running", "good")]), "The runs");
  return [card("Time line", picture, legend([["savepoint", "--violet"], ["restart or failure", "--red"], ["rescale", "--orange"], ["stop", "--yellow"], ["stage finished", "--green"]])),
    card("Runs", table_),
    card("Events", eventList(shown), report.timeline.length > shown.length ? el("p", {class: "quiet"}, `The newest ${shown.length} of ${count(report.timeline.length)} events.`) : null)];
}

// Configuration

function configuration() {
  const shown = value => value === null ? "none" : value === true ? "yes" : value === false ? "no" : String(value);
  const pairs = Object.entries(report.settings);
  if (!pairs.length) return [card("Configuration", el("p", {class: "quiet"}, "The history does not have the start of the latest run any more."))];
  return [card("Configuration of the latest run", table([["setting", ""], ["value", "free"]], pairs.map(([name, value]) => [el("code", {}, name), shown(value)]), "Settings"),
    el("p", {class: "quiet"}, "Times in seconds, sizes in bytes."))];
}

// The page

const TABS = [["overview", "Overview", overview], ["graph", "Graph", graph], ["history", "History", history_], ["summary", "Summary", summary],
  ["timeline", "Time line", timeline], ["configuration", "Configuration", configuration]];
let tab = "overview";

/** The address keeps what is open: a page that is loaded again shows the same. */
function keep() {
  const parts = tab === "history" ? [tab, view.filter, view.open] : [tab];
  history.replaceState(null, "", `#${parts.join("/").replace(/\/+$/, "")}`);
}

function restore() {
  const [name, filter, open] = location.hash.slice(1).split("/");
  tab = TABS.some(each => each[0] === name) ? name : "overview";
  if (tab === "history") { view.filter = Object.hasOwn(filters, filter) ? filter : "all"; view.open = open || ""; }
}

function show() {
  for (const button of document.querySelectorAll("#tabs button")) {
    const chosen = button.dataset.tab === tab;
    button.setAttribute("aria-selected", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
    if (chosen) button.scrollIntoView({block: "nearest", inline: "nearest"});
  }
  const main = document.getElementById("main"), style = getComputedStyle(main);
  const width = main.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  const problems = report.problems.map(problem => el("p", {class: "note", role: "status"}, problem));
  main.setAttribute("aria-labelledby", `tab-${tab}`);
  main.replaceChildren(...[problems, TABS.find(each => each[0] === tab)[2](width)].flat(9).filter(Boolean));
}

function choose(name) { tab = name; keep(); show(); }

function start() {
  restore();
  const run = report.runs[0];
  document.getElementById("header").append(
    el("div", {class: "title"}, el("h1", {}, report.pipeline), pill(report.state, report.running ? report.state.startsWith("running") ? "good" : "warn" : "")),
    el("p", {class: "where"}, run ? `job ${run.job_id || "–"} · run ${run.run_id || run.epoch} · ` : "", `${report.storage} · written ${moment(report.written_at)} UTC`));
  const tabs = document.getElementById("tabs");
  tabs.append(...TABS.map(([name, title]) => el("button", {type: "button", role: "tab", id: `tab-${name}`, "data-tab": name, "aria-controls": "main", onclick: () => choose(name)}, title)));
  tabs.addEventListener("keydown", event => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!by) return;
    const next = TABS[(TABS.findIndex(each => each[0] === tab) + by + TABS.length) % TABS.length][0];
    choose(next);
    document.getElementById(`tab-${next}`).focus();
  });
  const footer = document.getElementById("footer");
  footer.append(report.refresh_seconds
    ? `The run writes this page about every ${seconds(report.refresh_seconds)}, and the page loads itself again.`
    : "Written once. dagster-checkpoints report writes it again.");
  if (report.refresh_seconds && report.running) {
    if (Date.now() / 1000 - report.written_at > 5 * report.refresh_seconds)
      footer.prepend(el("strong", {}, `This page is ${seconds(Date.now() / 1000 - report.written_at)} old: the run may have been killed. `));
    setInterval(() => { if (!document.hidden && !view.text) location.reload(); }, 1000 * report.refresh_seconds);
  }
  let drawn = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== drawn) { drawn = innerWidth; show(); } });
  addEventListener("hashchange", () => { restore(); show(); });
  show();
}
start();

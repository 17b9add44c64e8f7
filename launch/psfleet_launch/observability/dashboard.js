// The page: an overview, then sections of charts. A report brings all it shows; else the launcher sends it.

const MOST_FRAMES = 1200, NEWEST = 300, MOST_SHOWN = 8, WIDE = 700;
const report = JSON.parse(document.getElementById("report").textContent);
let panels = [], frames = [], marks = [], finished = [];

function element(kind, parent, text, className) {
  const made = document.createElement(kind);
  if (text) made.textContent = text;
  if (className) made.className = className;
  return parent.appendChild(made);
}

function build(content) {
  const sections = document.getElementById("sections");
  sections.replaceChildren();
  frames = [];
  document.getElementById("job").textContent = document.title = content.job;
  [ZONE.offset, ZONE.name] = content.zone;
  let section = "", grid, without;
  panels = content.panels.map((panel, index) => {
    if (panel.section !== section) {
      section = panel.section;
      const folded = element("details", sections, "", "section");
      folded.open = !index || innerWidth >= WIDE;
      folded.addEventListener("toggle", () => panels.forEach(drawChart));
      element("h2", element("summary", folded), section);
      grid = element("div", folded, "", "panels");
      without = element("p", folded, "", "without");
    }
    return { ...card(grid, panel, panel.title), index, isFirst: section === content.panels[0].section, without };
  });
}

function card(grid, panel, title) {
  const made = element("section", grid, "", "panel");
  made.hidden = true;
  made.dataset.title = title;
  element("h3", made, title);
  const more = element("details", made);
  element("summary", more, "?").title = "What is this?";
  element("div", more, `${panel.meaning} ${panel.advice}`);
  const box = element("div", made, "", "chart"), list = element("ul", made);
  return { ...panel, title, card: made, list, chart: new Chart(box, panel.unit, title), names: [], prefix: "" };
}

// Each name that scripts log has a chart: values of different kinds share no axis.
function split(panel) {
  if (!panel.by.startsWith("name ") || panel.prefix) return;
  for (const key of new Set(frames.flatMap(frame => Object.keys(frame.panels[panel.index])))) {
    const name = key.replace(/ worker \d+$/, ""), prefix = `${name} `;
    if (panels.some(one => one.prefix === prefix)) continue;
    const { index, isFirst, without } = panel;
    const made = { ...card(panel.card.parentNode, panel, name), index, isFirst, without, prefix };
    const last = panels.findLastIndex(one => one.index === index);
    panels[last].card.after(made.card);
    panels.splice(last + 1, 0, made);
  }
}

// What a frame has of a panel, by series.
function seriesOf(panel, frame) {
  const all = frame.panels[panel.index];
  if (!panel.by.startsWith("name ")) return all;
  const own = Object.entries(all).filter(([key]) => panel.prefix && key.replace(/worker \d+$/, "") === panel.prefix);
  return Object.fromEntries(own.map(([key, value]) => [key.slice(panel.prefix.length), value]));
}

const byName = new Intl.Collator("en", { numeric: true }).compare;

function update(panel) {
  // A report has the last known value of everything, a live page only what there is now.
  const shown = report ? frames : frames.slice(-1);
  const now = Object.assign({}, ...shown.map(frame => seriesOf(panel, frame)));
  const ever = new Set(frames.flatMap(frame => Object.keys(seriesOf(panel, frame))));
  const all = [...ever].sort((a, b) => (b in now) - (a in now) || byName(a, b));
  panel.names = all.slice(0, MOST_SHOWN);
  panel.isZero = !panel.isFirst && frames.every(frame => Object.values(seriesOf(panel, frame)).every(value => value === 0));
  panel.card.hidden = !all.length || panel.isZero;
  panel.isEmpty = !all.length;
  panel.card.classList.toggle("bad", Object.values(now).includes(null));
  panel.list.replaceChildren();
  panel.names.forEach((name, place) => {
    const value = now[name], text = value === undefined ? "–" : value === null ? "NaN" : FORMATS[panel.unit](value);
    const isOver = !report && finished.includes(name), label = isOver ? `${name} (finished)` : name;
    const item = element("li", panel.list, name ? `${label}: ${text}` : text, value === undefined || isOver ? "gone" : value === null ? "bad" : "");
    if (value !== undefined) { item.dataset.name = name; item.dataset.value = value; }
    item.style.setProperty("--color", color(name, place));
  });
  if (all.length > MOST_SHOWN) element("li", panel.list, `and ${all.length - MOST_SHOWN} more`, "gone");
  drawChart(panel);
}

function drawChart(panel) {
  if (!panel.card.offsetParent || !frames.length) return; // it is folded away
  const series = frames.map(frame => seriesOf(panel, frame));
  const rows = panel.names.map(name => series.map(one => one[name]));
  panel.chart.draw(frames.map(frame => frame.at), panel.names, rows, marks);
}

function updateAll() {
  if (!frames.length) return;
  [...panels].forEach(split);
  panels.forEach(update);
  for (const without of new Set(panels.map(panel => panel.without))) {
    const isSplit = panel => panels.some(one => one.prefix && one.index === panel.index);
    const folded = panels.filter(panel => panel.without === without && panel.card.hidden && !isSplit(panel));
    const zero = folded.filter(panel => !panel.isEmpty), empty = folded.filter(panel => panel.isEmpty);
    without.replaceChildren();
    for (const [text, titles] of [["Always 0 so far", zero], ["Not in this job", empty]])
      if (titles.length) element("div", without, `${text}: ${titles.map(panel => panel.title).join(" · ")}`);
  }
  const at = frames[frames.length - 1].at;
  document.getElementById("updated").textContent = `${clock(at, 1)} ${ZONE.name}`;
  document.body.dataset.at = at;
}

function tabulate(parent, table) {
  const made = element("table", element("div", parent, "", "scroll"));
  made.dataset.title = table.title;
  const add = (cells, kind) => {
    const row = element("tr", made);
    cells.forEach(text => element(kind, row, text));
    return row;
  };
  if (table.columns.length) add(table.columns, "th");
  table.rows.forEach((cells, n) => {
    const row = add(cells, "td");
    if (table.moods && table.moods.length) row.dataset.mood = table.moods[n];
  });
  return made;
}

function state(text, badge, mood) {
  document.getElementById("state").textContent = text;
  if (badge === undefined) return;
  document.getElementById("badge").textContent = badge;
  document.getElementById("badge").className = mood;
}

function showOverview(overview) {
  state(overview.state, ...overview.badge);
  ({ marks, finished } = overview);
  const parent = document.getElementById("overview"), kept = new Map();
  parent.querySelectorAll("table").forEach(table => kept.set(table.dataset.title, table.parentNode.scrollTop));
  parent.replaceChildren();
  const figures = element("div", parent, "", "figures");
  for (const [label, value, note, mood] of overview.figures) {
    const figure = element("div", figures, "", `figure ${mood} ${Math.max(note.length, 2 * label.length) > 40 ? "long" : ""}`);
    figure.dataset.title = label;
    element("span", figure, label);
    element("b", figure, value);
    if (note) element("small", figure, note);
  }
  const boxes = element("div", parent, "", "boxes");
  const columns = { Processes: element("div", boxes) }, others = element("div", boxes);
  for (const table of overview.tables) {
    const box = element("section", columns[table.title] || others, "", "box");
    element("h2", box, table.title);
    const made = tabulate(box, table);
    if (table.title === "Processes") made.classList.toggle("one-machine", new Set(table.rows.map(row => row[1])).size < 2);
    made.parentNode.scrollTop = kept.get(table.title) || 0;
  }
  const key = element("p", parent, "", "key"), kinds = new Set(marks.map(([, kind]) => kind));
  if (kinds.size) key.textContent = "Lines in the charts: ";
  for (const kind of Object.keys(MARKS).filter(kind => kinds.has(kind))) {
    element("span", key, kind, kind).style.setProperty("--color", `var(${MARKS[kind]})`);
  }
}

// The newest frames are all kept; of the older ones half are, again and again.
function keep(more) {
  frames = frames.concat(more);
  if (frames.length > MOST_FRAMES) frames = frames.filter((_, n) => n % 2 === 0 || n >= frames.length - NEWEST);
}

function follow() {
  document.querySelectorAll("footer a").forEach(link => { link.href += location.search; });
  const source = new EventSource("events" + location.search);
  source.addEventListener("panels", event => build(JSON.parse(event.data)));
  source.addEventListener("overview", event => showOverview(JSON.parse(event.data)));
  source.addEventListener("frames", event => {
    const more = JSON.parse(event.data);
    if (more.length) { keep(more); updateAll(); }
  });
  source.addEventListener("end", () => source.close());
  source.addEventListener("error", () => {
    if (source.readyState !== EventSource.CLOSED) state("the launcher does not answer", "no connection", "bad");
  });
}

addEventListener("resize", () => panels.forEach(panel => panel.chart.fit()));

if (report) {
  document.querySelector("footer").textContent = "Made by psfleet report.";
  build(report);
  frames = report.frames;
  showOverview(report.overview);
  report.tables.forEach(table => {
    const folded = element("details", document.getElementById("tables"));
    folded.open = innerWidth >= WIDE;
    element("h2", element("summary", folded), table.title);
    tabulate(folded, table);
  });
  if (!frames.length) document.body.dataset.at = 0;
  updateAll();
} else {
  follow();
}

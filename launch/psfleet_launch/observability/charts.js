// Numbers with their units, and one chart: axes, a line for each series, lines for what has happened, a tooltip, red
// where values are not finite. psfleet/core/base/observability/panels.py writes numbers by the same rules.

function digits(value, count = 3) {
  const rounded = Number(value.toPrecision(count));
  return Math.abs(rounded) < 1e-6 && rounded ? String(rounded).replace("+", "") : String(rounded);
}

function scaled(value, units, step, count = 3) {
  let unit = 0;
  while (Math.abs(Number(value.toPrecision(count))) >= step && unit < units.length - 1) { value /= step; unit += 1; }
  return `${digits(value, count)} ${units[unit]}`.trim();
}

function seconds(value) {
  if (value >= 172800) return `${(value / 86400).toFixed(1)} d`;
  if (value >= 7200) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 120) return `${(value / 60).toFixed(1)} min`;
  if (value >= 1 || value === 0) return `${digits(value)} s`;
  return value >= 1e-3 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
}

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], COUNTS = ["", "k", "M", "G", "T"];
const FORMATS = {
  s: seconds,
  bytes: value => scaled(value, BYTES, 1024),
  Bps: value => `${scaled(value, BYTES, 1024)}/s`,
  cps: value => `${scaled(value, COUNTS, 1000)}/s`,
  percentunit: value => `${digits(value * 100)} %`,
  short: value => scaled(value, COUNTS, 1000),
  none: value => scaled(value, COUNTS, 1000, 4),
};

// Distances of an axis' marks that its unit shows as round numbers: powers of two of bytes; 30 s, 2 min, 6 h of time.
const POWERS = Array.from({ length: 50 }, (_, power) => 2 ** power);
const TIMES = [
  ...[-6, -5, -4, -3, -2, -1, 0].flatMap(power => [1, 2, 5].map(digit => digit * 10 ** power)),
  10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000,
];
const STEPS = { bytes: POWERS, Bps: POWERS, s: TIMES };
const ZONE = { offset: 0 };  // seconds by which the launcher's clock is ahead of UTC: tables and charts have one time
const MARKS = { death: "--bad", restart: "--warn", takeover: "--warn", move: "--move", snapshot: "--faint" };
const MOST_SNAPSHOTS = 40;  // more of them in one chart would hide the curves
const COLORS = ["#3b82f6", "#f59e0b", "#10b981", "#a855f7", "#ec4899", "#14b8a6", "#84cc16", "#f97316"];

// A process has the same color in every chart.
function color(name, place) {
  const process = /^(server|standby|worker) (\d+)$/.exec(name);
  const first = { worker: 0, server: 2, standby: 4 };
  return COLORS[(process ? first[process[1]] + Number(process[2]) : place) % COLORS.length];
}

function style(name) { return getComputedStyle(document.body).getPropertyValue(name).trim(); }

// Counts and shares begin at 0; other numbers, as a loss, fill the chart, without what has run away.
function range(unit, values) {
  if (!values.length) return [0, 1];
  const sorted = [...values].sort((a, b) => a - b), low = sorted[0];
  let high = sorted[sorted.length - 1];
  if (unit !== "none") return [Math.min(low, 0), high > 0 ? high * 1.05 : 1];
  const usual = Math.abs(sorted[sorted.length >> 1]);
  if (usual && high > 100 * usual) high = 10 * usual;
  const margin = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 ? Math.max(low - margin, 0) : low - margin, high + margin];
}

// Points of a line that have no neighbour to be joined with; undefined values are passed over.
function alone(row) {
  const known = row.map((_, n) => n).filter(n => row[n] !== undefined);
  const isGap = n => n === undefined || row[n] === null;
  return known.filter((n, place) => row[n] !== null && isGap(known[place - 1]) && isGap(known[place + 1]));
}

// Times in which a value was not finite, as [from, to].
function spoilt(times, rows) {
  const found = [];
  times.forEach((at, n) => {
    if (!rows.some(row => row[n] === null)) return;
    const last = found[found.length - 1];
    if (last && last[2] === n - 1) { last[1] = at; last[2] = n; } else found.push([at, at, n]);
  });
  return found;
}

class Chart {
  constructor(box, unit, label) {
    this.box = box;
    this.unit = unit;
    this.label = label;
    this.names = [];
    this.plot = null;
    this.marks = [];
  }

  // rows: of each name its values; null is not finite, undefined not known.
  draw(times, names, rows, marks) {
    this.rows = rows;
    this.marks = marks;
    this.spoilt = spoilt(times, rows);
    if (!this.plot || names.join() !== this.names.join()) this.make(names);
    this.plot.setData([times, ...rows]);
    this.fit();
  }

  fit() {
    const width = this.box.clientWidth, height = this.box.clientHeight;
    if (this.plot && width && (width !== this.plot.width || height !== this.plot.height)) this.plot.setSize({ width, height });
  }

  make(names) {
    if (this.plot) this.plot.destroy();
    this.names = names;
    const axis = {
      stroke: () => style("--faint"), font: "11px system-ui, sans-serif", ticks: { show: false },
      grid: { stroke: () => style("--grid"), width: 1 },
    };
    this.plot = new uPlot({
      width: this.box.clientWidth || 300,
      height: this.box.clientHeight || 120,
      padding: [8, 22, 0, 0],
      tzDate: at => uPlot.tzDate(new Date((at + ZONE.offset) * 1000), "Etc/UTC"),
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "job" }, points: { size: 6 } },
      scales: { x: { time: true }, y: { range: () => range(this.unit, this.rows.flat().filter(Number.isFinite)) } },
      axes: [
        { ...axis, size: 28, gap: 8, space: 65, values: (plot, ticks, axis, space, step) => ticks.map(at => clock(at, step)) },
        { ...axis, size: 58, gap: 4, space: 28, ...(STEPS[this.unit] && { incrs: STEPS[this.unit] }), values: (plot, ticks) => ticks.map(FORMATS[this.unit]) },
      ],
      series: [{}, ...names.map((name, place) => ({ label: name, stroke: color(name, place), width: 1.6, points: { show: true, size: 5, fill: color(name, place), filter: (plot, series) => alone(this.rows[series - 1]) } }))],
      hooks: { drawClear: [() => this.redden()], drawAxes: [() => this.mark()], setCursor: [() => this.tell()] },
    }, [[], ...names.map(() => [])], this.box);
    this.plot.root.setAttribute("role", "img");
    this.plot.root.setAttribute("aria-label", this.label);
    this.tip = this.plot.over.appendChild(document.createElement("div"));
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.plot.over.addEventListener("mouseleave", () => { this.tip.hidden = true; });
  }

  redden() {
    const { ctx, bbox } = this.plot;
    ctx.fillStyle = style("--bad") + "33";
    for (const [from, to] of this.spoilt) {
      const left = this.plot.valToPos(from, "x", true), right = this.plot.valToPos(to, "x", true);
      ctx.fillRect(left - 2, bbox.top, Math.max(right - left, 0) + 4, bbox.height);
    }
  }

  // A line for each thing that has happened while the chart lasts.
  mark() {
    const { ctx, bbox, scales } = this.plot, ratio = devicePixelRatio;
    this.shown = this.marks.filter(([at]) => at >= scales.x.min && at <= scales.x.max);
    if (this.shown.filter(([, kind]) => kind === "snapshot").length > MOST_SNAPSHOTS) this.shown = this.shown.filter(([, kind]) => kind !== "snapshot");
    ctx.save();
    for (const [at, kind] of this.shown) {
      const x = Math.round(this.plot.valToPos(at, "x", true)) + 0.5;
      ctx.strokeStyle = style(MARKS[kind]);
      ctx.lineWidth = ratio;
      ctx.globalAlpha = kind === "snapshot" ? 0.6 : 0.9;
      ctx.setLineDash(kind === "snapshot" ? [ratio, 4 * ratio] : kind === "death" ? [] : [5 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  tell() {
    const { idx, left } = this.plot.cursor;
    if (idx == null || left < 0 || !this.plot.over.matches(":hover")) { this.tip.hidden = true; return; }
    this.tip.replaceChildren(clock(this.plot.data[0][idx], 1));
    this.names.forEach((name, place) => {
      const value = this.rows[place][idx];
      if (value === undefined) return;
      const line = this.tip.appendChild(document.createElement("div"));
      line.textContent = `${name || this.label}: ${value === null ? "NaN or infinite" : FORMATS[this.unit](value)}`;
      line.style.setProperty("--color", color(name, place));
    });
    const near = 6 * (this.plot.scales.x.max - this.plot.scales.x.min) / this.plot.over.clientWidth;
    for (const [at, kind, text] of this.shown || []) {
      if (Math.abs(at - this.plot.posToVal(left, "x")) > near) continue;
      const line = this.tip.appendChild(document.createElement("div"));
      line.textContent = `${clock(at, 1)} ${text}`;
      line.style.setProperty("--color", `var(${MARKS[kind]})`);
    }
    this.tip.hidden = false;
    const width = this.plot.over.clientWidth, beside = left > width / 2 ? left - this.tip.offsetWidth - 10 : left + 10;
    this.tip.style.left = `${Math.min(Math.max(beside, -50), width - this.tip.offsetWidth)}px`;
    this.tip.style.top = "2px";
  }
}

function clock(at, step) {
  const here = new Date((at + ZONE.offset) * 1000).toISOString();
  return step >= 86400 ? here.slice(5, 10) : here.slice(11, step < 60 ? 19 : 16);
}

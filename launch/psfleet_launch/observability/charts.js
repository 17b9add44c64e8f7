// Numbers with their units, and one chart: axes, a line for each series, a tooltip, red where values are not finite.

function scaled(value, units, step) {
  let unit = 0;
  while (Math.abs(value) >= step && unit < units.length - 1) { value /= step; unit += 1; }
  return `${Number(value.toPrecision(3))} ${units[unit]}`.trim();
}

function seconds(value) {
  if (value >= 172800) return `${(value / 86400).toFixed(1)} d`;
  if (value >= 3600) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 120) return `${(value / 60).toFixed(1)} min`;
  if (value >= 1 || value === 0) return `${Number(value.toPrecision(3))} s`;
  return value >= 1e-3 ? `${Number((value * 1e3).toPrecision(3))} ms` : `${Number((value * 1e6).toPrecision(3))} µs`;
}

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"], COUNTS = ["", "k", "M", "G"];
const FORMATS = {
  s: seconds,
  bytes: value => scaled(value, BYTES, 1024),
  Bps: value => `${scaled(value, BYTES, 1024)}/s`,
  cps: value => `${scaled(value, COUNTS, 1000)}/s`,
  percentunit: value => `${Number((value * 100).toPrecision(3))} %`,
  short: value => scaled(value, COUNTS, 1000),
};

const BINARY = ["bytes", "Bps"], POWERS = Array.from({ length: 50 }, (_, power) => 2 ** power);
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
  if (unit !== "short" || values.every(Number.isInteger)) return [Math.min(low, 0), high > 0 ? high * 1.05 : 1];
  const usual = Math.abs(sorted[sorted.length >> 1]);
  if (usual && high > 100 * usual) high = 10 * usual;
  const margin = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 ? Math.max(low - margin, 0) : low - margin, high + margin];
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
  }

  // rows: of each name its values; null is not finite, undefined not known.
  draw(times, names, rows) {
    this.rows = rows;
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
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, sync: { key: "job" }, points: { size: 6 } },
      scales: { x: { time: true }, y: { range: () => range(this.unit, this.rows.flat().filter(Number.isFinite)) } },
      axes: [
        { ...axis, size: 28, gap: 8, space: 65, values: (plot, ticks, axis, space, step) => ticks.map(at => clock(at, step)) },
        { ...axis, size: 58, gap: 4, space: 28, ...(BINARY.includes(this.unit) && { incrs: POWERS }), values: (plot, ticks) => ticks.map(FORMATS[this.unit]) },
      ],
      series: [{}, ...names.map((name, place) => ({ label: name, stroke: color(name, place), width: 1.6, points: { show: false } }))],
      hooks: { drawClear: [() => this.redden()], setCursor: [() => this.tell()] },
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
    this.tip.hidden = false;
    const width = this.plot.over.clientWidth, beside = left > width / 2 ? left - this.tip.offsetWidth - 10 : left + 10;
    this.tip.style.left = `${Math.min(Math.max(beside, -50), width - this.tip.offsetWidth)}px`;
    this.tip.style.top = "2px";
  }
}

function clock(at, step) {
  const shown = { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(step < 60 && { second: "2-digit" }) };
  if (step >= 86400) return new Date(at * 1000).toLocaleDateString();
  return new Date(at * 1000).toLocaleTimeString("en-GB", shown);
}

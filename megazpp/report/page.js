"use strict";
// Draws the curves of the report, whose data is the JSON in #data, as SVG elements into .charts. Redraws a chart when
// its width or the horizontal axis changes.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  // The number of colors in page.css. In pixels: the margins of a chart, and how far from the tip's position the end of a
  // curve, or a point of a validation, may be for the tip to show its value.
  const COLOURS = 7, LEFT = 56, RIGHT = 14, TOP = 8, BOTTOM = 40, NEAR = 24;
  // Horizontal axes, in the order of the first four columns of a segment. `unitFor` explains `units`.
  const AXES = [
    { label: "optimizer steps", units: [[1, "", 0], [1e3, "thousands", 1e5], [1e6, "millions", 1e7]] },
    { label: "tokens", units: [
      [1, "", 0], [1e3, "thousands", 1e4], [1e6, "millions", 2e6], [1e9, "billions", 2e9], [1e12, "trillions", 2e12]] },
    { label: "training time", units: [
      [1, "seconds", 0], [60, "minutes", 180], [3600, "hours", 1e4], [86400, "days", 4e5]] },
    { label: "sent to other nodes by each node", units: [
      [1, "bytes", 0], [1e6, "MB", 1e6], [1e9, "GB", 2e9], [1e12, "TB", 2e12]] },
  ];
  let chosen = 0; // index in AXES of the horizontal axis that the user selects; charts with a fixed `axis` ignore it
  const axisOf = (chart) => chart.axis ?? chosen;

  const style = (run) => `colour${run % COLOURS} dash${Math.floor(run / COLOURS) % 3}`;

  function svg(name, attributes, parent) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (parent) parent.append(element);
    return element;
  }

  function html(name, className, parent, text) {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  // Return the unit for the labels of an axis whose values reach `largest`: the last of `units` that is not too large.
  // units: [divisor, name, smallest maximum of the values for which the unit is used], from the smallest unit.
  function unitFor(largest, units) {
    const [divisor, name] = units.filter((unit) => largest >= unit[2]).at(-1);
    return { divisor, name };
  }

  // Return about `count` round values between `low` and `high` at equal distances, and their distance.
  function niceTicks(low, high, count) {
    const raw = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((times) => times * power >= raw * 0.999) * power;
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
    return { ticks, step };
  }

  // Return at most about `count` values between `low` and `high` for a logarithmic axis, such as 1, 2, 5, 10, 20.
  function logTicks(low, high, count) {
    let ticks = [];
    for (const factors of [[1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
      ticks = [];
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
        for (const factor of factors) ticks.push(factor * 10 ** e);
      }
      ticks = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
      if (ticks.length <= count + 2) break;
    }
    const every = Math.ceil(ticks.length / (count + 2));
    return ticks.length < 2 ? niceTicks(low, high, count).ticks : ticks.filter((_, index) => index % every === 0);
  }

  const trim = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

  function short(value, digits = 4) {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e9) return trim((value / 1e9).toPrecision(digits)) + "B";
    if (size >= 1e6) return trim((value / 1e6).toPrecision(digits)) + "M";
    if (size >= 1e4 || (size >= 1e3 && digits < 4)) return trim((value / 1e3).toPrecision(digits)) + "k";
    if (size < 1e-3) return value.toExponential(digits - 1).replace(/\.?0*e/, "e");
    return trim(value.toPrecision(digits));
  }

  function tickLabel(value, step) {
    if (Math.abs(value) < step * 1e-6) return "0";
    if (Math.abs(value) >= 1e4 || step < 1e-4) return short(value);
    return value.toFixed(Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  }

  // Return all curves of a chart: { run: index, kind: "training", "validation" or "", segments: [{ x, y }] }.
  function curvesOf(chart) {
    const held_out = { lm_loss: "validation", reward: "validation_reward" }[chart.key];
    const kinds = held_out ? [[chart.key, "training"], [held_out, "validation"]] : [[chart.key, ""]];
    const found = [];
    data.runs.forEach((run, index) => {
      for (const [key, kind] of kinds) {
        const segments = (run.curves[key] || []).map((columns) => ({ x: columns[axisOf(chart)], y: columns.at(-1) }));
        if (segments.length) found.push({ run: index, kind, segments });
      }
    });
    return found;
  }

  // Return the range of a horizontal axis, equal for all charts, so that charts below each other are comparable.
  function acrossRange(axis) {
    let low = Infinity, high = -Infinity;
    for (const run of data.runs) for (const segment of Object.values(run.curves).flat()) for (const value of segment[axis]) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (low < high * 0.3) low = 0;
    return low < high ? [low, high] : [Math.max(0, high - 1), high + 1];
  }

  // Return the levels that a loss chart marks: the unigram entropies of the runs' validation texts. A model that knows
  // only the frequency of each token has this loss.
  const levelsOf = (chart) => chart.key !== "lm_loss" ? []
    : [...new Set(data.runs.map((run) => run.entropy).filter((entropy) => entropy !== null))];

  // Return the range [low, high] of a vertical axis for these values, with a margin. Null (not finite) is ignored.
  function rangeOf(values, scale) {
    let low = Infinity, high = -Infinity;
    for (const value of values) if (value !== null && (scale !== "log" || value > 0)) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (low > high) return scale === "log" ? [0.1, 1] : [0, 1];
    if (scale === "log") return [low / 1.25, high * 1.25];
    if (scale === "zero") return [Math.min(0, low), high > 0 ? high * 1.08 : 1];
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
    return [low - pad, high + pad];
  }

  function draw(chart, plot, tip) {
    const width = Math.max(240, plot.clientWidth), height = width < 480 ? 240 : 270;
    const curves = curvesOf(chart), segments = curves.flatMap((curve) => curve.segments);
    const axis = axisOf(chart), [xLow, xHigh] = acrossRange(axis), levels = levelsOf(chart);
    const [yLow, yHigh] = rangeOf([...segments.flatMap((segment) => segment.y), ...levels], chart.scale);
    const log = chart.scale === "log", of = (y) => (log ? Math.log(y) : y);
    const px = (x) => LEFT + ((x - xLow) / (xHigh - xLow)) * (width - LEFT - RIGHT);
    const py = (y) => height - BOTTOM - ((of(y) - of(yLow)) / (of(yHigh) - of(yLow))) * (height - TOP - BOTTOM);
    const drawable = (y) => y != null && (!log || y > 0);
    const dense = segments.some((segment) => segment.x.length > width);

    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img",
      "aria-label": `${chart.title} against ${AXES[axis].label}` });
    const bottom = height - BOTTOM;
    const { ticks, step } = niceTicks(yLow, yHigh, 6);
    for (const tick of log ? logTicks(yLow, yHigh, 5) : ticks) {
      svg("path", { d: `M${LEFT} ${py(tick)}H${width - RIGHT}`, class: "grid" }, root);
      const label = svg("text", { x: LEFT - 7, y: py(tick) + 4, "text-anchor": "end" }, root);
      label.textContent = log ? short(tick, 3) : tickLabel(tick, step);
    }
    const unit = unitFor(xHigh, AXES[axis].units);
    const across = niceTicks(xLow / unit.divisor, xHigh / unit.divisor, Math.max(2, Math.floor((width - LEFT) / 85)));
    for (const tick of across.ticks) {
      const at = px(tick * unit.divisor);
      svg("path", { d: `M${at} ${bottom}v5`, class: "axis" }, root);
      const label = svg("text", { x: at, y: bottom + 18, "text-anchor": at > width - 24 ? "end" : "middle" }, root);
      label.textContent = tickLabel(tick, across.step);
    }
    svg("path", { d: `M${LEFT} ${bottom}H${width - RIGHT}`, class: "axis" }, root);
    const name = svg("text", { x: (LEFT + width - RIGHT) / 2, y: height - 5, "text-anchor": "middle" }, root);
    name.textContent = AXES[axis].label + (unit.name ? ` (${unit.name})` : "");

    for (const level of levels) {
      svg("path", { d: `M${LEFT} ${py(level)}H${width - RIGHT}`, class: "level" }, root);
      const label = svg("text", { x: width - RIGHT, y: py(level) - 5, "text-anchor": "end" }, root);
      label.textContent = `unigram entropy ${short(level, 4)}`;
    }
    for (const { run, kind, segments: pieces } of curves) {
      for (const { x, y } of pieces) {
        let path = "", pen = false, lastCross = -Infinity, lastDot = -Infinity;
        y.forEach((value, i) => {
          if (drawable(value)) {
            path += `${pen ? "L" : "M"}${px(x[i]).toFixed(1)} ${py(value).toFixed(1)}`;
            pen = true;
            const alone = !drawable(y[i - 1]) && !drawable(y[i + 1]); // without neighbors there is no line: draw a dot
            if (alone || (kind === "validation" && px(x[i]) - lastDot > 14)) {
              lastDot = px(x[i]);
              svg("circle", { cx: px(x[i]), cy: py(value), r: 3.5, class: `dot ${style(run)}` }, root);
            }
          } else {
            pen = false;
            if (value === null && px(x[i]) - lastCross > 7) {
              lastCross = px(x[i]);
              svg("path", { d: `M${lastCross - 3} ${bottom - 8}l6 6m0-6l-6 6`, class: `bad ${style(run)}` }, root);
            }
          }
        });
        const line = svg("path", { d: path || "M0 0", class: `curve ${style(run)}`
          + (kind === "validation" ? " validation" : dense ? " dense" : "") });
        root.insertBefore(line, root.querySelector(".dot, .bad"));
      }
    }
    if (!segments.some(({ y }) => y.some(drawable))) {
      const none = svg("text", { x: (LEFT + width) / 2, y: height / 2 - 10, "text-anchor": "middle" }, root);
      none.textContent = "no finite value";
    }
    const marks = svg("g", {}, root);
    plot.replaceChildren(root);
    tip.hidden = true;
    const points = curves.map((curve) => {
      const flat = [];
      for (const { x, y } of curve.segments) x.forEach((value, i) => flat.push([px(value), value, y[i]]));
      return { ...curve, flat };
    });
    root.onpointermove = root.onpointerdown = (event) => {
      const box = root.getBoundingClientRect();
      show((event.clientX - box.left) * (width / box.width), points, marks, tip, { axis, py, bottom, unit, width, drawable });
    };
    root.onpointerleave = () => { marks.replaceChildren(); tip.hidden = true; };
  }

  const nearest = (flat, at) =>
    flat.reduce((best, point) => (Math.abs(point[0] - at) <= Math.abs(best[0] - at) ? point : best));

  // Show the values of all curves of a chart in its tip, at the recorded point that is nearest to the pointer.
  function show(pointer, points, marks, tip, { axis, py, bottom, unit, width, drawable }) {
    marks.replaceChildren();
    if (!points.length) return;
    const [at, x] = nearest(points.map(({ flat }) => nearest(flat, pointer)), pointer);
    const position = (value) => tickLabel(value / unit.divisor, 10 ** Math.floor(Math.log10(x / unit.divisor || 1) - 3))
      + (unit.name ? " " + unit.name : "");
    svg("path", { d: `M${at} ${TOP}V${bottom}`, class: "cross" }, marks);
    tip.replaceChildren();
    html("strong", "", tip, (axis === 0 ? "step " : "") + (axis === 0 ? x.toLocaleString("en") : position(x))
      + (axis === 1 ? " tokens" : ""));
    for (const { run, kind, flat } of points) {
      const pixels = flat.map((point) => point[0]);
      const point = nearest(flat, at), away = Math.abs(point[0] - at);
      const outside = at < Math.min(...pixels) || at > Math.max(...pixels);
      if (away > NEAR && (outside || kind === "validation")) continue;
      const row = html("div", "", tip);
      row.append(svg("svg", { class: `swatch ${style(run)}`, width: 16, height: 10 }));
      svg("path", { d: "M0 5h16" }, row.firstChild);
      html("b", "", row, point[2] === null ? "not finite" : short(point[2], 5));
      const where = away > NEAR / 3 ? ` at ${axis === 0 ? point[1].toLocaleString("en") : position(point[1])}` : "";
      html("span", "", row, [kind + where, data.runs[run].name].filter((text) => text.trim()).join(", "));
      if (drawable(point[2])) svg("circle", { cx: point[0], cy: py(point[2]), r: 4, class: `dot ${style(run)}` }, marks);
    }
    tip.hidden = false;
    const right = at > width / 2, narrow = width < 480; // a narrow chart has its tip below, where it covers no curve
    tip.style.left = narrow ? "0" : right ? "auto" : `${at + 28}px`;
    tip.style.right = narrow ? "0" : right ? `${width - at + 28}px` : "auto";
    tip.style.top = narrow ? "calc(100% + 3px)" : "36px";
  }

  const redraws = [];
  const charts = document.querySelector(".charts");
  const sent = acrossRange(3)[1] > 1; // false if no run sends bytes between nodes; the axis "bytes" is then left out
  if (!sent) document.querySelector("input[name=axis][value='3']").parentElement.remove();
  const compared = data.runs.length < 2 ? [] : ["tokens", "time", "bytes between nodes"].map((name, index) => (
    { ...data.charts[0], axis: index + 1, title: `${data.charts[0].title} against ${name}` })).slice(0, sent ? 3 : 2);
  for (const chart of [...compared, ...data.charts]) {
    const curves = curvesOf(chart), values = curves.flatMap(({ segments }) => segments.flatMap(({ y }) => y));
    // Charts without values, and of values that never change, are left out: the summary or the flags have the value.
    if (!values.length || (values.length > 1 && values[0] !== null && values.every((value) => value === values[0]))) continue;
    const card = html("div", "chart", charts);
    const title = html("h3", "", card, chart.title + " ");
    html("small", "", title, chart.unit ? `(${chart.unit})` : "");
    const key = curves.some(({ kind }) => kind === "validation") ? ["\u2014 training", "\u25cb validation"] : [];
    if (values.includes(null)) key.push("\u00d7 not finite");
    if (key.length) html("span", "key", title, key.join(" \u2002"));
    const plot = html("div", "plot", card), tip = html("div", "tip", card);
    tip.hidden = true;
    let drawn;
    const redraw = () => { drawn = plot.clientWidth; draw(chart, plot, tip); };
    redraws.push(redraw);
    new ResizeObserver(() => { if (plot.clientWidth !== drawn) redraw(); }).observe(plot);
  }
  redraws.forEach((redraw) => redraw());
  if (!charts.childElementCount) html("p", "", charts, "No log line has been written yet.");
  for (const input of document.querySelectorAll("input[name=axis]")) {
    input.addEventListener("change", () => { chosen = Number(input.value); redraws.forEach((redraw) => redraw()); });
  }
})();

// Curves of the data as numbers: decoded when they are first drawn, smoothed, and brought onto one x for uPlot.
"use strict";

const decoded = new WeakMap();

// `numbers`: [first, difference, count], or base64 of float32 (`float_arrays.py`).
function unpacked(numbers) {
  if (Array.isArray(numbers)) {
    const [first, difference, count] = numbers;
    return Float64Array.from({ length: count }, (_, at) => first + difference * at);
  }
  const text = atob(numbers), bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
  return new Float32Array(bytes.buffer);
}

function curveOf(series) {
  if (!decoded.has(series)) {
    const { x, y, low, high } = series;
    decoded.set(series, { x: unpacked(x), y: unpacked(y), ...(low ? { low: unpacked(low), high: unpacked(high) } : {}) });
  }
  return decoded.get(series);
}

// A curve of points [x, y] or [x, y, low, high].
function curveFrom(points) {
  const column = (at) => points.map((point) => point[at]);
  return { x: column(0), y: column(1), ...(points.some((point) => point.length >= 4) ? { low: column(2), high: column(3) } : {}) };
}

// Means over windows of this share of the points, each at its window's middle; null where a window would leave the curve.
function smoothed(values, share) {
  const half = Math.round((share * values.length) / 2);
  if (half < 1) return values;
  const width = 2 * half + 1, made = new Array(values.length).fill(null);
  let sum = 0;
  for (let at = 0; at < values.length; at += 1) {
    sum += values[at];
    if (at >= width) sum -= values[at - width];
    if (at >= width - 1) made[at - half] = sum / width;
  }
  return made;
}

// uPlot's table of columns over all x that occur. What cannot be drawn is undefined: the line goes on to the next value.
function joined(columns, log) {
  const drawable = log ? (value) => value > 0 : Number.isFinite;
  const kept = (values) => (Array.prototype.every.call(values, (value) => value === null || drawable(value)) ? values
    : Array.from(values, (value) => (value === null || drawable(value) ? value : undefined)));
  return uPlot.join(columns.map(({ x, y }) => [x, kept(y)]));
}

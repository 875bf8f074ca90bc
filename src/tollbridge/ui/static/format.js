// Numbers for people: three significant digits, the unit beside them.

const digits = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2));

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) < 0.9995) return value === 0 ? "0 s" : `${value < 0.01 ? (value * 1e3).toPrecision(2) : (value * 1e3).toFixed(0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (value < 7200) return `${(value / 60).toFixed(value < 600 ? 1 : 0)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

function scaled(value, units, base) {
  let at = 0;
  while (value >= base * 0.9995 && at < units.length - 1) {
    value /= base;
    at += 1;
  }
  return `${at === 0 ? value.toFixed(0) : digits(value)} ${units[at]}`;
}

export const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"], 1000);
export const rate = (value) => `${bytes(value)}/s`;
export const count = (value) => Math.round(value).toLocaleString("en-US");
export const percent = (share) => (share === null || !isFinite(share) ? "–" : share > 0 && share < 0.005 ? "<1 %" : `${(share * 100).toFixed(0)} %`);
export const number = (value) => (Math.abs(value) >= 1000 ? count(value) : Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3))));
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

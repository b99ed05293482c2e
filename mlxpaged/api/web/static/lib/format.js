// Numbers as people read them.

export function count(value) {
  return Math.round(value).toLocaleString("en");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function rate(value) {
  return value === null || value === undefined ? "–" : value < 100 ? value.toFixed(1) : count(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

export function percent(share) {
  return share === null ? "–" : `${Math.round(share * 100)} %`;
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** 7,600,000,000 as "7.6 billion". */
export function short(number) {
  const [size, name] = number < 1e9 ? [1e6, "million"] : [1e9, "billion"];
  const value = number / size;
  return `${value < 10 ? value.toFixed(1) : count(value)} ${name}`;
}

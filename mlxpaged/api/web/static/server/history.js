// The figures of the last two minutes, for the charts.

export const SECONDS = 120;

export class History {
  constructor() {
    this.points = []; // {time, name: value...}
  }

  add(status) {
    const { time, rates } = status;
    const sum = (read) => status.models.reduce((total, model) => total + (read(model) ?? 0), 0);
    const counters = {
      time,
      prompt: sum((model) => model.prompt_tokens),
      hits: sum((model) => model.prefix_hit_tokens),
    };
    const known = status.models.filter((model) => model.blocks);
    this.points.push({
      time,
      tokens: rates.tokens_per_second,
      ttft50: rates.ttft_seconds?.[0] ?? null,
      ttft99: rates.ttft_seconds?.[1] ?? null,
      itl50: rates.itl_seconds?.[0] ?? null,
      itl99: rates.itl_seconds?.[1] ?? null,
      running: sum((model) => model.running),
      waiting: sum((model) => model.waiting),
      used: known.length ? sum((model) => model.blocks?.used) : null,
      cached: known.length ? sum((model) => model.blocks?.cached) : null,
      free: known.length ? sum((model) => model.blocks?.free) : null,
      hits: counters.hits,
      prompt: counters.prompt,
      hitRate: null,
      swap: sum((model) => model.swap?.used),
    });
    while (this.points[0].time < time - SECONDS) this.points.shift();
    const last = this.points.at(-1);
    const first = this.points[0];
    const prompt = last.prompt - first.prompt;
    // Of a server that was just opened: the share since its start.
    if (prompt > 0) last.hitRate = (last.hits - first.hits) / prompt;
    else if (last.prompt > 0) last.hitRate = last.hits / last.prompt;
  }

  get last() {
    return this.points.at(-1);
  }
}

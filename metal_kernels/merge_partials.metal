// Joins what paged_attention left of a query token's key ranges: weights each range by the exponential of its maximum,
// adds the sink, divides.
//
// partials [rows, HEADS, D + 4] of float: weighted values, maximum, sum of exponentials, 0, 0
// ranges [max(T, 2), 4]: first row of the token's partials, rows from one to the next, how many, unused
// sinks [HEADS] if SINKS
// out [T, HEADS, D] of T
//
// grid (D / 4, HEADS, T), threadgroup (D / 4, 1, 1): a thread makes four columns, and shares nothing with another
constexpr int WIDTH = D + 4;
const int column = int(thread_position_in_grid.x) * 4;
const int head = int(thread_position_in_grid.y);
const size_t token = thread_position_in_grid.z;
const device int* range = ranges + token * 4;
const int count = range[2];
const size_t stride = size_t(range[1]) * HEADS * WIDTH;
const device float* part = partials + (size_t(range[0]) * HEADS + head) * WIDTH;

float best = part[D];
for (int i = 1; i < count; i++) {
  best = max(best, part[i * stride + D]);
}
float total = 0.0f;
if (SINKS) {
  best = max(best, static_cast<float>(sinks[head]));
  total = metal::fast::exp(static_cast<float>(sinks[head]) - best);
}
float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
for (int i = 0; i < count; i++) {
  const float sum = part[i * stride + D + 1];
  if (sum != 0.0f) {  // else the token sees none of the range, and its maximum means nothing
    const float factor = metal::fast::exp(part[i * stride + D] - best);
    const float4 values = *(const device float4*)(part + i * stride + column);
    total += sum * factor;
    for (int e = 0; e < 4; e++) {
      acc[e] += values[e] * factor;
    }
  }
}
for (int e = 0; e < 4; e++) {
  out[(token * HEADS + head) * D + column + e] = static_cast<T>(acc[e] / total);
}

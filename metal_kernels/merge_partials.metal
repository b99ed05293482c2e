// Merges the partial results of an attention kernel: rescales each range of keys by its maximum, adds the sink to the
// denominator, divides. Eight simdgroups take turns at the ranges of one token and head, each with a running maximum,
// and merge in threadgroup memory, because a long context has hundreds of ranges.
//
// partials [rows, HEADS, D + 4] of float: weighted values, maximum, denominator, 0, 0
// ranges [max(T, 2), 4]: first row of the token's partials, stride in rows, number of ranges, unused
// sinks [HEADS] if SINKS
// out [T, HEADS, D] of T
//
// grid (256, HEADS, T), threadgroup (256, 1, 1)
constexpr int THREADS = 256;
constexpr int SPLITS = THREADS / 32;
constexpr int CHUNKS = (D + 127) / 128;  // of four columns per lane of a simdgroup
constexpr int WIDTH = D + 4;
constexpr float LEAST = -3.402823466e+38f;

threadgroup float split_values[SPLITS * D];
threadgroup float split_max[SPLITS];
threadgroup float split_sum[SPLITS];

const int me = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int split = int(simdgroup_index_in_threadgroup);
const int head = int(threadgroup_position_in_grid.y);
const size_t token = threadgroup_position_in_grid.z;
const device int* range = ranges + token * 4;
const int count = range[2];
const size_t stride = size_t(range[1]) * HEADS * WIDTH;
const device float* partial = partials + (size_t(range[0]) * HEADS + head) * WIDTH;

float best = LEAST;
float denominator = 0.0f;
float acc[CHUNKS * 4];
#pragma clang loop unroll(full)
for (int i = 0; i < CHUNKS * 4; i++) {
  acc[i] = 0.0f;
}
for (int i = split; i < count; i += SPLITS) {
  const device float* row = partial + i * stride;
  const float new_best = max(best, row[D]);
  const float before = metal::fast::exp(best - new_best);
  const float factor = metal::fast::exp(row[D] - new_best);  // zero if the token sees none of the range
  best = new_best;
  denominator = denominator * before + row[D + 1] * factor;
#pragma clang loop unroll(full)
  for (int c = 0; c < CHUNKS; c++) {
    const int column = (c * 32 + lane) * 4;
    if (column < D) {
      const float4 values = *(const device float4*)(row + column);
      for (int e = 0; e < 4; e++) {
        acc[c * 4 + e] = acc[c * 4 + e] * before + values[e] * factor;
      }
    }
  }
}
#pragma clang loop unroll(full)
for (int c = 0; c < CHUNKS; c++) {
  const int column = (c * 32 + lane) * 4;
  if (column < D) {
    for (int e = 0; e < 4; e++) {
      split_values[split * D + column + e] = acc[c * 4 + e];
    }
  }
}
if (lane == 0) {
  split_max[split] = best;
  split_sum[split] = denominator;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int column = me; column < D; column += THREADS) {
  best = LEAST;
  for (int s = 0; s < SPLITS; s++) {
    best = max(best, split_max[s]);
  }
  denominator = 0.0f;
  if (SINKS) {
    best = max(best, static_cast<float>(sinks[head]));
    denominator = metal::fast::exp(static_cast<float>(sinks[head]) - best);
  }
  float value = 0.0f;
  for (int s = 0; s < SPLITS; s++) {
    const float factor = metal::fast::exp(split_max[s] - best);
    value += split_values[s * D + column] * factor;
    denominator += split_sum[s] * factor;
  }
  out[(token * HEADS + head) * D + column] = static_cast<T>(value / denominator);
}

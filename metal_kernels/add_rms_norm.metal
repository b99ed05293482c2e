// Adds two rows, and normalizes the sum by its root mean square. Rounded as MLX's own addition and norm are: the sum to
// T before its squares are added in float32, and the normalized row to T before it meets the weight.
//
// x, y [rows, D] of T; weight [D] of T; eps
// sum [rows, D] of T: x + y; normed [rows, D] of T: weight * sum / sqrt(mean of squares + eps)
//
// grid (THREADS, rows, 1), threadgroup (THREADS, 1, 1)
constexpr int VECTORS = D / 4;
constexpr int EACH = (VECTORS + THREADS - 1) / THREADS;  // vectors of four elements per thread
constexpr int SIMDGROUPS = THREADS / 32;

threadgroup float simdgroup_squares[SIMDGROUPS];

const int me = int(thread_index_in_threadgroup);
const size_t row = size_t(threadgroup_position_in_grid.y) * D;

float4 sums[EACH];
float squares = 0.0f;
#pragma clang loop unroll(full)
for (int i = 0; i < EACH; i++) {
  const int vector = i * THREADS + me;
  sums[i] = float4(0.0f);
  if (vector < VECTORS) {
    const vec<T, 4> a = *(const device vec<T, 4>*)(x + row + vector * 4);
    const vec<T, 4> b = *(const device vec<T, 4>*)(y + row + vector * 4);
    vec<T, 4> added = vec<T, 4>(static_cast<T>(0.0f));
    for (int e = 0; e < 4; e++) {
      added[e] = static_cast<T>(static_cast<float>(a[e]) + static_cast<float>(b[e]));
      sums[i][e] = static_cast<float>(added[e]);
      squares += sums[i][e] * sums[i][e];
    }
    *(device vec<T, 4>*)(sum + row + vector * 4) = added;
  }
}
squares = simd_sum(squares);
if (thread_index_in_simdgroup == 0) {
  simdgroup_squares[simdgroup_index_in_threadgroup] = squares;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

squares = 0.0f;
for (int s = 0; s < SIMDGROUPS; s++) {
  squares += simdgroup_squares[s];
}
const float factor = metal::precise::rsqrt(squares / D + eps);
#pragma clang loop unroll(full)
for (int i = 0; i < EACH; i++) {
  const int vector = i * THREADS + me;
  if (vector < VECTORS) {
    const vec<T, 4> w = *(const device vec<T, 4>*)(weight + vector * 4);
    vec<T, 4> result = vec<T, 4>(static_cast<T>(0.0f));
    for (int e = 0; e < 4; e++) {
      const T rounded = static_cast<T>(sums[i][e] * factor);
      result[e] = static_cast<T>(static_cast<float>(w[e]) * static_cast<float>(rounded));
    }
    *(device vec<T, 4>*)(normed + row + vector * 4) = result;
  }
}

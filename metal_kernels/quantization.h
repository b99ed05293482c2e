// Functions for kernels that read or write quantized pools. A row of a pool has SIZE elements of BITS bits. Each GROUP
// of them has a scale and a bias: an element q stands for scale * q + bias, as in MLX's affine quantization.
//
// scales: of the row. First one for each group, then a bias for each.

// N elements of a row from column `base + offset` on, a multiple of N; the others are zero. They are loaded at once.
// base: a multiple of SPAN. offset: less than SPAN. If groups are not shorter than SPAN, the group depends on the base
// alone. So it is known where loops over bases are unrolled, and a lane loads the numbers of a group once.
template <int BITS, int GROUP, int SIZE, int N, int SPAN, typename T>
inline float4 dequantized(const device T* pool, const device T* scales, size_t row, int base, int offset) {
  const int column = base + offset;
  const int group = GROUP % SPAN == 0 ? base / GROUP : column / GROUP;
  const device uchar* from = (const device uchar*)pool + (row * SIZE + column) * BITS / 8;
  uint word = 0;
  if (BITS * N == 32) {
    word = *(const device uint*)from;
  } else if (BITS * N == 16) {
    word = *(const device ushort*)from;
  } else {
    word = *from;
  }
  const float scale = static_cast<float>(scales[group]);
  const float bias = static_cast<float>(scales[SIZE / GROUP + group]);
  float4 result = float4(0.0f);
#pragma clang loop unroll(full)
  for (int e = 0; e < N; e++) {
    result[e] = scale * static_cast<float>((word >> (BITS * e)) & ((1 << BITS) - 1)) + bias;
  }
  return result;
}

// A simdgroup quantizes the row that begins at `from`, in device or threadgroup memory: each lane has neighbouring
// elements of a group. The larger end of a group's range is exact, and so is zero if it is in the range.
template <int BITS, int GROUP, int SIZE, typename P, typename T>
inline void quantize(P from, device uint* to, device T* scales, int lane) {
  constexpr int EACH = GROUP / 32;
  constexpr int LANES = 32 / (EACH * BITS);
  constexpr float STEPS = (1 << BITS) - 1;
  for (int group = 0; group < SIZE / GROUP; group++) {
    const int column = group * GROUP + lane * EACH;
    float x[EACH];
    float least = 3.402823466e+38f;
    float greatest = -3.402823466e+38f;
#pragma clang loop unroll(full)
    for (int e = 0; e < EACH; e++) {
      x[e] = static_cast<float>(from[column + e]);
      least = min(least, x[e]);
      greatest = max(greatest, x[e]);
    }
    least = simd_min(least);
    greatest = simd_max(greatest);
    const bool is_negative = metal::abs(least) > metal::abs(greatest);
    const float edge = is_negative ? least : greatest;
    float scale = max((greatest - least) / STEPS, 1e-7f);
    scale = is_negative ? scale : -scale;
    const float steps_to_zero = metal::rint(edge / scale);
    float bias = 0.0f;
    if (steps_to_zero != 0.0f) {
      scale = edge / steps_to_zero;
      bias = edge;
    }
    uint word = 0;  // of this lane, then of the lanes that share 32 bits
#pragma clang loop unroll(full)
    for (int e = 0; e < EACH; e++) {
      word |= uint(min(max(metal::rint((x[e] - bias) / scale), 0.0f), STEPS)) << (BITS * e);
    }
    for (int distance = 1; distance < LANES; distance *= 2) {
      const uint other = simd_shuffle_xor(word, ushort(distance));
      const int shift = EACH * BITS * distance;
      word = lane / distance % 2 == 0 ? word | (other << shift) : other | (word << shift);
    }
    if (lane % LANES == 0) {
      to[column * BITS / 32] = word;
    }
    if (lane == 0) {
      scales[group] = static_cast<T>(scale);
      scales[SIZE / GROUP + group] = static_cast<T>(bias);
    }
  }
}

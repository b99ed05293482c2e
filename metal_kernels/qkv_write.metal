// Makes queries, keys and values of the output of a layer's joined projections: it normalizes each head of the queries
// and keys (NORMS: as mx.fast.rms_norm), rotates them (ROTATED > 0: as mx.fast.rope), and writes keys and values into
// their slots of the pools, in place. Results are rounded to T wherever MLX's separate kernels round them.
//
// rows [T, HEADS * DK + KV_HEADS * DK + KV_HEADS * DV]: queries, keys, values; if GATED, each head of queries is followed
// by DK elements that are not read; positions [T]; slot_mapping [>= T]: block * BLOCK + slot, -1: not written; written:
// the first tokens, whose keys and values are written; query_weight, key_weight [DK] of the norms; frequencies
// [ROTATED / 2]: wavelengths / 2 pi of the pairs, if FREQUENCIES; settings [5]: the norms' epsilons for queries and keys,
// log2 of the base if not FREQUENCIES, the factor on positions, the factor on elements that are rotated; key_pool,
// value_pool [blocks, KV_HEADS, BLOCK, DK or DV]; after: token of the last kernel that touched the pools. Inputs that a
// variant does not read have any value.
// queries [T, HEADS, DK]; done [1]: the token
// If QUANTIZED, the pools are packed, and scales are as in kv_quantize.metal. Keys go through threadgroup memory, one for
// each of ROWS simdgroups, because a group's elements are not those of neighbouring lanes.
//
// TRADITIONAL: a pair is two neighbours of the first ROTATED elements, else an element of their first half and one of
// their second half.
//
// grid (32, HEADS + 2 * KV_HEADS, T), threadgroup (32, n, 1): a simdgroup has one head of one token
constexpr int QUERY = GATED ? 2 * DK : DK;
constexpr int HALF = ROTATED / 2;
constexpr int PAIRS = DK / 2;
constexpr int PAIRS_OF_LANE = (PAIRS + 31) / 32;
#ifdef QUANTIZED
threadgroup T key_rows[ROWS * DK];
threadgroup T* key_row = key_rows + int(thread_position_in_threadgroup.y) * DK;
#endif
const int lane = int(thread_position_in_grid.x);
const int head = int(thread_position_in_grid.y);
const size_t token = thread_position_in_grid.z;
const int slot = int(token) < written ? slot_mapping[token] : -1;
const bool is_query = head < HEADS;
const bool is_key = !is_query && head < HEADS + KV_HEADS;
const int kv_head = is_query ? 0 : is_key ? head - HEADS : head - HEADS - KV_HEADS;
const size_t row = (size_t(slot / BLOCK) * KV_HEADS + kv_head) * BLOCK + slot % BLOCK;
const device T* from = rows + token * (HEADS * QUERY + KV_HEADS * DK + KV_HEADS * DV);
if (is_query || is_key) {
  from += is_query ? head * QUERY : HEADS * QUERY + kv_head * DK;
  float first[PAIRS_OF_LANE];
  float second[PAIRS_OF_LANE];
  float squares = 0.0f;
#pragma clang loop unroll(full)
  for (int i = 0; i < PAIRS_OF_LANE; i++) {
    const int pair = lane + 32 * i;
    const bool halves = !TRADITIONAL && pair < HALF;
    const int at = halves ? pair : 2 * pair;
    first[i] = pair < PAIRS ? static_cast<float>(from[at]) : 0.0f;
    second[i] = pair < PAIRS ? static_cast<float>(from[at + (halves ? HALF : 1)]) : 0.0f;
    squares += first[i] * first[i] + second[i] * second[i];
  }
  float inverse_norm = 1.0f;
  if (NORMS) {
    inverse_norm = metal::precise::rsqrt(simd_sum(squares) / DK + settings[is_query ? 0 : 1]);
  }
  const float scaled_position = settings[3] * static_cast<float>(positions[token]);
  const float factor = static_cast<float>(static_cast<T>(settings[4]));
#pragma clang loop unroll(full)
  for (int i = 0; i < PAIRS_OF_LANE; i++) {
    const int pair = lane + 32 * i;
    if (pair >= PAIRS || (is_key && slot < 0)) {
      continue;
    }
    const bool halves = !TRADITIONAL && pair < HALF;
    const int at = halves ? pair : 2 * pair;
    const int other = at + (halves ? HALF : 1);
    float x = first[i];
    float y = second[i];
    if (NORMS) {
      const float x_weight = static_cast<float>(is_query ? query_weight[at] : key_weight[at]);
      const float y_weight = static_cast<float>(is_query ? query_weight[other] : key_weight[other]);
      x = static_cast<float>(static_cast<T>(x_weight * static_cast<float>(static_cast<T>(x * inverse_norm))));
      y = static_cast<float>(static_cast<T>(y_weight * static_cast<float>(static_cast<T>(y * inverse_norm))));
    }
    if (pair < HALF) {
      x = static_cast<float>(static_cast<T>(factor * x));
      y = static_cast<float>(static_cast<T>(factor * y));
      const float exponent = static_cast<float>(pair) / static_cast<float>(HALF);
      const float frequency =
          FREQUENCIES ? 1.0f / static_cast<float>(frequencies[pair]) : metal::exp2(-exponent * settings[2]);
      const float angle = scaled_position * frequency;
      const float cosine = metal::fast::cos(angle);
      const float sine = metal::fast::sin(angle);
      const float rotated = x * cosine - y * sine;
      y = x * sine + y * cosine;
      x = rotated;
    }
#ifdef QUANTIZED
    if (is_key) {
      key_row[at] = static_cast<T>(x);
      key_row[other] = static_cast<T>(y);
      continue;
    }
#endif
    device T* to = is_query ? queries + (token * HEADS + head) * DK : const_cast<device T*>(key_pool) + row * DK;
    to[at] = static_cast<T>(x);
    to[other] = static_cast<T>(y);
  }
#ifdef QUANTIZED
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (is_key && slot >= 0) {
    quantize<KEY_BITS, KEY_GROUP, DK>(
        key_row, (device uint*)key_pool + row * DK * KEY_BITS / 32, const_cast<device T*>(scales) + row * SCALES, lane);
  }
#endif
} else if (slot >= 0) {
  from += HEADS * QUERY + KV_HEADS * DK + kv_head * DV;
#ifdef QUANTIZED
  quantize<VALUE_BITS, VALUE_GROUP, DV>(
      from, (device uint*)value_pool + row * DV * VALUE_BITS / 32,
      const_cast<device T*>(scales) + row * SCALES + KEY_SCALES, lane);
#else
  for (int column = lane * 4; column < DV; column += 128) {
    *(device vec<T, 4>*)(const_cast<device T*>(value_pool) + row * DV + column) =
        *(const device vec<T, 4>*)(from + column);
  }
#endif
}
if (lane == 0 && head == 0 && token == 0) {
  done[0] = 1;
}

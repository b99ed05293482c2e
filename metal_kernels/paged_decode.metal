// Attention of decoding sequences over a paged context: one query token each. Online softmax in float32, with optional
// softcap and sinks. A window only shortens the range of keys.
//
// A threadgroup takes one work item, a range of keys, all of which the token sees, for HEADS of the query heads of a KV
// head. Each of its simdgroups takes tiles of TILE keys of its own, so the loop over keys has no threadgroup barrier.
// For a tile,
//   scores: LANES lanes share a key, and each of them has KEYS keys in registers while all heads meet them;
//   softmax: a lane per key; a head's running maximum and denominator are in the lane of its number;
//   values: COLUMN_LANES lanes share a value, each with four columns of it (or 4 * VALUE_CHUNKS), and load VALUES values
//   before all heads meet them.
// A lane reads its entry of the block table one tile ahead. At the end the simdgroups merge in threadgroup memory. Keys
// outside the range are never read.
//
// queries [T, KV_HEADS * GROUP, DK]; keys, values: the pools, [blocks, KV_HEADS, BLOCK, DK] and [..., DV]
// block_tables [S, max_blocks]
// items [N, 8]: sequence, query row, 1, position of the query, first key, end of keys, row of `out`, unused
// sinks [KV_HEADS * GROUP] if SINKS; after: token of the last write to the pools
// out [rows, KV_HEADS * GROUP, DV] of T, or if PARTIAL of float [rows, KV_HEADS * GROUP, DV + 4]: the weighted sum of
//   values before division, the maximum of the scores, the denominator, 0, 0. done [1]: the token
// If QUANTIZED, the pools are packed, and scales are as in kv_quantize.metal.
//
// grid (THREADS, KV_HEADS * HEAD_TILES, N), threadgroup (THREADS, 1, 1)
constexpr int HEAD_TILES = GROUP / HEADS;
constexpr int SIMDGROUPS = THREADS / 32;
constexpr int CHUNKS = (DK + 4 * LANES - 1) / (4 * LANES);  // of four elements of a key per lane
constexpr bool WHOLE_CHUNKS = DK % (4 * LANES) == 0;
constexpr int KEY_STEP = 32 / LANES;
constexpr int VALUE_CHUNKS = (DV + 4 * COLUMN_LANES - 1) / (4 * COLUMN_LANES);
constexpr int VALUE_STEP = 32 / COLUMN_LANES;
constexpr int VECTORS = DV / 4;
constexpr int WIDTH = PARTIAL ? DV + 4 : DV;
constexpr float MASKED = -3.402823466e+38f;  // finite: the difference of two infinities is NaN

threadgroup vec<T, 4> query_tile[HEADS * DK / 4];
threadgroup float4 scratch[SCRATCH];  // scores of each simdgroup, and at the end ROWS_AT_ONCE sums of each
threadgroup float simdgroup_max[SIMDGROUPS * HEADS];
threadgroup float simdgroup_sum[SIMDGROUPS * HEADS];

const int me = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int kv_head = int(threadgroup_position_in_grid.y) / HEAD_TILES;
const int first_head = int(threadgroup_position_in_grid.y) * HEADS;

const device int* item = items + size_t(threadgroup_position_in_grid.z) * 8;
const auto table = block_tables + size_t(item[0]) * block_tables_shape[1];
const int key_begin = item[4];
const int key_end = item[5];

const size_t first_query = (size_t(item[1]) * (KV_HEADS * GROUP) + first_head) * DK;
for (int i = me; i < HEADS * DK / 4; i += THREADS) {
  query_tile[i] = *(const device vec<T, 4>*)(queries + first_query + i * 4);
}

float best = MASKED;  // of head `lane`, as is the denominator
float denominator = 0.0f;
float4 acc[HEADS * VALUE_CHUNKS];
#pragma clang loop unroll(full)
for (int i = 0; i < HEADS * VALUE_CHUNKS; i++) {
  acc[i] = float4(0.0f);
}
threadgroup float* scores = (threadgroup float*)scratch + simdgroup * HEADS * TILE;
const int key_lane = lane % LANES;
const int column_lane = lane % COLUMN_LANES;
int start = (key_begin / TILE + simdgroup) * TILE;
int next_block = table[min(max(start + lane % TILE, key_begin), key_end - 1) / BLOCK];
threadgroup_barrier(mem_flags::mem_threadgroup);

for (; start < key_end; start += SIMDGROUPS * TILE) {
  const int my_block = next_block;
  next_block = table[min(start + SIMDGROUPS * TILE + lane % TILE, key_end - 1) / BLOCK];

#pragma clang loop unroll(full)
  for (int base = 0; base < TILE; base += KEY_STEP * KEYS) {
    float4 k[KEYS * CHUNKS];
#pragma clang loop unroll(full)
    for (int i = 0; i < KEYS; i++) {
      const int key = base + i * KEY_STEP + lane / LANES;
      const int position = start + key;
      const int block = BLOCK % TILE == 0 ? my_block : simd_shuffle(my_block, ushort(key));
      const size_t at = ((size_t(block) * KV_HEADS + kv_head) * BLOCK + position % BLOCK) * DK + key_lane * 4;
#pragma clang loop unroll(full)
      for (int c = 0; c < CHUNKS; c++) {
        k[i * CHUNKS + c] = float4(0.0f);
        if (position >= key_begin && position < key_end && (WHOLE_CHUNKS || (c * LANES + key_lane) * 4 < DK)) {
#ifdef QUANTIZED
          const float4 part = dequantized<KEY_BITS, KEY_GROUP, DK, 4, LANES * 4>(
              keys, scales + at / DK * SCALES, at / DK, c * LANES * 4, key_lane * 4);
#else
          const vec<T, 4> part = *(const device vec<T, 4>*)(keys + at + c * LANES * 4);
#endif
          for (int e = 0; e < 4; e++) {
            k[i * CHUNKS + c][e] = static_cast<float>(part[e]);
          }
        }
      }
    }
    for (int row = 0; row < HEADS; row++) {
      float4 products[KEYS];
#pragma clang loop unroll(full)
      for (int i = 0; i < KEYS; i++) {
        products[i] = float4(0.0f);
      }
#pragma clang loop unroll(full)
      for (int c = 0; c < CHUNKS; c++) {
        if (WHOLE_CHUNKS || (c * LANES + key_lane) * 4 < DK) {
          const vec<T, 4> part = query_tile[row * (DK / 4) + c * LANES + key_lane];
          float4 q = float4(0.0f);
          for (int e = 0; e < 4; e++) {
            q[e] = static_cast<float>(part[e]);
          }
#pragma clang loop unroll(full)
          for (int i = 0; i < KEYS; i++) {
            products[i] += q * k[i * CHUNKS + c];
          }
        }
      }
#pragma clang loop unroll(full)
      for (int i = 0; i < KEYS; i++) {
        float score = products[i][0] + products[i][1] + products[i][2] + products[i][3];
        for (int distance = LANES / 2; distance > 0; distance /= 2) {
          score += simd_shuffle_xor(score, ushort(distance));
        }
        if (key_lane == 0) {
          scores[row * TILE + base + i * KEY_STEP + lane / LANES] = score;
        }
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

  const bool visible = lane < TILE && start + lane >= key_begin && start + lane < key_end;
#pragma clang loop unroll(full)
  for (int row = 0; row < HEADS; row++) {
    float score = MASKED;
    if (visible) {
      score = scores[row * TILE + lane] * scale;
      if (SOFTCAP) {
        score = softcap * metal::precise::tanh(score / softcap);
      }
    }
    const float before = simd_shuffle(best, ushort(row));
    const float maximum = max(before, simd_max(score));
    const float weight = visible ? metal::fast::exp(score - maximum) : 0.0f;
    if (lane < TILE) {
      scores[row * TILE + lane] = weight;
    }
    const float factor = metal::fast::exp(before - maximum);
    const float sum = simd_sum(weight);
    if (lane == row) {
      best = maximum;
      denominator = denominator * factor + sum;
    }
#pragma clang loop unroll(full)
    for (int c = 0; c < VALUE_CHUNKS; c++) {
      acc[row * VALUE_CHUNKS + c] *= factor;
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);

#pragma clang loop unroll(full)
  for (int base = 0; base < TILE; base += VALUE_STEP * VALUES) {
    float4 v[VALUES * VALUE_CHUNKS];
#pragma clang loop unroll(full)
    for (int i = 0; i < VALUES; i++) {
      const int key = base + i * VALUE_STEP + lane / COLUMN_LANES;
      const int position = start + key;
      const int block = BLOCK % TILE == 0 ? my_block : simd_shuffle(my_block, ushort(key));
      const size_t at =
          ((size_t(block) * KV_HEADS + kv_head) * BLOCK + position % BLOCK) * DV + column_lane * 4;
#pragma clang loop unroll(full)
      for (int c = 0; c < VALUE_CHUNKS; c++) {
        v[i * VALUE_CHUNKS + c] = float4(0.0f);
        if (position >= key_begin && position < key_end && (c * COLUMN_LANES + column_lane) * 4 < DV) {
#ifdef QUANTIZED
          const float4 part = dequantized<VALUE_BITS, VALUE_GROUP, DV, 4, COLUMN_LANES * 4>(
              values, scales + at / DV * SCALES + KEY_SCALES, at / DV, c * COLUMN_LANES * 4, column_lane * 4);
#else
          const vec<T, 4> part = *(const device vec<T, 4>*)(values + at + c * COLUMN_LANES * 4);
#endif
          for (int e = 0; e < 4; e++) {
            v[i * VALUE_CHUNKS + c][e] = static_cast<float>(part[e]);
          }
        }
      }
    }
#pragma clang loop unroll(full)
    for (int row = 0; row < HEADS; row++) {
#pragma clang loop unroll(full)
      for (int i = 0; i < VALUES; i++) {
        const float weight = scores[row * TILE + base + i * VALUE_STEP + lane / COLUMN_LANES];
#pragma clang loop unroll(full)
        for (int c = 0; c < VALUE_CHUNKS; c++) {
          acc[row * VALUE_CHUNKS + c] += weight * v[i * VALUE_CHUNKS + c];
        }
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);  // the weights have been read
}

if (lane < HEADS) {
  simdgroup_max[simdgroup * HEADS + lane] = best;
  simdgroup_sum[simdgroup * HEADS + lane] = denominator;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// The simdgroups' sums of a head are added in threadgroup memory, as many heads at a time as fit.
#pragma clang loop unroll(full)
for (int first = 0; first < HEADS; first += ROWS_AT_ONCE) {
  if (first > 0) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
#pragma clang loop unroll(full)
  for (int row = first; row < first + ROWS_AT_ONCE && row < HEADS; row++) {
    float maximum = simdgroup_max[row];
    for (int s = 1; s < SIMDGROUPS; s++) {
      maximum = max(maximum, simdgroup_max[s * HEADS + row]);
    }
    const float factor = metal::fast::exp(simdgroup_max[simdgroup * HEADS + row] - maximum);
#pragma clang loop unroll(full)
    for (int c = 0; c < VALUE_CHUNKS; c++) {
      float4 sum = acc[row * VALUE_CHUNKS + c] * factor;
      for (int distance = COLUMN_LANES; distance < 32; distance *= 2) {
        for (int e = 0; e < 4; e++) {
          sum[e] += simd_shuffle_xor(sum[e], ushort(distance));
        }
      }
      const int vector = c * COLUMN_LANES + column_lane;
      if (lane < COLUMN_LANES && vector < VECTORS) {
        scratch[(simdgroup * ROWS_AT_ONCE + row - first) * VECTORS + vector] = sum;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = me; i < ROWS_AT_ONCE * VECTORS; i += THREADS) {
    const int row = first + i / VECTORS;
    if (row < HEADS) {
      float4 sum = float4(0.0f);
      float maximum = MASKED;
      for (int s = 0; s < SIMDGROUPS; s++) {
        sum += scratch[s * (ROWS_AT_ONCE * VECTORS) + i];
        maximum = max(maximum, simdgroup_max[s * HEADS + row]);
      }
      float total = 0.0f;
      for (int s = 0; s < SIMDGROUPS; s++) {
        total += simdgroup_sum[s * HEADS + row] * metal::fast::exp(simdgroup_max[s * HEADS + row] - maximum);
      }
      const int head = first_head + row;
      const size_t at = (size_t(item[6]) * (KV_HEADS * GROUP) + head) * WIDTH;
      if (PARTIAL) {
        if (i % VECTORS == 0) {
          out[at + DV] = static_cast<O>(maximum);
          out[at + DV + 1] = static_cast<O>(total);
          out[at + DV + 2] = static_cast<O>(0.0f);
          out[at + DV + 3] = static_cast<O>(0.0f);
        }
      } else {
        if (SINKS) {
          const float sink = static_cast<float>(sinks[head]);
          const float highest = max(maximum, sink);
          const float factor = metal::fast::exp(maximum - highest);
          total = total * factor + metal::fast::exp(sink - highest);
          sum *= factor;
        }
        sum /= total;
      }
      vec<O, 4> result = vec<O, 4>(static_cast<O>(0.0f));
      for (int e = 0; e < 4; e++) {
        result[e] = static_cast<O>(sum[e]);
      }
      *(device vec<O, 4>*)(out + at + i % VECTORS * 4) = result;
    }
  }
}

if (me == 0 && threadgroup_position_in_grid.y == 0 && threadgroup_position_in_grid.z == 0) {
  done[0] = 1;
}

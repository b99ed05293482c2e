// Attention of query tiles over a paged context. A tile is a few tokens of a prompt chunk with the query heads that share
// a KV head, or one token of a decoding sequence if its heads are too large for paged_decode. Causal, with optional
// window (or if CHUNKED, keys from the last multiple of `window` on), softcap and sinks; online softmax in float32.
// If MUTUAL, queries of an image also see the keys after theirs, up to the image's last one.
//
// A threadgroup takes one work item for one KV head, or for HEADS of its query heads if a group has more: QUERIES
// tokens x HEADS heads = ROWS rows over a range of keys. It reads each key and each value of the range from device
// memory once, into registers:
//   scores: LANES lanes share a key, every simdgroup has keys of its own, all rows meet a key while it is loaded;
//   softmax: a simdgroup per row, over the scores of the TILE keys in threadgroup memory;
//   values: a thread owns VEC columns of the output for all rows, and reads every SPLITS-th key.
// Keys outside the range are never read. A weight of zero skips its value, so a NaN in a masked row cannot leak.
//
// queries [T, KV_HEADS * GROUP, DK]; keys, values: the pools, [blocks, KV_HEADS, BLOCK, DK] and [..., DV]
// block_tables [S, max_blocks]
// items [N, 8]: sequence, first query row, queries, position of the first query, first key, end of keys,
//   first row of `out`, last key of the image that all its queries belong to or 0
// sinks [KV_HEADS * GROUP] if SINKS; after: token of the last write to the pools
// out [rows, KV_HEADS * GROUP, DV] of T, or if PARTIAL of float [rows, KV_HEADS * GROUP, DV + 4]: the weighted sum of
//   values before division, the maximum of the scores, the denominator, 0, 0. done [1]: the token
// If QUANTIZED, the pools are packed, and scales are as in kv_quantize.metal.
//
// grid (THREADS, KV_HEADS * HEAD_TILES, N), threadgroup (THREADS, 1, 1)
constexpr int HEAD_TILES = (GROUP + HEADS - 1) / HEADS;
constexpr int ROWS = QUERIES * HEADS;
constexpr int SIMDGROUPS = THREADS / 32;
constexpr int ROWS_EACH = (ROWS + SIMDGROUPS - 1) / SIMDGROUPS;
constexpr int KEYS_AT_ONCE = 32 / LANES;
constexpr int CHUNKS = (DK + 4 * LANES - 1) / (4 * LANES);
constexpr bool WHOLE_CHUNKS = DK % (4 * LANES) == 0;
constexpr int COLUMNS = DV / VEC;
constexpr int SPLITS = THREADS / COLUMNS;
constexpr int SCRATCH = ROWS * TILE > SPLITS * DV ? ROWS * TILE : SPLITS * DV;
constexpr int ROWS_AT_ONCE = SCRATCH / (SPLITS * DV);
constexpr int WIDTH = PARTIAL ? DV + 4 : DV;
constexpr float MASKED = -3.402823466e+38f;  // finite: the difference of two infinities is NaN

threadgroup vec<T, 4> query_tile[ROWS * DK / 4];
threadgroup float scores[SCRATCH];
threadgroup float row_factor[ROWS];
threadgroup float row_max[ROWS];
threadgroup float row_sum[ROWS];

const int me = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int kv_head = int(threadgroup_position_in_grid.y) / HEAD_TILES;
const int first_in_group = int(threadgroup_position_in_grid.y) % HEAD_TILES * HEADS;

const device int* item = items + size_t(threadgroup_position_in_grid.z) * 8;
const auto table = block_tables + size_t(item[0]) * block_tables_shape[1];
const int first_query = item[1];
const int rows = item[2] * HEADS;
const int first_position = item[3];
const int key_end = item[5];

for (int i = me * 4; i < ROWS * DK; i += THREADS * 4) {
  const int row = i / DK;
  const int in_group = first_in_group + row % HEADS;
  vec<T, 4> part = vec<T, 4>(static_cast<T>(0.0f));
  if (row < rows && in_group < GROUP) {
    const size_t head = size_t(first_query + row / HEADS) * (KV_HEADS * GROUP) + kv_head * GROUP + in_group;
    part = *(const device vec<T, 4>*)(queries + head * DK + i % DK);
  }
  query_tile[i / 4] = part;
}

float maxima[ROWS_EACH];
float sums[ROWS_EACH];
#pragma clang loop unroll(full)
for (int i = 0; i < ROWS_EACH; i++) {
  maxima[i] = MASKED;
  sums[i] = 0.0f;
}
const int column = me % COLUMNS * VEC;
const int split = me / COLUMNS;
float acc[ROWS * VEC];
#pragma clang loop unroll(full)
for (int i = 0; i < ROWS * VEC; i++) {
  acc[i] = 0.0f;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int start = item[4]; start < key_end; start += TILE) {
  const int count = min(TILE, key_end - start);

  for (int base = 0; base < count; base += SIMDGROUPS * KEYS_AT_ONCE) {
    const int key = base + simdgroup * KEYS_AT_ONCE + lane / LANES;
    float k[CHUNKS * 4];
#pragma clang loop unroll(full)
    for (int i = 0; i < CHUNKS * 4; i++) {
      k[i] = 0.0f;
    }
    if (key < count) {
      const int position = start + key;
      const size_t at =
          ((size_t(table[position / BLOCK]) * KV_HEADS + kv_head) * BLOCK + position % BLOCK) * DK + lane % LANES * 4;
#pragma clang loop unroll(full)
      for (int c = 0; c < CHUNKS; c++) {
        if (WHOLE_CHUNKS || (c * LANES + lane % LANES) * 4 < DK) {
#ifdef QUANTIZED
          const float4 part = dequantized<KEY_BITS, KEY_GROUP, DK, 4, LANES * 4>(
              keys, scales + at / DK * SCALES, at / DK, c * LANES * 4, lane % LANES * 4);
#else
          const vec<T, 4> part = *(const device vec<T, 4>*)(keys + at + c * LANES * 4);
#endif
          for (int e = 0; e < 4; e++) {
            k[c * 4 + e] = static_cast<float>(part[e]);
          }
        }
      }
    }
    for (int row = 0; row < rows; row++) {
      float score = 0.0f;
#pragma clang loop unroll(full)
      for (int c = 0; c < CHUNKS; c++) {
        const int column_of_query = (c * LANES + lane % LANES) * 4;
        if (WHOLE_CHUNKS || column_of_query < DK) {
          const vec<T, 4> part = query_tile[(row * DK + column_of_query) / 4];
          for (int e = 0; e < 4; e++) {
            score += static_cast<float>(part[e]) * k[c * 4 + e];
          }
        }
      }
      for (int distance = LANES / 2; distance > 0; distance /= 2) {
        score += simd_shuffle_xor(score, ushort(distance));
      }
      if (lane % LANES == 0 && key < count) {
        scores[row * TILE + key] = score;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

#pragma clang loop unroll(full)
  for (int i = 0; i < ROWS_EACH; i++) {
    const int row = simdgroup + i * SIMDGROUPS;
    if (row < rows) {
      const int here = first_position + row / HEADS;
      const int last_visible = MUTUAL ? max(here, item[7]) : here;
      const int first_visible = CHUNKED ? here / window * window : here - window + 1;
      float weights[TILE / 32];
      float best = maxima[i];
#pragma clang loop unroll(full)
      for (int t = 0; t < TILE / 32; t++) {
        const int key = t * 32 + lane;
        const int position = start + key;
        weights[t] = MASKED;
        if (key < count && position <= last_visible && position >= first_visible) {
          weights[t] = scores[row * TILE + key] * scale;
          if (SOFTCAP) {
            weights[t] = softcap * metal::precise::tanh(weights[t] / softcap);
          }
        }
        best = max(best, weights[t]);
      }
      best = simd_max(best);
      float sum = 0.0f;
#pragma clang loop unroll(full)
      for (int t = 0; t < TILE / 32; t++) {
        const int key = t * 32 + lane;
        const float weight = weights[t] == MASKED ? 0.0f : metal::fast::exp(weights[t] - best);
        sum += weight;
        if (key < count) {
          scores[row * TILE + key] = weight;
        }
      }
      const float factor = metal::fast::exp(maxima[i] - best);
      sums[i] = sums[i] * factor + simd_sum(sum);
      maxima[i] = best;
      if (lane == 0) {
        row_factor[row] = factor;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (split < SPLITS) {
#pragma clang loop unroll(full)
    for (int row = 0; row < ROWS; row++) {
      if (row < rows) {
        const float factor = row_factor[row];
        for (int e = 0; e < VEC; e++) {
          acc[row * VEC + e] *= factor;
        }
      }
    }
    for (int key = split; key < count; key += SPLITS) {
      const int position = start + key;
      const size_t at =
          ((size_t(table[position / BLOCK]) * KV_HEADS + kv_head) * BLOCK + position % BLOCK) * DV;
      float v[VEC];
#ifdef QUANTIZED
      const float4 part = dequantized<VALUE_BITS, VALUE_GROUP, DV, VEC, DV>(
          values, scales + at / DV * SCALES + KEY_SCALES, at / DV, 0, column);
      for (int e = 0; e < VEC; e++) {
        v[e] = part[e];
      }
#else
      if (VEC == 1) {
        v[0] = static_cast<float>(values[at + column]);
      } else {
        const vec<T, VEC == 1 ? 2 : VEC> part = *(const device vec<T, VEC == 1 ? 2 : VEC>*)(values + at + column);
        for (int e = 0; e < VEC; e++) {
          v[e] = static_cast<float>(part[e]);
        }
      }
#endif
#pragma clang loop unroll(full)
      for (int row = 0; row < ROWS; row++) {
        if (row < rows) {
          const float weight = scores[row * TILE + key];
          if (weight != 0.0f) {
            for (int e = 0; e < VEC; e++) {
              acc[row * VEC + e] += weight * v[e];
            }
          }
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the weights have been read
}

#pragma clang loop unroll(full)
for (int i = 0; i < ROWS_EACH; i++) {
  const int row = simdgroup + i * SIMDGROUPS;
  if (row < ROWS && lane == 0) {
    row_max[row] = maxima[i];
    row_sum[row] = sums[i];
  }
}

// The splits of a row are added in threadgroup memory, as many rows at a time as fit.
#pragma clang loop unroll(full)
for (int first = 0; first < ROWS; first += ROWS_AT_ONCE) {
  if (first > 0) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
#pragma clang loop unroll(full)
  for (int r = 0; r < ROWS_AT_ONCE; r++) {
    if (first + r < ROWS && split < SPLITS) {
      for (int e = 0; e < VEC; e++) {
        scores[(r * SPLITS + split) * DV + column + e] = acc[(first + r) * VEC + e];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = me; i < ROWS_AT_ONCE * DV; i += THREADS) {
    const int row = first + i / DV;
    const int in_group = first_in_group + row % HEADS;
    if (row < rows && in_group < GROUP) {
      const int d = i % DV;
      const int head = kv_head * GROUP + in_group;
      float sum = 0.0f;
      for (int s = 0; s < SPLITS; s++) {
        sum += scores[(i / DV * SPLITS + s) * DV + d];
      }
      const size_t at = (size_t(item[6] + row / HEADS) * (KV_HEADS * GROUP) + head) * WIDTH;
      if (PARTIAL) {
        out[at + d] = static_cast<O>(sum);
        if (d == 0) {
          out[at + DV] = static_cast<O>(row_max[row]);
          out[at + DV + 1] = static_cast<O>(row_sum[row]);
          out[at + DV + 2] = static_cast<O>(0.0f);
          out[at + DV + 3] = static_cast<O>(0.0f);
        }
      } else {
        float denominator = row_sum[row];
        if (SINKS) {
          const float sink = static_cast<float>(sinks[head]);
          const float best = max(row_max[row], sink);
          const float factor = metal::fast::exp(row_max[row] - best);
          denominator = denominator * factor + metal::fast::exp(sink - best);
          sum *= factor;
        }
        out[at + d] = static_cast<O>(sum / denominator);
      }
    }
  }
}

if (me == 0 && threadgroup_position_in_grid.y == 0 && threadgroup_position_in_grid.z == 0) {
  done[0] = 1;
}

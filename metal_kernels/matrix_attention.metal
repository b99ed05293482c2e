// Attention of prompt chunks over a paged context with simdgroup matrices: tiles of query rows against 32 keys at a
// time. Causal, with optional window (or if CHUNKED, keys from the last multiple of `window` on), softcap and sinks;
// online softmax in float32. If MUTUAL, queries of an image also see the keys after theirs, up to the image's last one.
//
// A threadgroup takes one work item for one KV head, or for HEADS of its query heads if a group has more: QUERIES
// tokens x HEADS heads, at most ROWS rows, over a range of keys. Its four simdgroups read each key and each value of
// the range from device memory once, into registers:
//   scores: a simdgroup multiplies 8 of the 32 keys by all rows. It holds the transposed scores, [8 keys, ROWS];
//   softmax: LANES threads share a row of the scores in threadgroup memory;
//   values: a simdgroup multiplies all weights by its own columns of the 32 values, and keeps the sums in registers.
//
// The lanes fill their elements of a matrix themselves. The element that a lane holds is the one that MLX's kernels
// rely on (ml-explore/mlx, steel/attn/mma.h). A lane loads four neighbouring elements of a key or a value, two for each
// of a pair of matrices. So column j of matrix f of a pair is element `j / 2 * 4 + f * 2 + j % 2` of 16.
//
// Slots outside the range are zero instead of being read: a product of a weight of zero and a NaN would be a NaN. A NaN
// in a value that one row of the tile sees reaches all its rows, which are of the same sequence.
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
constexpr int SIMDGROUPS = THREADS / 32;
constexpr int KEYS = SIMDGROUPS * 8;
constexpr int ROW_TILES = ROWS / 8;
constexpr int KEY_PAIRS = (DK + 15) / 16;
constexpr int VALUE_PAIRS = (DV + 15) / 16;
constexpr int PAIRS_EACH = (VALUE_PAIRS + SIMDGROUPS - 1) / SIMDGROUPS;
constexpr int PITCH = KEYS + 4;  // eight keys of four rows are in 32 banks
constexpr int LANES = THREADS / ROWS;
constexpr int KEYS_EACH = KEYS / LANES;
constexpr int WIDTH = PARTIAL ? DV + 4 : DV;
constexpr float MASKED = -3.402823466e+38f;  // finite, so that differences of two maxima are finite

threadgroup vec<T, 2> query_tile[KEY_PAIRS * 2 * ROW_TILES * 32];  // matrices [16 elements, rows], in the order of lanes
threadgroup float2 score_tiles[2 * ROWS * PITCH / 2];  // two tiles: one is filled while slow simdgroups read the other
threadgroup float row_factor[ROWS];
threadgroup float row_max[ROWS];
threadgroup float row_sum[ROWS];

const int me = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int matrix_row = (lane / 4 & 4) + lane / 2 % 4;  // of the two elements that the lane holds
const int matrix_column = (lane / 4 & 2) * 2 + lane % 2 * 2;
const int kv_head = int(threadgroup_position_in_grid.y) / HEAD_TILES;
const int first_in_group = int(threadgroup_position_in_grid.y) % HEAD_TILES * HEADS;

const device int* item = items + size_t(threadgroup_position_in_grid.z) * 8;
const auto table = block_tables + size_t(item[0]) * block_tables_shape[1];
const int first_query = item[1];
const int rows = item[2] * HEADS;
const int first_position = item[3];
const int first_key = item[4];
const int key_end = item[5];

for (int i = me * 4; i < ROWS * KEY_PAIRS * 16; i += THREADS * 4) {
  const int row = i / (KEY_PAIRS * 16);
  const int column = i % (KEY_PAIRS * 16);
  const int in_group = first_in_group + row % HEADS;
  vec<T, 4> part = vec<T, 4>(static_cast<T>(0.0f));
  if (row < rows && in_group < GROUP && column < DK) {
    const size_t head = size_t(first_query + row / HEADS) * (KV_HEADS * GROUP) + kv_head * GROUP + in_group;
    part = *(const device vec<T, 4>*)(queries + head * DK + column);
  }
#pragma clang loop unroll(full)
  for (int e = 0; e < 4; e++) {
    const int matrix = (column / 16 * 2 + e / 2) * ROW_TILES + row / 8;
    const int in_matrix = column % 16 / 2 + e % 2;
    const int holder = (in_matrix & 4) * 4 + (row & 4) * 2 + (in_matrix & 3) * 2 + (row & 2) / 2;
    ((threadgroup T*)query_tile)[(matrix * 32 + holder) * 2 + row % 2] = part[e];
  }
}

const int row = me / LANES;  // whose softmax the thread shares
const int first_of_row = me % LANES * KEYS_EACH;
const int here = first_position + row / HEADS;
const int first_visible = max(first_key, CHUNKED ? here / window * window : here - window + 1);
const int last_visible = MUTUAL ? max(here, item[7]) : here;
const int end_visible = row < rows ? min(key_end, last_visible + 1) : 0;
float maximum = MASKED;
float denominator = 0.0f;

simdgroup_float8x8 acc[ROW_TILES * PAIRS_EACH * 2];
#pragma clang loop unroll(full)
for (int i = 0; i < ROW_TILES * PAIRS_EACH * 2; i++) {
  acc[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int start = first_key / KEYS * KEYS; start < key_end; start += KEYS) {
  threadgroup float* scores = (threadgroup float*)score_tiles + start / KEYS % 2 * (ROWS * PITCH);

  simdgroup_float8x8 products[ROW_TILES];
#pragma clang loop unroll(full)
  for (int r = 0; r < ROW_TILES; r++) {
    products[r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  const int key = start + simdgroup * 8 + matrix_row;
  const bool has_key = key >= first_key && key < key_end;
  const size_t block = has_key ? size_t(table[key / BLOCK]) : 0;
  const size_t at = ((block * KV_HEADS + kv_head) * BLOCK + key % BLOCK) * DK + matrix_column * 2;
#pragma clang loop unroll(full)
  for (int pair = 0; pair < KEY_PAIRS; pair++) {
    vec<T, 4> part = vec<T, 4>(static_cast<T>(0.0f));
    if (has_key && (DK % 16 == 0 || pair * 16 + matrix_column * 2 < DK)) {
#ifdef QUANTIZED
      const float4 exact = dequantized<KEY_BITS, KEY_GROUP, DK, 4, 16>(
          keys, scales + at / DK * SCALES, at / DK, pair * 16, matrix_column * 2);
      for (int e = 0; e < 4; e++) {
        part[e] = static_cast<T>(exact[e]);
      }
#else
      part = *(const device vec<T, 4>*)(keys + at + pair * 16);
#endif
    }
#pragma clang loop unroll(full)
    for (int f = 0; f < 2; f++) {
      simdgroup_matrix<T, 8, 8> of_keys;
      of_keys.thread_elements()[0] = part[f * 2];
      of_keys.thread_elements()[1] = part[f * 2 + 1];
#pragma clang loop unroll(full)
      for (int r = 0; r < ROW_TILES; r++) {
        const vec<T, 2> two = query_tile[((pair * 2 + f) * ROW_TILES + r) * 32 + lane];
        simdgroup_matrix<T, 8, 8> of_queries;
        of_queries.thread_elements()[0] = two[0];
        of_queries.thread_elements()[1] = two[1];
        simdgroup_multiply_accumulate(products[r], of_keys, of_queries, products[r]);
      }
    }
  }
#pragma clang loop unroll(full)
  for (int r = 0; r < ROW_TILES; r++) {
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; e++) {
      scores[(r * 8 + matrix_column + e) * PITCH + simdgroup * 8 + matrix_row] = products[r].thread_elements()[e];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float weights[KEYS_EACH];
  float best = maximum;
#pragma clang loop unroll(full)
  for (int k = 0; k < KEYS_EACH; k++) {
    const int position = start + first_of_row + k;
    weights[k] = MASKED;
    if (position >= first_visible && position < end_visible) {
      weights[k] = scores[row * PITCH + first_of_row + k] * scale;
      if (SOFTCAP) {
        weights[k] = softcap * metal::precise::tanh(weights[k] / softcap);
      }
    }
    best = max(best, weights[k]);
  }
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    best = max(best, simd_shuffle_xor(best, ushort(distance)));
  }
  float sum = 0.0f;
#pragma clang loop unroll(full)
  for (int k = 0; k < KEYS_EACH; k++) {
    const float weight = weights[k] == MASKED ? 0.0f : metal::fast::exp(weights[k] - best);
    sum += weight;
    scores[row * PITCH + first_of_row + k] = weight;
  }
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    sum += simd_shuffle_xor(sum, ushort(distance));
  }
  const float factor_of_row = metal::fast::exp(maximum - best);
  denominator = denominator * factor_of_row + sum;
  maximum = best;
  if (first_of_row == 0) {
    row_factor[row] = factor_of_row;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

#pragma clang loop unroll(full)
  for (int r = 0; r < ROW_TILES; r++) {
    const float factor = row_factor[r * 8 + matrix_row];
#pragma clang loop unroll(full)
    for (int i = 0; i < PAIRS_EACH * 2; i++) {
      acc[r * PAIRS_EACH * 2 + i].thread_elements()[0] *= factor;
      acc[r * PAIRS_EACH * 2 + i].thread_elements()[1] *= factor;
    }
  }
#pragma clang loop unroll(full)
  for (int eight = 0; eight < KEYS; eight += 8) {
    simdgroup_float8x8 of_weights[ROW_TILES];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROW_TILES; r++) {
      const float2 two =
          *(const threadgroup float2*)(scores + (r * 8 + matrix_row) * PITCH + eight + matrix_column);
      of_weights[r].thread_elements()[0] = two[0];
      of_weights[r].thread_elements()[1] = two[1];
    }
    const int of_value = start + eight + matrix_row;
    const bool has_value = of_value >= first_key && of_value < key_end;
    const size_t its_block = has_value ? size_t(table[of_value / BLOCK]) : 0;
    const size_t its_row = ((its_block * KV_HEADS + kv_head) * BLOCK + of_value % BLOCK) * DV;
#pragma clang loop unroll(full)
    for (int p = 0; p < PAIRS_EACH; p++) {
      const int pair = p * SIMDGROUPS + simdgroup;
      if (VALUE_PAIRS % SIMDGROUPS == 0 || pair < VALUE_PAIRS) {
        const int column = pair * 16 + matrix_column * 2;
#ifdef QUANTIZED
        float4 part = float4(0.0f);
        if (has_value && (DV % 16 == 0 || column < DV)) {
          part = dequantized<VALUE_BITS, VALUE_GROUP, DV, 4, 16>(
              values, scales + its_row / DV * SCALES + KEY_SCALES, its_row / DV, pair * 16, matrix_column * 2);
        }
#else
        vec<T, 4> part = vec<T, 4>(static_cast<T>(0.0f));
        if (has_value && (DV % 16 == 0 || column < DV)) {
          part = *(const device vec<T, 4>*)(values + its_row + column);
        }
#endif
#pragma clang loop unroll(full)
        for (int f = 0; f < 2; f++) {
          simdgroup_float8x8 of_values;
          of_values.thread_elements()[0] = static_cast<float>(part[f * 2]);
          of_values.thread_elements()[1] = static_cast<float>(part[f * 2 + 1]);
#pragma clang loop unroll(full)
          for (int r = 0; r < ROW_TILES; r++) {
            const int i = (r * PAIRS_EACH + p) * 2 + f;
            simdgroup_multiply_accumulate(acc[i], of_weights[r], of_values, acc[i]);
          }
        }
      }
    }
  }
}

if (first_of_row == 0) {
  row_max[row] = maximum;
  row_sum[row] = denominator;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

#pragma clang loop unroll(full)
for (int r = 0; r < ROW_TILES; r++) {
  const int of_tile = r * 8 + matrix_row;
  const int in_group = first_in_group + of_tile % HEADS;
  if (of_tile < rows && in_group < GROUP) {
    const int head = kv_head * GROUP + in_group;
    const size_t to = (size_t(item[6] + of_tile / HEADS) * (KV_HEADS * GROUP) + head) * WIDTH;
    float factor = 1.0f;
    float divisor = 1.0f;
    if (!PARTIAL) {
      divisor = row_sum[of_tile];
      if (SINKS) {
        const float sink = static_cast<float>(sinks[head]);
        const float largest = max(row_max[of_tile], sink);
        factor = metal::fast::exp(row_max[of_tile] - largest);
        divisor = divisor * factor + metal::fast::exp(sink - largest);
      }
    }
#pragma clang loop unroll(full)
    for (int p = 0; p < PAIRS_EACH; p++) {
      const int column = (p * SIMDGROUPS + simdgroup) * 16 + matrix_column * 2;
      if (column < DV) {
        vec<O, 4> part = vec<O, 4>(static_cast<O>(0.0f));
#pragma clang loop unroll(full)
        for (int e = 0; e < 4; e++) {
          const float sum = acc[(r * PAIRS_EACH + p) * 2 + e / 2].thread_elements()[e % 2];
          part[e] = static_cast<O>(sum * factor / divisor);
        }
        *(device vec<O, 4>*)(out + to + column) = part;
      }
    }
    if (PARTIAL && simdgroup == 0 && matrix_column == 0) {
      out[to + DV] = static_cast<O>(row_max[of_tile]);
      out[to + DV + 1] = static_cast<O>(row_sum[of_tile]);
      out[to + DV + 2] = static_cast<O>(0.0f);
      out[to + DV + 3] = static_cast<O>(0.0f);
    }
  }
}

if (me == 0 && threadgroup_position_in_grid.y == 0 && threadgroup_position_in_grid.z == 0) {
  done[0] = 1;
}

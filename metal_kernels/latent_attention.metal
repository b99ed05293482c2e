// Attention over the rows of multi-head latent attention with simdgroup matrices: tiles of query rows, which are a few
// tokens with all or some of their heads, against 16 keys at a time. A row of the pool is a key of DK elements, and the
// first DV of them are its value. Causal, with optional window (or if CHUNKED, keys from the last multiple of `window`
// on), softcap and sinks; online softmax in float32. If MUTUAL, queries of an image also see the keys after theirs, up
// to the image's last one.
//
// A threadgroup takes one work item for HEADS query heads: QUERIES tokens x HEADS heads, at most ROWS rows, over a range
// of keys. Its simdgroups share the columns of the keys: a simdgroup reads its own columns of each key of the range once
// from device memory, and has them in registers for both products.
//   scores: a simdgroup multiplies its columns of 16 keys by those of all rows;
//   softmax: 16 threads share a row, each adds what the simdgroups have for one key;
//   values: a simdgroup multiplies all weights by its columns of the 16 values, and keeps the sums in registers.
//
// The lanes fill their elements of a matrix themselves, as in matrix_attention.metal: a lane loads four neighbouring
// elements of a key, two for each of a pair of matrices. Column j of matrix f of a pair is element
// `j / 2 * 4 + f * 2 + j % 2` of 16. Pairs of a value's columns come first, then those of a key's rotary part.
//
// Slots outside the range are zero instead of being read: a product of a weight of zero and a NaN would be a NaN. A NaN
// in a row that one query of the tile sees reaches all its queries, which are of the same sequence.
//
// queries [T, GROUP, DV]: their latents; q_pe [T, GROUP, DK - DV]: their rotary part times `scale`; rows: the pool,
// [blocks, 1, BLOCK, DK]; block_tables [S, max_blocks]
// items [N, 8]: sequence, first query row, queries, position of the first query, first key, end of keys,
//   first row of `out`, last key of the image that all its queries belong to or 0
// sinks [GROUP] if SINKS; after: token of the last write to the pool
// out [rows, GROUP, DV] of T, or if PARTIAL of float [rows, GROUP, DV + 4]: the weighted sum of values before division,
//   the maximum of the scores, the denominator, 0, 0. done [1]: the token
//
// grid (THREADS, HEAD_TILES, N), threadgroup (THREADS, 1, 1)
constexpr int SIMDGROUPS = THREADS / 32;
constexpr int KEYS = 16;
constexpr int ROW_TILES = ROWS / 8;
constexpr int KEY_TILES = KEYS / 8;
constexpr int VALUE_PAIRS = (DV + 15) / 16;
constexpr int PAIRS = VALUE_PAIRS + (DK - DV + 15) / 16;
constexpr int PAIRS_EACH = (PAIRS + SIMDGROUPS - 1) / SIMDGROUPS;
constexpr int PITCH = ROWS + 2;  // 16 keys of two rows are in 32 banks
constexpr int WEIGHT_PITCH = KEYS + 4;  // eight keys of four rows are in 32 banks
constexpr int WIDTH = PARTIAL ? DV + 4 : DV;
constexpr float MASKED = -3.402823466e+38f;  // finite, so that differences of two maxima are finite

threadgroup float2 partial_scores[SIMDGROUPS * KEYS * PITCH / 2];
threadgroup float2 weight_tile[ROWS * WEIGHT_PITCH / 2];
threadgroup float row_factor[ROWS];
threadgroup float row_max[ROWS];
threadgroup float row_sum[ROWS];

const int me = int(thread_index_in_threadgroup);
const int lane = int(thread_index_in_simdgroup);
const int simdgroup = int(simdgroup_index_in_threadgroup);
const int matrix_row = (lane / 4 & 4) + lane / 2 % 4;  // of the two elements that the lane holds
const int matrix_column = (lane / 4 & 2) * 2 + lane % 2 * 2;
const int first_head = int(threadgroup_position_in_grid.y) * HEADS;
threadgroup float* weights = (threadgroup float*)weight_tile;

const device int* item = items + size_t(threadgroup_position_in_grid.z) * 8;
const auto table = block_tables + size_t(item[0]) * block_tables_shape[1];
const int first_query = item[1];
const int used_rows = item[2] * HEADS;
const int first_position = item[3];
const int first_key = item[4];
const int key_end = item[5];

int first_column[PAIRS_EACH];  // of the lane's four in each pair, or -1
vec<T, 2> query_part[PAIRS_EACH * 2 * ROW_TILES];
#pragma clang loop unroll(full)
for (int p = 0; p < PAIRS_EACH; p++) {
  const int pair = p * SIMDGROUPS + simdgroup;
  const int start_of_pair = pair < VALUE_PAIRS ? pair * 16 : DV + (pair - VALUE_PAIRS) * 16;
  const int end_of_pair = pair < VALUE_PAIRS ? DV : DK;
  first_column[p] = start_of_pair + matrix_column * 2 < end_of_pair ? start_of_pair + matrix_column * 2 : -1;
#pragma clang loop unroll(full)
  for (int f = 0; f < 2; f++) {
    const int column = start_of_pair + matrix_row / 2 * 4 + f * 2 + matrix_row % 2;
#pragma clang loop unroll(full)
    for (int r = 0; r < ROW_TILES; r++) {
      vec<T, 2> two = vec<T, 2>(static_cast<T>(0.0f));
#pragma clang loop unroll(full)
      for (int e = 0; e < 2; e++) {
        const int row = r * 8 + matrix_column + e;
        const int head = first_head + row % HEADS;
        if (row < used_rows && head < GROUP && column < end_of_pair) {
          const size_t of_query = size_t(first_query + row / HEADS) * GROUP + head;
          two[e] = column < DV ? queries[of_query * DV + column]
                               : static_cast<T>(q_pe[of_query * (DK - DV) + column - DV] / scale);
        }
      }
      query_part[(p * 2 + f) * ROW_TILES + r] = two;
    }
  }
}

const int my_row = me / KEYS;  // whose softmax the thread shares
const int my_key = me % KEYS;
const int here = first_position + my_row / HEADS;
const int first_visible = max(first_key, CHUNKED ? here / window * window : here - window + 1);
const int last_visible = MUTUAL ? max(here, item[7]) : here;
const int end_visible = my_row < used_rows ? min(key_end, last_visible + 1) : 0;
float maximum = MASKED;
float denominator = 0.0f;

simdgroup_float8x8 acc[ROW_TILES * PAIRS_EACH * 2];
#pragma clang loop unroll(full)
for (int i = 0; i < ROW_TILES * PAIRS_EACH * 2; i++) {
  acc[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

for (int start = first_key / KEYS * KEYS; start < key_end; start += KEYS) {
  vec<T, 4> part[KEY_TILES * PAIRS_EACH];
#pragma clang loop unroll(full)
  for (int k = 0; k < KEY_TILES; k++) {
    const int key = start + k * 8 + matrix_row;
    const bool has_key = key >= first_key && key < key_end;
    const size_t block = has_key ? size_t(table[key / BLOCK]) : 0;
    const size_t at = (block * BLOCK + key % BLOCK) * DK;
    simdgroup_float8x8 products[ROW_TILES];
#pragma clang loop unroll(full)
    for (int r = 0; r < ROW_TILES; r++) {
      products[r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
#pragma clang loop unroll(full)
    for (int p = 0; p < PAIRS_EACH; p++) {
      part[k * PAIRS_EACH + p] = vec<T, 4>(static_cast<T>(0.0f));
      if (has_key && first_column[p] >= 0) {
        part[k * PAIRS_EACH + p] = *(const device vec<T, 4>*)(rows + at + first_column[p]);
      }
#pragma clang loop unroll(full)
      for (int f = 0; f < 2; f++) {
        simdgroup_matrix<T, 8, 8> of_keys;
        of_keys.thread_elements()[0] = part[k * PAIRS_EACH + p][f * 2];
        of_keys.thread_elements()[1] = part[k * PAIRS_EACH + p][f * 2 + 1];
#pragma clang loop unroll(full)
        for (int r = 0; r < ROW_TILES; r++) {
          const vec<T, 2> two = query_part[(p * 2 + f) * ROW_TILES + r];
          simdgroup_matrix<T, 8, 8> of_queries;
          of_queries.thread_elements()[0] = two[0];
          of_queries.thread_elements()[1] = two[1];
          simdgroup_multiply_accumulate(products[r], of_keys, of_queries, products[r]);
        }
      }
    }
#pragma clang loop unroll(full)
    for (int r = 0; r < ROW_TILES; r++) {
      partial_scores[((simdgroup * KEYS + k * 8 + matrix_row) * PITCH + r * 8 + matrix_column) / 2] =
          float2(products[r].thread_elements()[0], products[r].thread_elements()[1]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (my_row < ROWS) {
    const int position = start + my_key;
    float score = MASKED;
    if (position >= first_visible && position < end_visible) {
      score = 0.0f;
      for (int s = 0; s < SIMDGROUPS; s++) {
        score += ((const threadgroup float*)partial_scores)[(s * KEYS + my_key) * PITCH + my_row];
      }
      score *= scale;
      if (SOFTCAP) {
        score = softcap * metal::precise::tanh(score / softcap);
      }
    }
    float best = max(maximum, score);
    for (int distance = KEYS / 2; distance > 0; distance /= 2) {
      best = max(best, simd_shuffle_xor(best, ushort(distance)));
    }
    const float weight = score == MASKED ? 0.0f : metal::fast::exp(score - best);
    float sum = weight;
    for (int distance = KEYS / 2; distance > 0; distance /= 2) {
      sum += simd_shuffle_xor(sum, ushort(distance));
    }
    const float factor_of_row = metal::fast::exp(maximum - best);
    denominator = denominator * factor_of_row + sum;
    maximum = best;
    weights[my_row * WEIGHT_PITCH + my_key] = weight;
    if (my_key == 0) {
      row_factor[my_row] = factor_of_row;
    }
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
#pragma clang loop unroll(full)
    for (int k = 0; k < KEY_TILES; k++) {
      const float2 two = weight_tile[((r * 8 + matrix_row) * WEIGHT_PITCH + k * 8 + matrix_column) / 2];
      simdgroup_float8x8 of_weights;
      of_weights.thread_elements()[0] = two[0];
      of_weights.thread_elements()[1] = two[1];
#pragma clang loop unroll(full)
      for (int p = 0; p < PAIRS_EACH; p++) {
        if (p * SIMDGROUPS + simdgroup < VALUE_PAIRS) {
#pragma clang loop unroll(full)
          for (int f = 0; f < 2; f++) {
            simdgroup_float8x8 of_values;
            of_values.thread_elements()[0] = static_cast<float>(part[k * PAIRS_EACH + p][f * 2]);
            of_values.thread_elements()[1] = static_cast<float>(part[k * PAIRS_EACH + p][f * 2 + 1]);
            const int i = (r * PAIRS_EACH + p) * 2 + f;
            simdgroup_multiply_accumulate(acc[i], of_weights, of_values, acc[i]);
          }
        }
      }
    }
  }
}

if (my_row < ROWS && my_key == 0) {
  row_max[my_row] = maximum;
  row_sum[my_row] = denominator;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

#pragma clang loop unroll(full)
for (int r = 0; r < ROW_TILES; r++) {
  const int row = r * 8 + matrix_row;
  const int head = first_head + row % HEADS;
  if (row < used_rows && head < GROUP) {
    const size_t to = (size_t(item[6] + row / HEADS) * GROUP + head) * WIDTH;
    float factor = 1.0f;
    float divisor = 1.0f;
    if (!PARTIAL) {
      divisor = row_sum[row];
      if (SINKS) {
        const float sink = static_cast<float>(sinks[head]);
        const float largest = max(row_max[row], sink);
        factor = metal::fast::exp(row_max[row] - largest);
        divisor = divisor * factor + metal::fast::exp(sink - largest);
      }
    }
#pragma clang loop unroll(full)
    for (int p = 0; p < PAIRS_EACH; p++) {
      if (first_column[p] >= 0 && first_column[p] < DV) {
        vec<O, 4> result = vec<O, 4>(static_cast<O>(0.0f));
#pragma clang loop unroll(full)
        for (int e = 0; e < 4; e++) {
          const float sum = acc[(r * PAIRS_EACH + p) * 2 + e / 2].thread_elements()[e % 2];
          result[e] = static_cast<O>(sum * factor / divisor);
        }
        *(device vec<O, 4>*)(out + to + first_column[p]) = result;
      }
    }
    if (PARTIAL && simdgroup == 0 && matrix_column == 0) {
      out[to + DV] = static_cast<O>(row_max[row]);
      out[to + DV + 1] = static_cast<O>(row_sum[row]);
      out[to + DV + 2] = static_cast<O>(0.0f);
      out[to + DV + 3] = static_cast<O>(0.0f);
    }
  }
}

if (me == 0 && threadgroup_position_in_grid.y == 0 && threadgroup_position_in_grid.z == 0) {
  done[0] = 1;
}

// Copies the keys and values of one sequence out of its blocks into contiguous arrays, head by head, for MLX's own
// attention.
//
// key_pool, value_pool [blocks, KV_HEADS, BLOCK, DK or DV]; blocks [n]: the sequence's, in order; after: token of the
// last write to the pools
// keys, values [KV_HEADS, N, DK or DV], N <= n * BLOCK; DV = 0: values [1] is zero; done [1]: the token
// If QUANTIZED, the pools are packed, and scales are as in kv_quantize.metal.
//
// grid (max(DK, DV) / 4, N, KV_HEADS), threadgroup (max(DK, DV) / 4, up to 8, 1): a thread moves four elements of each
const size_t column = thread_position_in_grid.x * 4;
const size_t key = thread_position_in_grid.y;
const size_t kv_head = thread_position_in_grid.z;
const size_t from = (size_t(blocks[key / BLOCK]) * KV_HEADS + kv_head) * BLOCK + key % BLOCK;
const size_t to = kv_head * threads_per_grid.y + key;
#ifdef QUANTIZED
const device T* of_row = scales + from * SCALES;
if (column < DK) {
  const float4 part = dequantized<KEY_BITS, KEY_GROUP, DK, 4, DK>(key_pool, of_row, from, 0, int(column));
  for (int e = 0; e < 4; e++) {
    keys[to * DK + column + e] = static_cast<T>(part[e]);
  }
}
if (column < DV) {
  const float4 part =
      dequantized<VALUE_BITS, VALUE_GROUP, DV, 4, DV>(value_pool, of_row + KEY_SCALES, from, 0, int(column));
  for (int e = 0; e < 4; e++) {
    values[to * DV + column + e] = static_cast<T>(part[e]);
  }
}
#else
if (column < DK) {
  *(device vec<T, 4>*)(keys + to * DK + column) = *(const device vec<T, 4>*)(key_pool + from * DK + column);
}
if (column < DV) {
  *(device vec<T, 4>*)(values + to * DV + column) = *(const device vec<T, 4>*)(value_pool + from * DV + column);
}
#endif
if (column == 0 && key == 0 && kv_head == 0) {
  done[0] = 1;
  if (DV == 0) {
    values[0] = static_cast<T>(0.0f);
  }
}

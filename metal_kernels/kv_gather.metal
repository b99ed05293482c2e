// Copies the keys and values of one sequence out of its blocks into contiguous arrays, head by head, for MLX's own
// attention.
//
// key_pool, value_pool [blocks, KV_HEADS, BLOCK, DK or DV]; blocks [n]: the sequence's, in order; after: token of the
// last write to the pools
// keys, values [KV_HEADS, N, DK or DV], N <= n * BLOCK; DV = 0: values [1] is zero; done [1]: the token
//
// grid (max(DK, DV) / 4, N, KV_HEADS), threadgroup (max(DK, DV) / 4, up to 8, 1): a thread moves four elements of each
const size_t column = thread_position_in_grid.x * 4;
const size_t key = thread_position_in_grid.y;
const size_t kv_head = thread_position_in_grid.z;
const size_t from = (size_t(blocks[key / BLOCK]) * KV_HEADS + kv_head) * BLOCK + key % BLOCK;
const size_t to = kv_head * threads_per_grid.y + key;
if (column < DK) {
  *(device vec<T, 4>*)(keys + to * DK + column) = *(const device vec<T, 4>*)(key_pool + from * DK + column);
}
if (column < DV) {
  *(device vec<T, 4>*)(values + to * DV + column) = *(const device vec<T, 4>*)(value_pool + from * DV + column);
}
if (column == 0 && key == 0 && kv_head == 0) {
  done[0] = 1;
  if (DV == 0) {
    values[0] = static_cast<T>(0.0f);
  }
}

// Copies the keys and values of one sequence out of its blocks into contiguous arrays, head by head, for MLX's own
// attention.
//
// key_pool, value_pool [blocks, KV_HEADS, BLOCK, D]; blocks [n]: the sequence's, in order; after: token of the last
// write to the pools
// keys, values [KV_HEADS, N, D], N <= n * BLOCK; done [1]: the token
//
// grid (D / 4, N, KV_HEADS), threadgroup (D / 4, up to 8, 1): a thread moves four elements of each
const size_t column = thread_position_in_grid.x * 4;
const size_t key = thread_position_in_grid.y;
const size_t kv_head = thread_position_in_grid.z;
const size_t from = ((size_t(blocks[key / BLOCK]) * KV_HEADS + kv_head) * BLOCK + key % BLOCK) * D + column;
const size_t to = (kv_head * threads_per_grid.y + key) * D + column;
*(device vec<T, 4>*)(keys + to) = *(const device vec<T, 4>*)(key_pool + from);
*(device vec<T, 4>*)(values + to) = *(const device vec<T, 4>*)(value_pool + from);
if (column == 0 && key == 0 && kv_head == 0) {
  done[0] = 1;
}

// Copies whole blocks out of the pools, for swap and disk.
//
// key_pool, value_pool [blocks, SIZE] with SIZE = KV heads * block size * head size; blocks [n]; after: token of the
// last kernel that touched the pools
// keys, values [n, SIZE]; done [1]: the token
//
// grid (SIZE / 4, n, 1), threadgroup (up to 256, 1, 1): a thread moves four elements of each
const size_t element = thread_position_in_grid.x * 4;
const size_t row = thread_position_in_grid.y;
const size_t from = size_t(blocks[row]) * SIZE + element;
const size_t to = row * SIZE + element;
*(device vec<T, 4>*)(keys + to) = *(const device vec<T, 4>*)(key_pool + from);
*(device vec<T, 4>*)(values + to) = *(const device vec<T, 4>*)(value_pool + from);
if (element == 0 && row == 0) {
  done[0] = 1;
}

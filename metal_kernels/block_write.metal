// Overwrites whole blocks of the pools, in place. It is the inverse of block_read.
//
// keys, values [n, SIZE] with SIZE = KV heads * block size * head size; blocks [n], all different; key_pool, value_pool
// [blocks, SIZE]; after: token of the last kernel that touched the pools
// done [1]: the token
//
// grid (SIZE / 4, n, 1), threadgroup (up to 256, 1, 1): a thread moves four elements of each
const size_t element = thread_position_in_grid.x * 4;
const size_t row = thread_position_in_grid.y;
const size_t from = row * SIZE + element;
const size_t to = size_t(blocks[row]) * SIZE + element;
*(device vec<T, 4>*)(const_cast<device T*>(key_pool) + to) = *(const device vec<T, 4>*)(keys + from);
*(device vec<T, 4>*)(const_cast<device T*>(value_pool) + to) = *(const device vec<T, 4>*)(values + from);
if (element == 0 && row == 0) {
  done[0] = 1;
}

// Overwrites whole blocks of the pools, in place. It is the inverse of block_read.
//
// keys, values [n, KEYS or VALUES]: elements of a block, KV heads * block size * head size; VALUES = 0: only keys are
// written; blocks [n], all different; key_pool, value_pool [blocks, KEYS or VALUES]; after: token of the last kernel that
// touched the pools
// done [1]: the token
//
// grid (max(KEYS, VALUES) / 4, n, 1), threadgroup (up to 256, 1, 1): a thread moves four elements of each
const size_t element = thread_position_in_grid.x * 4;
const size_t row = thread_position_in_grid.y;
const size_t to = size_t(blocks[row]);
if (element < KEYS) {
  *(device vec<T, 4>*)(const_cast<device T*>(key_pool) + to * KEYS + element) =
      *(const device vec<T, 4>*)(keys + row * KEYS + element);
}
if (element < VALUES) {
  *(device vec<T, 4>*)(const_cast<device T*>(value_pool) + to * VALUES + element) =
      *(const device vec<T, 4>*)(values + row * VALUES + element);
}
if (element == 0 && row == 0) {
  done[0] = 1;
}

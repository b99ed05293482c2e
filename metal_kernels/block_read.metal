// Copies whole blocks out of the pools, for swap and disk.
//
// key_pool, value_pool [blocks, KEYS or VALUES]: elements of a block, KV heads * block size * head size; blocks [n];
// after: token of the last kernel that touched the pools
// keys, values [n, KEYS or VALUES]; VALUES = 0: values [1] is zero; done [1]: the token
//
// grid (max(KEYS, VALUES) / 4, n, 1), threadgroup (up to 256, 1, 1): a thread moves four elements of each
const size_t element = thread_position_in_grid.x * 4;
const size_t row = thread_position_in_grid.y;
const size_t from = size_t(blocks[row]);
if (element < KEYS) {
  *(device vec<T, 4>*)(keys + row * KEYS + element) = *(const device vec<T, 4>*)(key_pool + from * KEYS + element);
}
if (element < VALUES) {
  *(device vec<T, 4>*)(values + row * VALUES + element) =
      *(const device vec<T, 4>*)(value_pool + from * VALUES + element);
}
if (element == 0 && row == 0) {
  done[0] = 1;
  if (VALUES == 0) {
    values[0] = static_cast<T>(0.0f);
  }
}

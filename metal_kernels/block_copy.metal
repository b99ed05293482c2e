// Copies whole blocks onto others within the pools, in place. No block may be both a source and a target.
//
// pairs [n, 2]: source, target; key_pool, value_pool [blocks, KEYS or VALUES]: elements of a block, KV heads * block size
// * head size; VALUES = 0: only keys are copied; after: token of the last kernel that touched the pools
// done [1]: the token
//
// grid (max(KEYS, VALUES) / 4, n, 1), threadgroup (up to 256, 1, 1): a thread moves four elements of each
const size_t element = thread_position_in_grid.x * 4;
const size_t pair = thread_position_in_grid.y;
const size_t from = size_t(pairs[pair * 2]);
const size_t to = size_t(pairs[pair * 2 + 1]);
if (element < KEYS) {
  *(device vec<T, 4>*)(const_cast<device T*>(key_pool) + to * KEYS + element) =
      *(const device vec<T, 4>*)(key_pool + from * KEYS + element);
}
if (element < VALUES) {
  *(device vec<T, 4>*)(const_cast<device T*>(value_pool) + to * VALUES + element) =
      *(const device vec<T, 4>*)(value_pool + from * VALUES + element);
}
if (element == 0 && pair == 0) {
  done[0] = 1;
}

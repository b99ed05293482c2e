// Copies whole blocks onto others within the pools, in place. No block may be both a source and a target.
//
// pairs [n, 2]: source, target; key_pool, value_pool [blocks, SIZE] with SIZE = KV heads * block size * head size;
// after: token of the last kernel that touched the pools
// done [1]: the token
//
// grid (SIZE / 4, n, 1), threadgroup (up to 256, 1, 1): a thread moves four elements of each
const size_t element = thread_position_in_grid.x * 4;
const size_t pair = thread_position_in_grid.y;
const size_t from = size_t(pairs[pair * 2]) * SIZE + element;
const size_t to = size_t(pairs[pair * 2 + 1]) * SIZE + element;
*(device vec<T, 4>*)(const_cast<device T*>(key_pool) + to) = *(const device vec<T, 4>*)(key_pool + from);
*(device vec<T, 4>*)(const_cast<device T*>(value_pool) + to) = *(const device vec<T, 4>*)(value_pool + from);
if (element == 0 && pair == 0) {
  done[0] = 1;
}

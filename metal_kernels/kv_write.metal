// Writes the keys and values of a step's tokens into their slots of the pools, in place: the pools are inputs, and
// their const is cast away. A token with slot -1 is skipped.
//
// new_keys, new_values [T, KV_HEADS, DK or DV]; slot_mapping [T]: block * BLOCK + slot; key_pool, value_pool
// [blocks, KV_HEADS, BLOCK, KEY_PITCH or VALUE_PITCH]: values begin at column VALUE_START, so that latents and k_pe go
// into one pool; after: token of the last kernel that touched the pools
// done [1]: the token
//
// grid (max(DK, DV) / 4, KV_HEADS, T), threadgroup (max(DK, DV) / 4, 1, 1): a thread moves four elements of each
const size_t column = thread_position_in_grid.x * 4;
const size_t kv_head = thread_position_in_grid.y;
const size_t token = thread_position_in_grid.z;
const int slot = slot_mapping[token];
if (slot >= 0) {
  const size_t from = token * KV_HEADS + kv_head;
  const size_t to = (size_t(slot / BLOCK) * KV_HEADS + kv_head) * BLOCK + slot % BLOCK;
  if (column < DK) {
    *(device vec<T, 4>*)(const_cast<device T*>(key_pool) + to * KEY_PITCH + column) =
        *(const device vec<T, 4>*)(new_keys + from * DK + column);
  }
  if (column < DV) {
    *(device vec<T, 4>*)(const_cast<device T*>(value_pool) + to * VALUE_PITCH + VALUE_START + column) =
        *(const device vec<T, 4>*)(new_values + from * DV + column);
  }
}
if (column == 0 && kv_head == 0 && token == 0) {
  done[0] = 1;
}

// Quantizes the keys and values of a step's tokens and writes them into their slots of the pools, in place: the pools
// are inputs, and their const is cast away. A token with slot -1 is skipped.
//
// new_keys, new_values [T, KV_HEADS, DK or DV]; slot_mapping [T]: block * BLOCK + slot; key_pool, value_pool: quantized
// rows of DK or DV elements, [blocks, KV_HEADS, BLOCK, ..]; scales [blocks, KV_HEADS, BLOCK, SCALES]: those of the key,
// then from KEY_SCALES on those of the value; after: token of the last kernel that touched the pools
// done [1]: the token
//
// grid (32, KV_HEADS, T), threadgroup (32, 1, 1): a simdgroup has one head of one token
const int lane = int(thread_position_in_grid.x);
const size_t kv_head = thread_position_in_grid.y;
const size_t token = thread_position_in_grid.z;
const int slot = slot_mapping[token];
if (slot >= 0) {
  const size_t from = token * KV_HEADS + kv_head;
  const size_t row = (size_t(slot / BLOCK) * KV_HEADS + kv_head) * BLOCK + slot % BLOCK;
  device T* of_row = const_cast<device T*>(scales) + row * SCALES;
  quantize<KEY_BITS, KEY_GROUP, DK>(
      new_keys + from * DK, (device uint*)key_pool + row * DK * KEY_BITS / 32, of_row, lane);
  quantize<VALUE_BITS, VALUE_GROUP, DV>(
      new_values + from * DV, (device uint*)value_pool + row * DV * VALUE_BITS / 32, of_row + KEY_SCALES, lane);
}
if (lane == 0 && kv_head == 0 && token == 0) {
  done[0] = 1;
}

/* SIMD-group operations: every lane lays down its value, and the meeting hands out the results.
 * Lanes that an edge threadgroup lacks take no part; reading from one is an error. */
#include "runtime.h"

#include <string.h>

enum { /* as in msl/metal_simdgroup */
  SUM, PRODUCT, MIN, MAX, AND, OR, XOR, INCLUSIVE_SUM, EXCLUSIVE_SUM, INCLUSIVE_PRODUCT, EXCLUSIVE_PRODUCT,
  SHUFFLE, SHUFFLE_XOR, SHUFFLE_UP, SHUFFLE_DOWN, ROTATE_UP, ROTATE_DOWN, FILL_UP, FILL_DOWN,
  BROADCAST, BROADCAST_FIRST, BALLOT, MATMUL, CONVERGE,
};
static const char *const names[] = {
  "simd_sum", "simd_product", "simd_min", "simd_max", "simd_and", "simd_or", "simd_xor",
  "simd_prefix_inclusive_sum", "simd_prefix_exclusive_sum",
  "simd_prefix_inclusive_product", "simd_prefix_exclusive_product",
  "simd_shuffle", "simd_shuffle_xor", "simd_shuffle_up", "simd_shuffle_down",
  "simd_shuffle_rotate_up", "simd_shuffle_rotate_down", "simd_shuffle_and_fill_up", "simd_shuffle_and_fill_down",
  "simd_broadcast", "simd_broadcast_first", "simd_ballot", "simdgroup_multiply_accumulate", "simdgroup_load or _store",
};

/* The reduction of a full simdgroup is a tree, so that its rounding differs from a sum in order. */
#define DEFINE_REDUCTION(T, suffix, BITWISE) \
  static T combine_##suffix(int op, T a, T b) { \
    switch (op) { \
      case SUM: case INCLUSIVE_SUM: case EXCLUSIVE_SUM: return a + b; \
      case PRODUCT: case INCLUSIVE_PRODUCT: case EXCLUSIVE_PRODUCT: return a * b; \
      case MIN: return a != a || b < a ? b : a; \
      case MAX: return a != a || a < b ? b : a; \
      BITWISE \
      default: return a; \
    } \
  } \
  T mc_simd_##suffix(int op, T x, int line) { \
    mc_simdgroup *s = mc_my_simdgroup(); \
    const uint32_t parity = s->parity, lane = mc_self->lane; \
    uint32_t(*slots)[4] = s->slots[parity]; \
    T r; \
    memcpy(slots[lane], &x, sizeof x); \
    if (mc_simd_arrive(op, __builtin_return_address(0), line, names[op])) { \
      if (op <= XOR) { \
        T tree[MC_LANES]; \
        for (uint32_t i = 0; i < s->lanes; i++) memcpy(&tree[i], slots[i], sizeof r); \
        for (uint32_t n = s->lanes; n > 1; n = (n + 1) / 2) { \
          for (uint32_t i = 0; i < n / 2; i++) tree[i] = combine_##suffix(op, tree[2 * i], tree[2 * i + 1]); \
          if (n % 2) tree[n / 2] = tree[n - 1]; \
        } \
        memcpy(&s->result[parity], tree, sizeof r); \
      } \
      mc_simd_release(); \
    } \
    if (op <= XOR) { \
      memcpy(&r, &s->result[parity], sizeof r); \
      return r; \
    } \
    const int inclusive = op == INCLUSIVE_SUM || op == INCLUSIVE_PRODUCT; \
    r = op == INCLUSIVE_SUM || op == EXCLUSIVE_SUM ? 0 : 1; \
    for (uint32_t i = 0; i < lane + (inclusive ? 1u : 0u); i++) { \
      T y; \
      memcpy(&y, slots[i], sizeof y); \
      r = combine_##suffix(op, r, y); \
    } \
    return r; \
  }
#define BITWISE_CASES case AND: return a & b; case OR: return a | b; case XOR: return a ^ b;
DEFINE_REDUCTION(float, float, )
DEFINE_REDUCTION(int32_t, int, BITWISE_CASES)
DEFINE_REDUCTION(uint32_t, uint, BITWISE_CASES)

uint32_t mc_simd_move(int op, uint32_t bits, uint32_t fill, uint32_t argument, uint32_t width, int line) {
  mc_simdgroup *s = mc_my_simdgroup();
  uint32_t(*slots)[4] = s->slots[s->parity];
  const uint32_t lane = mc_self->lane;
  slots[lane][0] = bits;
  slots[lane][1] = fill;
  slots[lane][2] = argument;
  if (mc_simd_arrive(op, __builtin_return_address(0), line, names[op])) mc_simd_release();
  uint32_t source = lane, word = 0;
  const uint32_t base = lane / width * width, within = lane % width;
  switch (op) {
    case BROADCAST:
      if (argument != slots[0][2])
        mc_fail(MC_DIVERGENCE, NULL, -1, "simd_broadcast (line %d) of different lanes: %u here, %u in lane 0", line,
                argument, slots[0][2]);
      source = argument;
      break;
    case SHUFFLE: source = argument; break;
    case BROADCAST_FIRST: source = 0; break;
    case SHUFFLE_XOR: source = lane ^ argument; break;
    case SHUFFLE_UP: source = argument > lane ? lane : lane - argument; break;
    case SHUFFLE_DOWN: source = lane + argument >= MC_LANES ? lane : lane + argument; break;
    case ROTATE_UP: source = (lane - argument) % MC_LANES; break;
    case ROTATE_DOWN: source = (lane + argument) % MC_LANES; break;
    case FILL_UP:
      word = within < argument;
      source = base + (within + width - argument % width) % width;
      break;
    case FILL_DOWN:
      word = within + argument >= width;
      source = base + (within + argument) % width;
      break;
  }
  if (source >= s->lanes)
    mc_fail(MC_DIVERGENCE, NULL, -1, "%s (line %d) reads lane %u of a simdgroup with %u lanes", names[op], line, source,
            s->lanes);
  return slots[source][word];
}

uint64_t mc_simd_vote(int op, _Bool x, int line) {
  mc_simdgroup *s = mc_my_simdgroup();
  const uint32_t parity = s->parity;
  s->slots[parity][mc_self->lane][0] = x;
  if (mc_simd_arrive(op, __builtin_return_address(0), line, names[op])) {
    s->result[parity] = 0;
    for (uint32_t i = 0; i < s->lanes; i++) s->result[parity] |= s->slots[parity][i][0] << i;
    mc_simd_release();
  }
  return s->result[parity];
}

void mc_simd_converge(int line) {
  if (mc_simd_arrive(CONVERGE, __builtin_return_address(0), line, names[CONVERGE])) mc_simd_release();
}

static uint32_t lane_of(uint32_t row, uint32_t column) { /* the inverse of msl/metal_simdgroup_matrix */
  return (row & 4) * 4 + (column & 4) * 2 + (row & 3) * 2 + (column & 2) / 2;
}

/* The two elements of the product that the lane holds. */
uint64_t mc_simd_matmul(float a0, float a1, float b0, float b1, int line) {
  mc_simdgroup *s = mc_my_simdgroup();
  uint32_t(*slots)[4] = s->slots[s->parity];
  const uint32_t lane = mc_self->lane;
  const float brought[4] = {a0, a1, b0, b1};
  float product[2];
  uint64_t bits;
  if (s->lanes != MC_LANES)
    mc_fail(MC_DIVERGENCE, NULL, -1, "simdgroup_multiply_accumulate (line %d) in a simdgroup of %u lanes", line,
            s->lanes);
  memcpy(slots[lane], brought, sizeof brought);
  if (mc_simd_arrive(MATMUL, __builtin_return_address(0), line, names[MATMUL])) mc_simd_release();
  const uint32_t row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  for (uint32_t i = 0; i < 2; i++) {
    float sum = 0;
    for (uint32_t k = 0; k < 8; k++) {
      float x, y;
      memcpy(&x, &slots[lane_of(row, k)][k % 2], 4);
      memcpy(&y, &slots[lane_of(k, column)][2 + i], 4);
      sum += x * y;
    }
    product[i] = sum;
  }
  memcpy(&bits, product, sizeof bits);
  return bits;
}

/* Shadow memory: per cell the last store and the last loads, as stamps, and whether a new access races with them.
 *
 * A stamp says which thread touched the cell and how many barriers its threadgroup and its simdgroup had passed.
 * Two accesses of one threadgroup are ordered if a threadgroup_barrier lies between, or, inside a simdgroup, any
 * barrier; accesses of different threadgroups are never ordered. So the schedule does not decide whether a race is found. */
#ifndef MC_SHADOW_H
#define MC_SHADOW_H

#include <stdint.h>

#include "runtime.h"

typedef struct {
  uint64_t stored, loaded;
} cell;

/* A stamp: barriers that the simdgroup passed (bits 0-15) and that the threadgroup passed (16-31), the thread's index
 * (32-41), how many share the stamp (42-43), whether the access was atomic (44), the threadgroup's serial (45-63).
 * Epochs wrap around; a race over exactly 65,536 barriers would be reported wrongly. */
#define STAMP(serial, thread, group_epoch, simd_epoch) \
  ((uint64_t)(serial) << 45 | (uint64_t)(thread) << 32 | (uint64_t)(group_epoch) << 16 | (uint64_t)(simd_epoch))
#define SPREAD_SHIFT 42u
#define SPREAD_MASK (3ull << SPREAD_SHIFT)
enum { ONE_THREAD, ONE_SIMDGROUP, ONE_GROUP, MANY_GROUPS };
#define ATOMIC (1ull << 44)
#define SERIAL(stamp) ((stamp) >> 45)
#define THREAD(stamp) ((uint32_t)((stamp) >> 32) & 1023u)
#define GROUP_EPOCH(stamp) ((uint16_t)((stamp) >> 16))
#define SIMD_EPOCH(stamp) ((uint16_t)(stamp))
#define SPREAD(stamp) ((uint32_t)((stamp) >> SPREAD_SHIFT) & 3u)

/* Is what `old` stamped ordered before an access stamped `now`? Both lie in one launch; for threadgroup memory
 * also in one threadgroup. */
static inline int ordered(uint64_t old, uint64_t now) {
  if (SERIAL(old) != SERIAL(now) || SPREAD(old) == MANY_GROUPS) return 0;
  if (GROUP_EPOCH(old) != GROUP_EPOCH(now)) return 1;
  if (SPREAD(old) == ONE_GROUP) return 0;
  if (THREAD(old) / MC_LANES != THREAD(now) / MC_LANES) return 0;
  if (SPREAD(old) == ONE_THREAD && THREAD(old) == THREAD(now)) return 1;
  return SIMD_EPOCH(old) != SIMD_EPOCH(now);
}

/* The stamp that stands for both: `old`, if not ordered before `now`, must still be seen by later accesses. It is
 * atomic only if both are. */
static inline uint64_t join(uint64_t old, uint64_t now) {
  if (!old) return now;
  uint64_t spread = ONE_SIMDGROUP;
  if (SERIAL(old) != SERIAL(now) || SPREAD(old) == MANY_GROUPS) {
    spread = MANY_GROUPS;
  } else {
    if (GROUP_EPOCH(old) != GROUP_EPOCH(now)) return now;
    if (SPREAD(old) == ONE_GROUP || THREAD(old) / MC_LANES != THREAD(now) / MC_LANES) {
      spread = ONE_GROUP;
    } else {
      if (SPREAD(old) == ONE_THREAD && THREAD(old) == THREAD(now)) spread = ONE_THREAD;
      if (SIMD_EPOCH(old) != SIMD_EPOCH(now)) return now;
    }
  }
  return (now & ~ATOMIC) | (old & now & ATOMIC) | spread << SPREAD_SHIFT;
}

enum conflict { NONE, WITH_STORE, WITH_LOAD };

static inline enum conflict touch(cell *c, uint64_t now, int store) {
  if (!store) {
    if (c->loaded == now) return NONE; /* a later store would have found this load */
    if (c->stored && !ordered(c->stored, now) && !(c->stored & now & ATOMIC)) return WITH_STORE;
    c->loaded = join(c->loaded, now);
    return NONE;
  }
  if (c->stored == now && (c->loaded == now || !c->loaded)) return NONE;
  if (c->stored && !ordered(c->stored, now)) {
    if (!(c->stored & now & ATOMIC)) return WITH_STORE;
    now = join(c->stored, now);
  }
  if (c->loaded && !ordered(c->loaded, now) && !(c->loaded & now & ATOMIC)) return WITH_LOAD;
  c->stored = now;
  return NONE;
}

#endif

/* What compiled kernels call without having written it: clang puts a call before every load and store
 * (-fsanitize=thread), where an array index or a division goes wrong (-fsanitize=...), and for conversions that the
 * processor lacks. The atomics of msl/metal_atomic are here too. */
#include "runtime.h"
#include "shadow.h"

#include <string.h>

static void aligned(uint64_t p, uint32_t n, const char *what) {
  if (p % n) {
    int64_t index;
    const char *name = mc_nearest_buffer(p, &index);
    mc_fail(MC_MISALIGNED, name, index, "%s of %u bytes at an address that is not a multiple of %u", what, n, n);
  }
}

/* clang's -fsanitize=thread puts a call to one of these before every load and store. The `unaligned` ones are for
 * accesses whose type asks for less alignment than its size (packed vectors). */
#define HERE() (mc_accessed_at = (uint64_t)(uintptr_t)__builtin_return_address(0))
#define DEFINE_HOOKS(n) \
  void __tsan_read##n(uint64_t p) { \
    HERE(); \
    if (p % n) aligned(p, n, "load"); \
    mc_access(p, n, 0, 0); \
  } \
  void __tsan_write##n(uint64_t p) { \
    HERE(); \
    if (p % n) aligned(p, n, "store"); \
    mc_access(p, n, 1, 0); \
  } \
  void __tsan_unaligned_read##n(uint64_t p) { \
    HERE(); \
    mc_access(p, n, 0, 0); \
  } \
  void __tsan_unaligned_write##n(uint64_t p) { \
    HERE(); \
    mc_access(p, n, 1, 0); \
  }
DEFINE_HOOKS(1)
DEFINE_HOOKS(2)
DEFINE_HOOKS(4)
DEFINE_HOOKS(8)
DEFINE_HOOKS(16)

void __tsan_init(void) {}

static void range(uint64_t p, uint64_t n, int store) {
  for (uint64_t i = 0; i < n;) { /* by 4 where it can be, so that elements are counted and stamped once */
    const uint32_t step = n - i >= 4 && (p + i) % 4 == 0 ? 4 : n - i >= 2 && (p + i) % 2 == 0 ? 2 : 1;
    mc_access(p + i, step, store, 0);
    i += step;
  }
}
void *__tsan_memcpy(void *to, const void *from, uint64_t n) {
  HERE();
  range((uint64_t)(uintptr_t)from, n, 0);
  range((uint64_t)(uintptr_t)to, n, 1);
  return memmove(to, from, n);
}
void *__tsan_memmove(void *, const void *, uint64_t) __attribute__((alias("__tsan_memcpy")));
void *__tsan_memset(void *to, int value, uint64_t n) {
  HERE();
  range((uint64_t)(uintptr_t)to, n, 1);
  return memset(to, value, n);
}

/* ---- atomics (msl/metal_atomic) ---- */

enum { LOAD, STORE, UPDATE };
void mc_atomic_access(uint64_t p, uint32_t n, int what) {
  if (!mc_now->checked) return;
  HERE();
  aligned(p, n, "atomic access");
  if (what != STORE) mc_access(p, n, 0, ATOMIC);
  if (what != LOAD) mc_access(p, n, 1, ATOMIC);
}
uint32_t mc_raw_load(uint64_t p) { return *(uint32_t *)(uintptr_t)p; }
void mc_raw_store(uint64_t p, uint32_t value) { *(uint32_t *)(uintptr_t)p = value; }

/* ---- clang's other checks: static array bounds and integer division ---- */

typedef struct {
  const char *file;
  uint32_t line, column;
} source_location;
static void bad_index(const source_location *at, uint64_t index) {
  mc_fail(MC_OUT_OF_BOUNDS, "array", (int64_t)index, "index %lld past the end of an array (line %u, column %u)",
          (long long)index, at->line, at->column);
}
static void bad_division(const source_location *at) {
  mc_fail(MC_ARITHMETIC, NULL, -1, "integer division by zero, or overflow (line %u, column %u)", at->line, at->column);
}
void __ubsan_handle_out_of_bounds(source_location *at, uint64_t index) { bad_index(at, index); }
void __ubsan_handle_out_of_bounds_abort(source_location *at, uint64_t index) { bad_index(at, index); }
void __ubsan_handle_divrem_overflow(source_location *at) { bad_division(at); }
void __ubsan_handle_divrem_overflow_abort(source_location *at) { bad_division(at); }

/* ---- what clang's code calls for narrow floats, and <math.h> with a pointer ---- */

float frexpf(float, int *);
float mc_frexp(float x, int *exponent) { return frexpf(x, exponent); }
__bf16 __truncsfbf2(float x) { /* to nearest even */
  uint32_t u;
  memcpy(&u, &x, 4);
  const int nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
  const uint16_t bits = (uint16_t)(nan ? u >> 16 | 0x40 : (u + 0x7FFF + (u >> 16 & 1)) >> 16);
  __bf16 r;
  memcpy(&r, &bits, 2);
  return r;
}

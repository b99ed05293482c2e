/* Memory: where buffers and threadgroup arrays live, and what every load and store is checked for.
 *
 * Each region of host memory is copied to the middle of a slot of its own in a reserved range of
 * addresses, far from the next one: an index that is wrong by gigabytes still falls into the slot of its buffer, so
 * that the message can name it. What was stored is copied back. In checked mode, beside each region lies its shadow:
 * per cell the last store and the last loads, as stamps.
 */
#define _GNU_SOURCE
#include "runtime.h"
#include "shadow.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define SLOT_SHIFT 36u
#define ARRAY_SHIFT 20u /* threadgroup arrays: 1 MB apart */
#define POISON 0xFF     /* NaN as a float, -1 as an integer */

typedef struct {
  uint64_t base, bytes, mapped_at, mapped_bytes;
  uint64_t dirty_begin, dirty_end;
  cell *cells;
  uint64_t cell_bytes;
  uint32_t shift; /* log2 of bytes per cell */
  mc_region *host;
  mc_buffer *only; /* when one buffer has the region to itself */
  uint8_t constant, starts_unwritten;
} region;

typedef struct {
  const char *name;
  uint64_t base, bytes;
  uint32_t shift, serial; /* log2 of bytes per cell; the threadgroup that last declared it */
  cell *cells;
} array;

static uint64_t arena, arena_bytes;
static region regions[MC_MAX_REGIONS];
static array arrays[MC_MAX_ARRAYS];
static cell *array_cells; /* MC_MAX_ARRAYS times threadgroup_memory_limit cells */
static uint64_t array_memory;

static uint32_t log2_of(uint32_t power) {
  uint32_t n = 0;
  while (1u << n < power) n++;
  return n;
}

static void *map(void *at, uint64_t bytes, int protection) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
  void *p = mmap(at, bytes, protection, flags, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}

static uint64_t slot(uint32_t i) { return arena + ((uint64_t)i << SLOT_SHIFT); }

int mc_memory_begin(void) {
  mc_launch *l = mc_now;
  if (!arena) {
    arena_bytes = (uint64_t)(MC_MAX_REGIONS + 1) << SLOT_SHIFT;
    arena = (uint64_t)(uintptr_t)map(NULL, arena_bytes, PROT_NONE);
    if (!arena) return -1;
    /* The last slot is threadgroup memory. Its arrays and their shadow stay mapped. */
    array_memory = slot(MC_MAX_REGIONS) + (1ull << (SLOT_SHIFT - 1));
    const uint64_t cells = (uint64_t)MC_MAX_ARRAYS * (32u << 10) * sizeof(cell);
    if (!map((void *)(uintptr_t)array_memory, (uint64_t)MC_MAX_ARRAYS << ARRAY_SHIFT, PROT_READ | PROT_WRITE)) return -1;
    array_cells = map(NULL, cells, PROT_READ | PROT_WRITE);
    if (!array_cells) return -1;
  }
  memset(arrays, 0, sizeof arrays);
  /* Serials start at 1 in each launch; stamps of the last launch must not look like this one's. */
  madvise(array_cells, (uint64_t)MC_MAX_ARRAYS * (32u << 10) * sizeof(cell), MADV_DONTNEED);
  l->threadgroup_bytes = 0;
  memset(regions, 0, sizeof regions);
  for (uint32_t i = 0; i < l->region_count; i++) {
    region *r = &regions[i];
    r->host = &l->regions[i];
    r->bytes = r->host->bytes;
    r->shift = log2_of(r->host->granule);
    /* The region ends with a page, so that what slips past the checks still meets the guard. */
    const uint64_t padded = (r->bytes + r->host->phase + 15) / 16 * 16;
    r->mapped_bytes = (padded + MC_PAGE - 1) / MC_PAGE * MC_PAGE + MC_PAGE;
    r->mapped_at = slot(i) + (1ull << (SLOT_SHIFT - 1));
    if (!map((void *)(uintptr_t)r->mapped_at, r->mapped_bytes, PROT_READ | PROT_WRITE)) return -1;
    r->base = r->mapped_at + r->mapped_bytes - padded + r->host->phase;
    if (l->checked) {
      r->cell_bytes = ((r->bytes >> r->shift) + 2) * sizeof(cell);
      r->cells = map(NULL, r->cell_bytes, PROT_READ | PROT_WRITE);
      if (!r->cells) return -1;
    }
    memcpy((void *)(uintptr_t)r->base, (void *)(uintptr_t)r->host->host, r->bytes);
    r->dirty_begin = r->bytes;
  }
  uint32_t users[MC_MAX_REGIONS] = {0};
  for (uint32_t i = 0; i < l->buffer_count; i++) {
    mc_buffer *b = &l->buffers[i];
    uint32_t k = 0;
    while (k < l->region_count && !(b->host >= l->regions[k].host && b->host + b->bytes <= l->regions[k].host +
                                    l->regions[k].bytes)) k++;
    if (k == l->region_count) return -1;
    region *r = &regions[k];
    b->address = r->base + (b->host - r->host->host);
    r->only = ++users[k] == 1 ? b : NULL;
    r->constant |= (b->flags & MC_CONSTANT) != 0;
    r->starts_unwritten |= (b->flags & MC_UNWRITTEN) != 0;
  }
  return 0;
}

void mc_memory_end(void) {
  mc_launch *l = mc_now;
  for (uint32_t i = 0; i < l->region_count; i++) {
    region *r = &regions[i];
    if (!l->checked && memcmp((void *)(uintptr_t)r->host->host, (void *)(uintptr_t)r->base, r->bytes)) {
      r->dirty_begin = 0;
      r->dirty_end = r->bytes;
    }
    if (r->dirty_end > r->dirty_begin)
      memcpy((void *)(uintptr_t)(r->host->host + r->dirty_begin), (void *)(uintptr_t)(r->base + r->dirty_begin),
             r->dirty_end - r->dirty_begin);
    if (r->only && r->starts_unwritten && l->checked) {
      const uint64_t cells = r->bytes >> r->shift;
      for (uint64_t c = cells; c-- > 0;)
        if (!r->cells[c].stored) {
          r->only->unwritten++;
          r->only->first_unwritten = c;
        }
    }
    if (l->checked) munmap(r->cells, r->cell_bytes);
    map((void *)(uintptr_t)r->mapped_at, r->mapped_bytes, PROT_NONE);
  }
}

/* ---- who is meant by an address ---- */

static int64_t element(const mc_buffer *b, uint64_t address) {
  const int64_t offset = (int64_t)(address - b->address), item = b->item;
  return offset >= 0 ? offset / item : -((-offset + item - 1) / item);
}

static mc_buffer *buffer_at(const region *r, uint64_t address) {
  if (r->only) return r->only;
  mc_buffer *nearest = &mc_now->buffers[r->host->first];
  for (uint32_t i = 0; i < mc_now->buffer_count; i++) {
    mc_buffer *b = &mc_now->buffers[i];
    if (address - b->address < b->bytes && b->address - r->base < r->bytes) return b;
  }
  return nearest;
}

const char *mc_nearest_buffer(uint64_t address, int64_t *index) {
  *index = -1;
  if (address - arena >= arena_bytes) return NULL;
  const uint32_t k = (uint32_t)((address - arena) >> SLOT_SHIFT);
  if (k >= mc_now->region_count) return NULL;
  const mc_buffer *b = buffer_at(&regions[k], address);
  *index = element(b, address);
  return b->name;
}

/* ---- races ---- */

static const char *verb(int store, uint64_t stamp) { return stamp & ATOMIC ? "atomic access" : store ? "store" : "load"; }

static void race(const char *name, int64_t index, const cell *c, int with_store, uint64_t now, int store,
                 const char *space) {
  const uint64_t other = with_store ? c->stored : c->loaded;
  char who[128] = "several threads", group[48];
  if (SPREAD(other) == ONE_THREAD) {
    mc_describe_group((uint32_t)SERIAL(other), group, sizeof group);
    snprintf(who, sizeof who, "thread %u of threadgroup %s", THREAD(other), group);
  }
  mc_fail(MC_DATA_RACE, name, index, "%s of %s memory not ordered with the %s by %s", verb(store, now), space,
          verb(with_store, other), who);
}

/* ---- every access ---- */

static void outside(uint64_t p, uint32_t n, int store) {
  const char *what = store ? "store" : "load";
  if (mc_is_thread_memory(p)) mc_fail_thread_memory();
  int64_t index;
  const char *name = mc_nearest_buffer(p, &index);
  if (name) mc_fail(MC_OUT_OF_BOUNDS, name, index, "%s of %u bytes outside the buffer", what, n);
  mc_fail(MC_OUT_OF_BOUNDS, NULL, -1, "%s of %u bytes at %#llx, which is in no buffer", what, n, (unsigned long long)p);
}

static void in_array(uint64_t p, uint32_t n, int store, uint64_t atomic) {
  const int64_t offset = (int64_t)(p - array_memory);
  const uint32_t k = offset < 0 ? 0 : (uint32_t)(offset >> ARRAY_SHIFT);
  if (k >= MC_MAX_ARRAYS || !arrays[k].name) outside(p, n, store);
  array *a = &arrays[k];
  if (p < a->base || p - a->base > a->bytes - n || n > a->bytes)
    mc_fail(MC_OUT_OF_BOUNDS, a->name, (int64_t)(p - a->base) >> a->shift,
            "%s of %u bytes outside the threadgroup array", store ? "store" : "load", n);
  const uint64_t now = mc_clock_threadgroup | atomic;
  for (uint64_t g = (p - a->base) >> a->shift; g <= (p - a->base + n - 1) >> a->shift; g++) {
    cell *c = &a->cells[g];
    if (SERIAL(c->stored) != mc_group_serial) c->stored = 0; /* an earlier threadgroup's */
    if (SERIAL(c->loaded) != mc_group_serial) c->loaded = 0;
    if (!store && !c->stored)
      mc_note(MC_UNINITIALISED_READ, a->name, (int64_t)g, "load of threadgroup memory that was never stored to");
    const enum conflict found = touch(c, now, store);
    if (found) race(a->name, (int64_t)g, c, found == WITH_STORE, now, store, "threadgroup");
  }
}

void mc_access(uint64_t p, uint32_t n, int store, uint64_t atomic) {
  if (p - arena >= arena_bytes) {
    /* The thread's own stack, and constant tables in the code (which are read-only). */
    if (p - (uint64_t)(uintptr_t)mc_self->stack < MC_STACK_BYTES - MC_PAGE) return;
    if (!store && p >= mc_now->code_begin && p < mc_now->code_end) return;
    outside(p, n, store);
  }
  const uint32_t k = (uint32_t)((p - arena) >> SLOT_SHIFT);
  if (k == MC_MAX_REGIONS) {
    in_array(p, n, store, atomic);
    return;
  }
  region *r = &regions[k];
  const uint64_t offset = p - r->base;
  if (k >= mc_now->region_count || n > r->bytes || offset > r->bytes - n) outside(p, n, store);
  mc_buffer *b = buffer_at(r, p);
  if (store) {
    if (r->constant) mc_fail(MC_READ_ONLY, b->name, element(b, p), "store to a constant buffer");
    b->store_bytes += n;
    if (offset < r->dirty_begin) r->dirty_begin = offset;
    if (offset + n > r->dirty_end) r->dirty_end = offset + n;
  } else {
    b->load_bytes += n;
  }
  const uint64_t now = mc_clock_device | atomic;
  for (uint64_t g = offset >> r->shift; g <= (offset + n - 1) >> r->shift; g++) {
    cell *c = &r->cells[g];
    if (!store && r->starts_unwritten && !c->stored)
      mc_note(MC_UNINITIALISED_READ, b->name, element(b, p), "load of an output element that was never stored to");
    const enum conflict found = touch(c, now, store);
    if (found)
      race(b->name, element(b, r->base + (g << r->shift)), c, found == WITH_STORE, now, store, "device");
  }
}

/* ---- threadgroup memory (msl/metal_threadgroup) ---- */

uint64_t mc_threadgroup_memory(int site, uint64_t bytes, uint32_t cell_bytes, const char *name) {
  if (site >= MC_MAX_ARRAYS)
    mc_fail(MC_RESOURCE_LIMIT, name, -1, "more than %d threadgroup variables", MC_MAX_ARRAYS);
  array *a = &arrays[site];
  if (!a->name) {
    mc_now->threadgroup_bytes += (uint32_t)((bytes + 15) / 16 * 16);
    if (bytes > mc_now->threadgroup_memory_limit || mc_now->threadgroup_bytes > mc_now->threadgroup_memory_limit)
      mc_fail(MC_RESOURCE_LIMIT, name, -1, "%llu bytes make more threadgroup memory than Metal's %u bytes",
              (unsigned long long)bytes, mc_now->threadgroup_memory_limit);
    a->name = name;
    a->bytes = bytes;
    a->shift = log2_of(cell_bytes);
    a->base = array_memory + ((uint64_t)site << ARRAY_SHIFT) + (1u << (ARRAY_SHIFT - 1));
    a->cells = array_cells + (uint64_t)site * (32u << 10);
  }
  if (a->serial != mc_group_serial) {
    a->serial = mc_group_serial;
    memset((void *)(uintptr_t)a->base, POISON, a->bytes);
  }
  return a->base;
}

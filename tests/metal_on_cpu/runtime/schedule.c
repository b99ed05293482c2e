/* A threadgroup: one fiber per thread, each on its own guarded stack, resumed in an order drawn from the seed; the
 * meetings (barriers, simd operations) where fibers wait for each other; and what a thread is told of itself. */
#define _GNU_SOURCE
#include "runtime.h"
#include "shadow.h"

#include <string.h>
#include <sys/mman.h>

mc_fiber *mc_self;
mc_simdgroup mc_simdgroups[MC_MAX_THREADS / MC_LANES];
uint32_t mc_group_serial;
uint64_t mc_clock_device, mc_clock_threadgroup;

static mc_fiber fibers[MC_MAX_THREADS];
static uint32_t ready[MC_MAX_THREADS], ready_count;
static unsigned char *stacks;
static void *main_stack_pointer;
uint64_t mc_random_state;
static const uint64_t *kernel_arguments;

/* The running threadgroup. */
static uint32_t position[3], extent[3], thread_count, done_count;
static uint32_t barrier_arrived;
static const void *barrier_site;
static int barrier_line;
static uint16_t epoch_device, epoch_threadgroup;

uint32_t mc_random_below(uint32_t n) { /* splitmix64, scaled */
  uint64_t z = mc_random_state += 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  return (uint32_t)(((z >> 32) * n) >> 32);
}

void mc_where(uint32_t thread[3], uint32_t threadgroup[3]) {
  memcpy(threadgroup, position, sizeof position);
  if (mc_self) mc_split(mc_self->index, extent, thread);
}

/* ---- context switch ---- */

void mc_switch(void **save, void *load);
void mc_fiber_start(void);

#if defined(__x86_64__)
__asm__(
    ".text\n.globl mc_switch\n.type mc_switch,@function\nmc_switch:\n"
    "  push %rbp\n  push %rbx\n  push %r12\n  push %r13\n  push %r14\n  push %r15\n"
    "  mov %rsp, (%rdi)\n  mov %rsi, %rsp\n"
    "  pop %r15\n  pop %r14\n  pop %r13\n  pop %r12\n  pop %rbx\n  pop %rbp\n  ret\n");
#define SAVED_WORDS 6
#define RETURN_WORD 6
#define FRAME_WORDS 8 /* the return address and one word more, so that the stack is aligned at entry */
#elif defined(__aarch64__)
__asm__(
    ".text\n.globl mc_switch\n.type mc_switch,%function\nmc_switch:\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
#define RETURN_WORD 11
#define FRAME_WORDS 20
#else
#error "metal_on_cpu has no context switch for this processor"
#endif

static void stamp_self(void) {
  const mc_simdgroup *s = &mc_simdgroups[mc_self->simdgroup];
  mc_clock_device = STAMP(mc_group_serial, mc_self->index, epoch_device, s->epoch_device);
  mc_clock_threadgroup = STAMP(mc_group_serial, mc_self->index, epoch_threadgroup, s->epoch_threadgroup);
}

static mc_fiber *take_ready(void) {
  if (ready_count == 0) return NULL;
  const uint32_t pick = mc_random_below(ready_count);
  mc_fiber *next = &fibers[ready[pick]];
  ready[pick] = ready[--ready_count];
  return next;
}

/* Leaves the running fiber for one that can go on, or for the scheduler when there is none. */
static void leave(void) {
  mc_fiber *self = mc_self, *next = take_ready();
  if (next != self) {
    mc_self = next;
    mc_switch(&self->stack_pointer, next ? next->stack_pointer : main_stack_pointer);
    mc_self = self;
  }
  stamp_self();
}

static void wake(mc_fiber *f) {
  f->state = MC_READY;
  ready[ready_count++] = f->index;
}

void mc_fiber_start(void) {
  stamp_self();
  mc_now->entry(kernel_arguments);
  mc_self->state = MC_DONE;
  done_count++;
  mc_simdgroup *s = mc_my_simdgroup();
  s->done++;
  if (s->arrived)
    mc_fail(MC_DIVERGENCE, NULL, -1, "the thread ended while lanes of its simdgroup wait in a simd operation (line %d)",
            s->line);
  if (barrier_arrived)
    mc_fail(MC_DIVERGENCE, NULL, -1, "the thread ended while others wait in threadgroup_barrier (line %d)",
            barrier_line);
  mc_fiber *next = take_ready();
  void *unused;
  mc_self = next;
  /* A fiber that is entered for the first time starts at this function's top; one that waited restores mc_self. */
  mc_switch(&unused, next ? next->stack_pointer : main_stack_pointer);
  __builtin_unreachable();
}

/* ---- meetings ---- */

mc_simdgroup *mc_my_simdgroup(void) { return &mc_simdgroups[mc_self->simdgroup]; }

int mc_simd_arrive(int op, const void *site, int line, const char *name) {
  mc_simdgroup *s = mc_my_simdgroup();
  mc_self->line = line;
  mc_self->waits_in = name;
  if (s->done)
    mc_fail(MC_DIVERGENCE, NULL, -1, "%s (line %d) is not reached by %u lanes of the simdgroup, which have ended", name,
            line, s->done);
  if (s->arrived == 0) {
    s->site = site;
    s->line = line;
    s->op = op;
  } else if (s->site != site || s->op != op) {
    mc_fail(MC_DIVERGENCE, NULL, -1, "%s (line %d) while another lane of the simdgroup waits in line %d%s", name, line,
            s->line, s->line == line ? ", reached by another branch" : "");
  }
  s->arrived++;
  if (s->arrived == s->lanes) return 1;
  mc_self->state = MC_WAITING;
  leave();
  return 0;
}

void mc_simd_release(void) {
  mc_simdgroup *s = mc_my_simdgroup();
  mc_fiber *first = &fibers[mc_self->simdgroup * MC_LANES];
  for (uint32_t i = 0; i < s->lanes; i++)
    if (&first[i] != mc_self) wake(&first[i]);
  s->arrived = 0;
  s->parity ^= 1;
  mc_now->simd_operations++;
}

void mc_threadgroup_barrier(uint32_t flags, int line) {
  const void *site = __builtin_return_address(0);
  const mc_simdgroup *s = mc_my_simdgroup();
  mc_self->line = line;
  mc_self->waits_in = "threadgroup_barrier";
  if (done_count)
    mc_fail(MC_DIVERGENCE, NULL, -1, "threadgroup_barrier (line %d) is not reached by %u threads, which have ended",
            line, done_count);
  if (s->arrived && s->op >= 0)
    mc_fail(MC_DIVERGENCE, NULL, -1,
            "threadgroup_barrier (line %d) while another lane of the simdgroup waits in a simd operation (line %d)",
            line, s->line);
  if (barrier_arrived == 0) {
    barrier_site = site;
    barrier_line = line;
  } else if (barrier_site != site) {
    mc_fail(MC_DIVERGENCE, NULL, -1, "threadgroup_barrier (line %d) while another thread waits in the one of line %d%s",
            line, barrier_line, line == barrier_line ? ", reached by another branch" : "");
  }
  if (++barrier_arrived < thread_count) {
    mc_self->state = MC_WAITING;
    leave();
    return;
  }
  barrier_arrived = 0;
  mc_now->barriers++;
  /* mem_device = 1, mem_threadgroup = 2: a barrier orders only the memory it names. */
  if (flags & 1) epoch_device++;
  if (flags & 2) epoch_threadgroup++;
  for (uint32_t i = 0; i < (thread_count + MC_LANES - 1) / MC_LANES; i++) {
    if (flags & 1) mc_simdgroups[i].epoch_device++;
    if (flags & 2) mc_simdgroups[i].epoch_threadgroup++;
  }
  for (uint32_t i = 0; i < thread_count; i++)
    if (&fibers[i] != mc_self) wake(&fibers[i]);
  mc_self->state = MC_WAITING;
  wake(mc_self);
  leave();
}

void mc_simdgroup_barrier(uint32_t flags, int line) {
  mc_simdgroup *s = mc_my_simdgroup();
  if (mc_simd_arrive(-1, __builtin_return_address(0), line, "simdgroup_barrier")) {
    if (flags & 1) s->epoch_device++;
    if (flags & 2) s->epoch_threadgroup++;
    mc_simd_release();
    stamp_self();
  }
}

/* ---- attributes, in the order of signature.py's ATTRIBUTES ---- */

uint32_t mc_lane(void) { return mc_self->lane; }

void mc_attribute(int which, uint32_t out[3]) {
  const uint32_t *g = mc_now->group;
  uint32_t in_group[3];
  mc_split(mc_self->index, extent, in_group);
  out[1] = out[2] = 0;
  switch (which) {
    case 0: out[0] = (g[0] * g[1] * g[2] + 3) / 4; break;  /* dispatch_quadgroups_per_threadgroup */
    case 1: out[0] = (g[0] * g[1] * g[2] + 31) / 32; break; /* dispatch_simdgroups_per_threadgroup */
    case 2: memcpy(out, g, sizeof position); break;        /* dispatch_threads_per_threadgroup */
    case 3: out[0] = 0; break;                             /* grid_origin */
    case 4: memcpy(out, mc_now->grid, sizeof position); break; /* grid_size */
    case 5: out[0] = mc_self->index / 4; break;            /* quadgroup_index_in_threadgroup */
    case 6: out[0] = (thread_count + 3) / 4; break;        /* quadgroups_per_threadgroup */
    case 7: out[0] = mc_self->simdgroup; break;            /* simdgroup_index_in_threadgroup */
    case 8: out[0] = (thread_count + 31) / 32; break;      /* simdgroups_per_threadgroup */
    case 9: out[0] = MC_LANES; break;                      /* thread_execution_width */
    case 10: out[0] = mc_self->index % 4; break;           /* thread_index_in_quadgroup */
    case 11: out[0] = mc_self->lane; break;                /* thread_index_in_simdgroup */
    case 12: out[0] = mc_self->index; break;               /* thread_index_in_threadgroup */
    case 13:                                               /* thread_position_in_grid */
      for (int i = 0; i < 3; i++) out[i] = position[i] * g[i] + in_group[i];
      break;
    case 14: memcpy(out, in_group, sizeof position); break;     /* thread_position_in_threadgroup */
    case 15: memcpy(out, position, sizeof position); break;     /* threadgroup_position_in_grid */
    case 16: memcpy(out, mc_groups, sizeof position); break;       /* threadgroups_per_grid */
    case 17: memcpy(out, mc_now->grid, sizeof position); break; /* threads_per_grid */
    case 18: out[0] = MC_LANES; break;                     /* threads_per_simdgroup */
    default: memcpy(out, extent, sizeof position); break;  /* threads_per_threadgroup */
  }
}

/* ---- a threadgroup ---- */

static void report_stuck(void) {
  /* No thread can run and some have not ended: they wait for threads that will not come. */
  for (uint32_t i = 0; i < thread_count; i++) {
    if (fibers[i].state != MC_WAITING) continue;
    const mc_fiber *a = &fibers[i], *b = NULL;
    for (uint32_t j = i + 1; j < thread_count && !b; j++)
      if (fibers[j].state == MC_WAITING && (fibers[j].line != a->line || fibers[j].waits_in != a->waits_in))
        b = &fibers[j];
    mc_self = &fibers[i];
    if (b)
      mc_fail(MC_DIVERGENCE, NULL, -1, "thread %u waits in %s (line %d), thread %u in %s (line %d): neither can go on",
              a->index, a->waits_in, a->line, b->index, b->waits_in, b->line);
    mc_fail(MC_DIVERGENCE, NULL, -1, "%s (line %d) is not reached by all threads", a->waits_in, a->line);
  }
}

int mc_prepare_stacks(void) {
  if (stacks) return 0;
  const size_t bytes = (size_t)MC_MAX_THREADS * MC_STACK_BYTES;
  stacks = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) {
    stacks = NULL;
    return -1;
  }
  for (uint32_t i = 0; i < MC_MAX_THREADS; i++) {
    mprotect(stacks + (size_t)i * MC_STACK_BYTES, MC_PAGE, PROT_NONE);
    fibers[i].stack = stacks + (size_t)i * MC_STACK_BYTES + MC_PAGE;
  }
  return 0;
}

void mc_run_threadgroup(uint32_t linear, const uint64_t *arguments) {
  kernel_arguments = arguments;
  mc_split(linear, mc_groups, position);
  for (int i = 0; i < 3; i++) { /* dispatchThreads: the last threadgroup of a row may be smaller */
    const uint32_t rest = mc_now->grid[i] - position[i] * mc_now->group[i];
    extent[i] = rest < mc_now->group[i] ? rest : mc_now->group[i];
  }
  thread_count = extent[0] * extent[1] * extent[2];
  done_count = barrier_arrived = ready_count = 0;
  epoch_device = epoch_threadgroup = 0;
  for (uint32_t i = 0; i * MC_LANES < thread_count; i++) {
    mc_simdgroup *s = &mc_simdgroups[i];
    const uint32_t rest = thread_count - i * MC_LANES;
    s->lanes = rest < MC_LANES ? rest : MC_LANES;
    s->arrived = s->done = s->parity = 0;
    s->epoch_device = s->epoch_threadgroup = 0;
  }
  for (uint32_t i = 0; i < thread_count; i++) {
    mc_fiber *f = &fibers[i];
    f->index = i;
    f->lane = i % MC_LANES;
    f->simdgroup = (uint16_t)(i / MC_LANES);
    /* Staggered, or the tops of all stacks would share one set of the cache. */
    uint64_t *top = (uint64_t *)(f->stack + (MC_STACK_BYTES - MC_PAGE) - (i % 32) * 64);
    uint64_t *sp = top - FRAME_WORDS;
    memset(sp, 0, FRAME_WORDS * sizeof *sp);
    sp[RETURN_WORD] = (uint64_t)(uintptr_t)mc_fiber_start;
    f->stack_pointer = sp;
    wake(f);
  }
  mc_fiber *first = take_ready();
  mc_self = first;
  mc_switch(&main_stack_pointer, first->stack_pointer);
  mc_self = NULL;
  if (done_count != thread_count) report_stuck();
}

int mc_is_thread_memory(uint64_t address) {
  const uint64_t begin = (uint64_t)(uintptr_t)stacks;
  return stacks && address >= begin && address < begin + (uint64_t)MC_MAX_THREADS * MC_STACK_BYTES;
}

void mc_fail_thread_memory(void) {
  mc_fail(MC_RESOURCE_LIMIT, NULL, -1, "more than %u KB of thread memory, or another thread's", MC_STACK_BYTES >> 10);
}

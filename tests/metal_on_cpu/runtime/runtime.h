/* What the parts of the runtime share: the launch as Python sees it (launch.py mirrors these structs field by
 * field), the threads of the threadgroup that runs, and the way to fail.
 *
 * One launch runs at a time (launch.py holds a lock); its threadgroups run one after another, each as a set of
 * fibers. So the state is static, and every check is about what the schedule might have been, not what it was. */
#ifndef MC_RUNTIME_H
#define MC_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#define MC_LANES 32
#define MC_MAX_THREADS 1024
#define MC_STACK_BYTES (256u << 10)
#define MC_PAGE 4096u
#define MC_MAX_REGIONS 96
#define MC_MAX_ARRAYS 64

enum mc_error {
  MC_OK,
  MC_OUT_OF_BOUNDS,
  MC_MISALIGNED,
  MC_READ_ONLY,
  MC_DATA_RACE,
  MC_DIVERGENCE,
  MC_RESOURCE_LIMIT,
  MC_UNINITIALISED_READ,
  MC_ARITHMETIC,
  MC_RUNAWAY,
};

enum mc_buffer_flags { MC_UNWRITTEN = 1, MC_CONSTANT = 2 };

typedef struct {
  const char *name;
  uint64_t host, bytes; /* the caller's memory */
  uint32_t item, flags; /* bytes per element; mc_buffer_flags */
  uint64_t address;     /* out: where the kernel sees it */
  uint64_t load_bytes, store_bytes;    /* out */
  uint64_t unwritten, first_unwritten; /* out: elements of an MC_UNWRITTEN buffer that no thread stored */
} mc_buffer;

/* Host memory that the kernel sees in one piece. Buffers that overlap on the host (a pool passed twice) share one. */
typedef struct {
  uint64_t host, bytes;
  uint32_t granule, first;  /* bytes per shadow cell; the first of its buffers */
  uint32_t phase, reserved; /* where it starts, modulo 16 */
} mc_region;

typedef struct {
  const char *kernel;
  void (*entry)(const uint64_t *arguments);
  uint64_t code_begin, code_end; /* out: where the kernel's object is loaded */
  mc_buffer *buffers;
  mc_region *regions;
  uint32_t buffer_count, region_count;
  uint32_t grid[3], group[3];
  uint64_t seed;
  uint32_t checked, threadgroup_memory_limit;
  uint32_t seconds; /* after which the launch is given up */
  /* out */
  uint32_t error;
  uint32_t threadgroup_bytes, reserved;
  uint64_t address; /* of the code that went wrong, 0 if not known */
  int64_t index;
  uint32_t thread[3], threadgroup[3];
  uint64_t barriers, simd_operations;
  char where[64];
  char message[1024];
} mc_launch;

typedef struct {
  void *stack_pointer;
  unsigned char *stack; /* lowest usable address */
  uint32_t index, lane;
  uint16_t simdgroup;
  uint8_t state; /* READY, WAITING, DONE */
  int line;      /* of the call it waits in */
  const char *waits_in;
} mc_fiber;
enum { MC_READY, MC_WAITING, MC_DONE };

typedef struct {
  uint32_t lanes, arrived, done, parity;
  const void *site;
  int line, op;
  uint16_t epoch_device, epoch_threadgroup; /* barriers that ordered this simdgroup's memory so far */
  uint32_t slots[2][MC_LANES][4];           /* what each lane brought, for this meeting and the last */
  uint32_t result[2];
} mc_simdgroup;

/* The parts' own names; what Python and kernels call is declared where it is defined. */
#pragma GCC visibility push(hidden)

/* launch.c */
extern mc_launch *mc_now;
extern uint32_t mc_groups[3];   /* threadgroups per grid */
extern uint64_t mc_accessed_at; /* return address of the last load or store */
_Noreturn void mc_fail(int error, const char *where, int64_t index, const char *format, ...);
/* Notes the error and goes on: a load of data that was not stored yet may turn out to be one half of a race. */
void mc_note(int error, const char *where, int64_t index, const char *format, ...);
void mc_describe_group(uint32_t serial, char *out, size_t size);

/* schedule.c */
extern mc_fiber *mc_self;
extern mc_simdgroup mc_simdgroups[MC_MAX_THREADS / MC_LANES];
extern uint32_t mc_group_serial; /* 1 for the first threadgroup of the launch that runs, and so on */
extern uint64_t mc_clock_device, mc_clock_threadgroup; /* the running thread's stamp for shadow memory */
extern uint64_t mc_random_state;
uint32_t mc_random_below(uint32_t n);
int mc_prepare_stacks(void);
void mc_run_threadgroup(uint32_t linear, const uint64_t *arguments);
void mc_where(uint32_t thread[3], uint32_t threadgroup[3]);
int mc_is_thread_memory(uint64_t address); /* of any thread */
_Noreturn void mc_fail_thread_memory(void);
mc_simdgroup *mc_my_simdgroup(void);
/* Waits until every lane of the simdgroup made the same call. True for the lane that came last, which must store
 * the result and then call mc_simd_release. */
int mc_simd_arrive(int op, const void *site, int line, const char *name);
void mc_simd_release(void);

/* memory.c */
int mc_memory_begin(void);  /* 0, or -1 when address space cannot be had */
void mc_memory_end(void);
const char *mc_nearest_buffer(uint64_t address, int64_t *index); /* NULL if there is none */
void mc_access(uint64_t address, uint32_t bytes, int store, uint64_t atomic);

#pragma GCC visibility pop

static inline void mc_split(uint32_t linear, const uint32_t size[3], uint32_t out[3]) {
  out[0] = linear % size[0];
  out[1] = linear / size[0] % size[1];
  out[2] = linear / size[0] / size[1];
}

#endif
